"""`tiered-kv copy` between directories; `trust/test_copies.py` kills it, and copies to servers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.faulty import FourMethodTier
from tests.support.places import Place
from tests.support.stacks import plugged, stack_file
from tests.support.tenants import BLOCK_BYTES, Tenant
from tiered_kv.cli.main import main
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import TierSettings
from tiered_kv.stack.open import open_stack
from tiered_kv.toolkit.administration import Survey, TierAdministration

BLOCKS = 40
KEY = secrets.token_hex(32)
AES: dict[str, Any] = {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY}}}


@pytest.fixture
def copy(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "copy")


def tenant(folder: Path, kind: str = "nvme", name: str = "alice", **settings: object) -> Tenant:
    folder.mkdir(exist_ok=True)
    return Place(kind, folder).tenant(name, **settings)


@pytest.fixture
def source(tmp_path: Path) -> Tenant:
    source = tenant(tmp_path / "source")
    assert source.store(BLOCKS) == BLOCKS
    return source


def keys_file(source: Tenant, path: Path, count: int, first: int = 0) -> Path:
    path.write_text("".join(f"{key.hex()}\n" for key in source.keys(count, first)))
    return path


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["nvme", "fs"])
def test_a_copy_has_every_block_and_a_second_one_passes_over_all(
    kind: str, source: Tenant, tmp_path: Path, copy: Command
) -> None:
    target = tenant(tmp_path / "target", kind)
    before = files(source.path)
    done = copy.json(str(source.file), str(target.file))
    assert (done["copied"], done["present"], done["ok"]) == (BLOCKS, 0, True)
    assert target.load(BLOCKS) == (BLOCKS, 0)
    assert target.verify()[1]["ok"]
    again = copy.json(str(source.file), f"{target.file}:{kind}")
    assert (again["copied"], again["present"], again["ok"]) == (0, BLOCKS, True)
    assert files(source.path) == before, "the source is only read"
    assert "passed over 40 blocks" in copy.out(str(source.file), str(target.file))


def test_directories_need_no_file_and_a_dry_run_makes_nothing(source: Tenant, tmp_path: Path, copy: Command) -> None:
    for kind in ("nvme", "fs"):
        backup = tmp_path / f"backup-{kind}"
        assert "would copy 40 blocks" in copy.out(str(source.path), f"{kind}:{backup}", "--dry-run")
        assert not backup.exists()
        assert copy.json(str(source.path), f"{kind}:{backup}")["copied"] == BLOCKS
        assert copy.json(str(source.path), str(backup))["present"] == BLOCKS
    back = tenant(tmp_path / "back")
    assert copy.json(str(tmp_path / "backup-nvme"), str(back.file))["copied"] == BLOCKS
    assert back.load(BLOCKS) == (BLOCKS, 0)


def test_the_last_written_segments_are_the_hottest(source: Tenant, tmp_path: Path, copy: Command) -> None:
    source.store(400, first=1000)
    segments = sorted(source.path.glob("segment-*"), key=lambda path: path.stat().st_mtime)
    for age, segment in enumerate(segments):
        os.utime(segment, (1e9 + 100 * age, 1e9 + 100 * age))
    target = tenant(tmp_path / "target")
    done = copy.json(str(source.file), str(target.file), "--hottest", "512KiB")
    assert done["copied"] == done["planned"]["blocks"] == (512 << 10) // (BLOCK_BYTES + 128)
    assert done["left_out"]["blocks"] == 440 - done["copied"]
    hottest = sorted(segments, key=lambda path: -path.stat().st_mtime)
    contents = hottest[0].read_bytes() + hottest[1].read_bytes()
    with open_stack(target.file) as stack:
        have = [key for key in source.keys(440 - 40, 1000) + source.keys(40) if target.wrong(stack, [key]) == (1, 0)]
    assert len(have) == done["copied"]
    assert all(source.content(key) in contents for key in have)


def test_a_tier_with_a_capacity_gets_no_more_than_it_keeps(
    source: Tenant, tmp_path: Path, copy: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", 60.0)  # a busy machine makes room later
    source.store(2200, first=1000)
    target = tenant(tmp_path / "target", "fs", capacity="8MiB")
    done = copy.json(str(source.file), str(target.file))
    assert done["left_out"]["blocks"] > 0
    assert done["ok"]
    assert done["copied"] == done["planned"]["blocks"]


def test_a_source_in_use_goes_on_and_a_target_in_use_is_refused(source: Tenant, tmp_path: Path, copy: Command) -> None:
    target = tenant(tmp_path / "target")
    with open_stack(source.file) as stack:
        assert copy.json(str(source.file), str(target.file))["copied"] == BLOCKS
        assert source.wrong(stack, source.keys(BLOCKS)) == (BLOCKS, 0)
    with open_stack(target.file):
        refused = copy.json(str(source.file), str(target.file), status=2)
    assert "in use" in refused["error"]
    assert "stop it first, or copy to a tier that processes share" in refused["error"]
    shared = tenant(tmp_path / "shared", "fs")
    with open_stack(shared.file) as stack:
        assert copy.json(str(source.file), str(shared.file))["copied"] == BLOCKS
        assert shared.wrong(stack, shared.keys(BLOCKS)) == (BLOCKS, 0)


def test_damaged_blocks_are_counted_and_not_copied(source: Tenant, tmp_path: Path, copy: Command) -> None:
    damaged = source.keys(3)
    for key in damaged:
        content = source.content(key)
        (path,) = [path for path in source.path.glob("segment-*") if content in path.read_bytes()]
        data = bytearray(path.read_bytes())
        data[data.index(content) + 100] ^= 1
        path.write_bytes(data)
    target = tenant(tmp_path / "target")
    done = copy.json(str(source.file), str(target.file), status=1)
    assert (done["damaged"], done["copied"]) == ({"checksum": 3}, BLOCKS - 3)
    assert "damaged at the source, not copied: 3 (checksum 3)" in copy.out(str(source.file), str(target.file), status=1)
    assert target.load(BLOCKS) == (BLOCKS - 3, 0)


def test_a_storage_without_keys_is_copied_by_the_keys_of_a_file(source: Tenant, tmp_path: Path, copy: Command) -> None:
    middle, target = tenant(tmp_path / "middle", "fs"), tenant(tmp_path / "target")
    copy.json(str(source.file), str(middle.file))
    error = copy.json(str(middle.file), str(target.file), status=2)["error"]
    assert "tiers of type 'fs' keep no keys" in error
    wanted = keys_file(source, tmp_path / "keys", 10, first=BLOCKS - 5)
    done = copy.json(str(middle.file), str(target.file), "--keys", str(wanted))
    assert (done["copied"], done["gone"], done["ok"]) == (5, 5, True)
    assert "5 blocks of --keys are not at the source" in copy.out(
        str(middle.file), str(target.file), "--keys", str(wanted)
    )
    assert target.load(BLOCKS) == (5, 0)
    assert copy.json(str(source.file), str(target.file), "--keys", str(wanted))["present"] == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "has no keys"), ("zz\n", "line 1: expected a key"), ("# one\n00\n", "line 2: expected a key")],
)
def test_a_wrong_file_of_keys_is_refused(text: str, says: str, source: Tenant, tmp_path: Path, copy: Command) -> None:
    (tmp_path / "keys").write_text(text)
    assert says in copy.err(str(source.file), f"nvme:{tmp_path}/new", "--keys", str(tmp_path / "keys"))


def test_encrypted_blocks_move_without_their_key(tmp_path: Path, copy: Command) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    source = tenant(tmp_path / "source", **AES)
    source.store(BLOCKS)
    backup = tmp_path / "backup"
    assert copy.json(str(source.path), f"nvme:{backup}")["copied"] == BLOCKS
    target = tenant(tmp_path / "target", **AES)
    assert copy.json(str(backup), str(target.file))["copied"] == BLOCKS
    assert target.load(BLOCKS) == (BLOCKS, 0)
    assert not any(source.marker in data for data in [*files(backup).values(), *files(target.path).values()])
    plain = tenant(tmp_path / "plain")
    refused = copy.json(str(source.file), str(plain.file), status=1)
    assert (refused["refused"], refused["copied"]) == ({"unknown_key": BLOCKS}, 0)
    assert plain.load(BLOCKS) == (0, 0)


def test_blocks_are_encoded_anew_only_if_that_is_asked_for(source: Tenant, tmp_path: Path, copy: Command) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    target = tenant(tmp_path / "target", **AES)
    refused = copy.json(str(source.file), str(target.file), status=1)
    assert (refused["refused"], refused["copied"]) == ({"unencrypted": BLOCKS}, 0)
    assert copy.json(str(source.file), str(target.file), "--recode")["copied"] == BLOCKS
    assert target.load(BLOCKS) == (BLOCKS, 0)
    assert not any(source.marker in data for data in files(target.path).values())
    assert (
        "needs the codecs of both ends" in copy.json(str(source.path), str(target.file), "--recode", status=2)["error"]
    )


def test_another_namespace_is_refused_with_the_field_that_differs(
    source: Tenant, tmp_path: Path, copy: Command
) -> None:
    other = tenant(tmp_path / "other", name="bob")
    error = copy.err(str(source.file), str(other.file))
    assert "tenant is 'alice' in FROM, 'bob' in TO" in error
    assert not other.path.exists()


def test_a_compressed_block_moves_as_it_is(tmp_path: Path, copy: Command) -> None:
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    source = tenant(tmp_path / "source", codec="zstd")
    source.store(BLOCKS)
    target = tenant(tmp_path / "target", "fs")
    done = copy.json(str(source.file), str(target.file))
    assert done["copied"] == BLOCKS
    assert done["copied_bytes"] < BLOCKS * BLOCK_BYTES / 2
    assert target.load(BLOCKS) == (BLOCKS, 0)


class Unlisted(TierAdministration):
    """The administration of a tier that a copy cannot read."""

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        return Survey()

    def purge(self, digest: str, deadline: float) -> Any:
        raise NotImplementedError


@contextmanager
def third_party_tiers() -> Iterator[None]:
    with plugged(
        TierType("unlisted", TierSettings, lambda: FourMethodTier, "", lambda: Unlisted),
        TierType("closed", TierSettings, lambda: FourMethodTier),
    ):
        yield


def test_a_tier_that_cannot_take_part_is_refused_by_name(source: Tenant, tmp_path: Path, copy: Command) -> None:
    with third_party_tiers():
        file = stack_file(tmp_path, "type: unlisted", "type: closed")
        for name in ("unlisted", "closed"):
            error = copy.json(f"{file}:{name}", f"nvme:{tmp_path}/new", status=2)["error"]
            assert f"tiers of type '{name}' give no blocks to a copy" in error
        bare = tmp_path / "closed.yaml"
        text = source.file.read_text().partition("secondary:")
        bare.write_text(
            f"{text[0]}secondary:\n- type: closed\n"
            + "".join(f"{x}\n" for x in text[2].splitlines() if not x.startswith(("-", " ")))
        )
        error = copy.json(str(source.file), str(bare), status=2)["error"]
        assert "tiers of type 'closed' take no blocks from a copy" in error


def test_a_target_that_takes_nothing_ends_the_copy(source: Tenant, tmp_path: Path, copy: Command) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    source.store(1200, first=1000)
    done = copy.json(str(source.file), "redis://127.0.0.1:1", status=2)
    assert "it takes no blocks" in done["error"]
    assert done["copied"] == 0


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (("nowhere", "nvme:new"), "there is no file or directory 'nowhere'"),
        (("{source}", "{source}"), "are the same directory"),
        (("{source}:none", "nvme:new"), ".yaml:none: the stack has no secondary tier 'none'"),
        (("{empty}", "nvme:new"), "no tier has written blocks into"),
        (("{source}", "tape://drive"), "no tier type is called 'tape'"),
        (("{source}", "memory:new"), "keep no directory"),
        (("{source}", "fs://user:secret@host/new"), "have no URL"),
    ],
)
def test_ends_that_cannot_be_meant_are_refused(
    ends: tuple[str, str], says: str, source: Tenant, tmp_path: Path, copy: Command
) -> None:
    (tmp_path / "empty").mkdir()
    named = [end.format(source=source.file, empty=tmp_path / "empty") for end in ends]
    error = copy.err(*named)
    assert says in error
    assert "secret" not in error


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--keys", "a", "--hottest", "1GiB"], ["--rate", "fast"], ["--namespace", "ab"]):
        with pytest.raises(SystemExit, match="2"):
            main(["copy", "a", "b", *options])
        assert "error: argument" in capsys.readouterr().err
