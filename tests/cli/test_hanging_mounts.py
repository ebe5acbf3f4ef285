"""A mount that hangs ends no verb: each says which tier does not answer, and ends in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hanging import HangingMount
from tests.support.stacks import stack_file
from tiered_kv.cli import time_limit
from tiered_kv.cli.main import main
from tiered_kv.testing.control import wait_until

TRACE = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}\n'


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingMount]:
    monkeypatch.setattr(time_limit, "_GRACE_S", 0.1)
    monkeypatch.setattr("tiered_kv_nvme.sizing._ROOM_S", 0.1)
    before = threading.active_count()
    mount = HangingMount(tmp_path / "mount")
    (tmp_path / "mount").mkdir()
    mount.install(monkeypatch)
    yield mount
    mount.answer()
    wait_until(lambda: threading.active_count() == before, 60.0)


@pytest.mark.parametrize("kind", ["fs", "nvme"])
@pytest.mark.parametrize(
    ("verb", "status"),
    [("inspect", 1), ("check", 1), ("purge", 1), ("bench", 1), ("replay", 2), ("serve", 2)],
)
def test_a_verb_says_which_tier_does_not_answer(
    mount: HangingMount, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, verb: str, status: int
) -> None:
    tier = f"type: {kind}, name: shared, path: {mount.path}/kv, capacity: 64MiB, open_timeout: 200ms"
    file = stack_file(tmp_path, tier, "type: memory, capacity: 1MiB")
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    options = {
        "inspect": ("--timeout", "100ms"),
        "purge": ("--timeout", "100ms", "--yes"),
        "bench": ("--blocks", "4", "--rounds", "1"),
        "replay": ("--trace", str(trace)),
        "serve": ("--socket", str(tmp_path / "socket")),
    }
    mount.hang()
    found = main([verb, file, *options.get(verb, ())])
    said = " ".join("".join(capsys.readouterr()).split())
    assert found == status, said
    assert "shared" in said
    assert "no answer in" in said
    assert f"{mount.path}/kv" in said.replace(" ", "")
    assert mount.hangs > 0


def test_an_engine_s_stack_whose_tier_hangs_is_told_so(
    mount: HangingMount, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.cli.stacks._FIND_IN_DIRECTORY_S", 0.1)
    file = tmp_path / "engine.yaml"
    tier = f"{{type: fs, name: shared, path: {mount.path}/kv, capacity: 64MiB, open_timeout: 200ms}}"
    file.write_text(f"primary: {{capacity: 8MiB}}\nsecondary: [{tier}]\n")
    mount.hang()
    for options, status in (((), 2), (("--block-bytes", "64KiB"), 1)):
        assert main(["check", str(file), *options]) == status
        said = " ".join("".join(capsys.readouterr()).split())
        assert "shared" in said
        assert "no answer in" in said


def test_a_count_that_hangs_in_the_middle_ends_too(
    mount: HangingMount, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = stack_file(tmp_path, f"type: nvme, path: {mount.path}/kv, capacity: 64MiB")
    assert main(["check", file]) == 0
    for calls in (1, 3, 6):
        mount.hang(calls)
        assert main(["inspect", file, "--verify", "--timeout", "100ms"]) == 1
        assert "no answer in" in "".join(capsys.readouterr())
        mount.answer()
    assert main(["inspect", file]) == 0
