"""`tiered-kv export` and `import`: what is in the file comes back, and a file that is not whole is refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import yaml

from tests.support.command import Command
from tests.support.places import Place
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli.main import main
from tiered_kv.copying.archive import HEAD_BYTES
from tiered_kv.toolkit.record import HEADER_BYTES

BLOCKS = 40


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def tenant(folder: Path, kind: str = "nvme", name: str = "alice") -> Tenant:
    folder.mkdir(exist_ok=True)
    return Place(kind, folder).tenant(name)


@pytest.fixture
def source(tmp_path: Path) -> Tenant:
    source = tenant(tmp_path / "source")
    assert source.store(BLOCKS) == BLOCKS
    return source


@pytest.fixture
def file(source: Tenant, tmp_path: Path, command: Command) -> Path:
    """An archive of all blocks."""
    path = tmp_path / "blocks.tkv"
    assert command.json("export", str(source.file), str(path))["copied"] == BLOCKS
    return path


@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_what_was_exported_is_imported_and_passed_over_the_second_time(
    kind: str, file: Path, tmp_path: Path, command: Command
) -> None:
    target = tenant(tmp_path / "target", kind)
    done = command.json("import", str(file), str(target.file))
    assert (done["copied"], done["ok"]) == (BLOCKS, True)
    assert target.load(BLOCKS) == (BLOCKS, 0)
    assert command.json("import", str(file), str(target.file))["present"] == BLOCKS
    assert [path.name for path in file.parent.glob(".*")] == [], "no temporary file is left"


def test_only_the_chosen_blocks_are_in_the_file(source: Tenant, tmp_path: Path, command: Command) -> None:
    (tmp_path / "keys").write_text("\n".join(key.hex() for key in source.keys(3)))
    part = tmp_path / "part.tkv"
    assert command.json("export", str(source.file), str(part), "--keys", str(tmp_path / "keys"))["copied"] == 3
    target = tenant(tmp_path / "target")
    assert "would copy 3 blocks" in command.out("import", str(part), str(target.file), "--dry-run")
    assert not target.path.exists()
    command.json("import", str(part), f"{target.file}:nvme")
    assert target.load(BLOCKS) == (3, 0)
    hottest = command.json("export", str(source.file), str(tmp_path / "hot.tkv"), "--hottest", "20KiB")
    assert hottest["copied"] == (20 << 10) // (BLOCK_BYTES + HEADER_BYTES)


def test_a_file_of_another_namespace_is_refused_with_the_field(file: Path, tmp_path: Path, command: Command) -> None:
    bob = tenant(tmp_path / "bob", name="bob")
    assert "tenant is 'alice' in FROM, 'bob' in TO" in command.err("import", str(file), str(bob.file))
    assert not bob.path.exists()
    described = yaml.safe_load(bob.file.read_text())
    del described["block"]  # an engine's file
    bob.file.write_text(yaml.safe_dump(described))
    assert "tenant is 'alice' in FROM, 'bob' in TO" in command.err("import", str(file), str(bob.file))
    described["namespace"] = {"model": "test"}
    bob.file.write_text(yaml.safe_dump(described))
    assert command.json("import", str(file), str(bob.file))["copied"] == BLOCKS


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], "cut off"),
        (lambda data: data + b"x", "something was added"),
        (lambda data: data[: len(data) // 2], "cut off"),
        (lambda data: data[:HEAD_BYTES], "cut off"),
        (lambda data: b"", "no archive"),
        (lambda data: data[:8] + b"\2" + data[9:], "format version 2"),
        (lambda data: flipped(data, 20), "damaged"),
        (lambda data: flipped(data, HEAD_BYTES + 3), "damaged"),
        (lambda data: flipped(data, len(data) - 1), "table is damaged"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(
    damage: object, says: str, file: Path, tmp_path: Path, command: Command
) -> None:
    assert callable(damage)
    file.write_bytes(damage(file.read_bytes()))
    target = tenant(tmp_path / "target")
    error = command.err("import", str(file), str(target.file))
    assert says in error
    assert str(file) in error
    assert not target.path.exists()


def flipped(data: bytes, at: int, bit: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]


@pytest.mark.parametrize("examples", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_a_flipped_byte_costs_its_own_block_or_the_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], examples: int
) -> None:
    sound, draw = file.read_bytes(), random.Random(3)
    for number in range(examples):
        file.write_bytes(flipped(sound, draw.randrange(len(sound)), 1 << draw.randrange(8)))
        target = tenant(tmp_path / f"target-{number}")
        status = main(["import", str(file), str(target.file), "--json"])
        shown = capsys.readouterr().out
        if status == 2:
            assert not target.path.exists()
        else:
            done = json.loads(shown)
            assert (status, sum(done["damaged"].values()), done["copied"]) == (1, 1, BLOCKS - 1)
            assert target.load(BLOCKS) == (BLOCKS - 1, 0)


def test_an_export_that_writes_nothing_leaves_no_file(source: Tenant, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "none.tkv"
    (tmp_path / "keys").write_text("ab" * 20)
    found = command.json("export", str(source.file), str(path), "--keys", str(tmp_path / "keys"), status=2)
    assert "no file was written" in found["error"]
    path.write_text("mine")
    assert "exists already" in command.err("export", str(source.file), str(path))
    assert path.read_text() == "mine"
    assert "is no directory" in command.err("export", str(source.file), str(tmp_path / "no" / "file.tkv"))
    assert "there is no file" in command.err("import", str(tmp_path / "absent"), str(source.file))
    os.mkfifo(tmp_path / "pipe")
    for each in ("/dev/zero", str(tmp_path), str(tmp_path / "pipe")):
        assert f"'{each}' is no regular file" in command.err("import", each, str(source.file))
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []
