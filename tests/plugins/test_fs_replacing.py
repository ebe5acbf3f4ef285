"""Blocks that are replaced since they cannot be read: their bytes leave the ledger's total, once, never too early."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiered_kv.testing.disk_use import occupied_bytes
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.codec_set import CodecSet
from tiered_kv_fs import blocks as blocks_module
from tiered_kv_fs.blocks import BlockFiles, Moved
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.layout import LEDGER_NAME, block_name
from tiered_kv_fs.ledger import Ledger, LedgerState
from tiered_kv_fs.posix import occupied_bytes as occupied_by
from tiered_kv_fs.posix import round_up, take_away
from tiered_kv_fs.replaced import Replaced
from tiered_kv_fs.settings import FsSettings

DIGEST = bytes(range(16))
BLOCK_BYTES = 65_536
RECORD_BYTES = round_up(BLOCK_BYTES + 1)  # the block, and its header
EPOCH = "0" * 16
(KEY,) = make_keys(1)
NAME = block_name(KEY, DIGEST)


def codecs(key_id: int, secret: str) -> CodecSet:
    entry = {"path": "/nowhere", "capacity": 1 << 30, "codec": "aes-256-gcm"}
    return FsSettings(**entry, encryption={"keys": {key_id: secret * 32}}).open_codecs()


@dataclass
class Process:
    """One of the processes that replace each other's block."""

    files: BlockFiles
    owner: str

    def meet(self) -> None:
        """Load the block, and find that it cannot be read."""
        assert self.files.load(EPOCH, [KEY], [memoryview(bytearray(BLOCK_BYTES))]).reason == "unknown_key"

    def store(self) -> Moved:
        return self.files.store(EPOCH, self.owner, [KEY], [memoryview(bytes(BLOCK_BYTES))])


@pytest.fixture
def processes(tmp_path: Path) -> list[Process]:
    return [
        Process(BlockFiles(str(tmp_path), DIGEST, BLOCK_BYTES, codecs(number, f"{number}{number}"), Counters()), owner)
        for number, owner in ((1, "a" * 16), (2, "b" * 16), (3, "c" * 16))
    ]


@pytest.fixture
def lying(tmp_path: Path) -> Callable[[], dict[str, int]]:
    """Return what each file in the block's directory occupies."""
    shard = tmp_path / EPOCH / NAME[:2]
    return lambda: {path.name: occupied_by(path.stat()) for path in shard.iterdir()}


def before_it_is_taken(monkeypatch: pytest.MonkeyPatch, *happenings: Callable[[], object]) -> None:
    """Have something happen right before each of the next times that a block is taken away."""
    waiting = list(happenings)

    def taken_away(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
        if waiting:
            waiting.pop(0)()
        return take_away(path, aside, dir_fd)

    monkeypatch.setattr(blocks_module, "take_away", taken_away)


def test_who_replaces_a_block_takes_the_bytes_off_that_it_was_charged_with(
    processes: list[Process], lying: Callable[[], dict[str, int]]
) -> None:
    one, other, _ = processes
    assert one.store().freed_bytes == 0
    assert one.store().freed_bytes == 0, "it is there and can be read"
    for process in (other, one, other):
        process.meet()
        moved = process.store()
        assert moved.done == [KEY]
        assert moved.freed_bytes == RECORD_BYTES <= moved.used_bytes
        assert lying() == {NAME: RECORD_BYTES}


def test_two_that_replace_a_block_at_once_take_off_what_each_of_them_took_away(
    processes: list[Process], lying: Callable[[], dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = processes
    first = one.store()
    other.meet()
    third.meet()
    moved: list[Moved] = []
    before_it_is_taken(monkeypatch, lambda: moved.append(other.store()))
    moved.append(third.store())  # takes the other's new file away
    assert [each.freed_bytes for each in moved] == [RECORD_BYTES] * 2
    assert lying() == {NAME: RECORD_BYTES}
    charged_bytes = sum(each.used_bytes - each.freed_bytes for each in (first, *moved))
    assert RECORD_BYTES <= charged_bytes < 2 * RECORD_BYTES


def test_what_another_took_away_first_is_not_taken_off_again(
    processes: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, third = processes
    block = tmp_path / EPOCH / NAME[:2] / NAME
    one.store()
    other.meet()
    before_it_is_taken(monkeypatch, block.unlink)
    moved = other.store()
    assert (moved.done, moved.freed_bytes) == ([KEY], 0)
    third.meet()

    def swept(path: str, aside: str, dir_fd: int | None = None) -> os.stat_result | None:
        os.rename(path, aside, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        os.unlink(aside, dir_fd=dir_fd)  # whose count takes it for a leftover
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", lambda *_, **__: None)
            return take_away(path, aside, dir_fd)

    monkeypatch.setattr(blocks_module, "take_away", swept)
    moved = third.store()
    assert (moved.done, moved.freed_bytes) == ([KEY], 0)


def test_a_file_with_another_name_is_not_taken_off_and_a_directory_stays(
    processes: list[Process], tmp_path: Path
) -> None:
    one, other, _ = processes
    block = tmp_path / EPOCH / NAME[:2] / NAME
    one.store()
    os.link(block, tmp_path / "another name")
    other.meet()
    assert other.store().freed_bytes == 0
    one.meet()
    block.unlink()
    (block / "inside").mkdir(parents=True)
    assert one.store().reason == "not_a_file"
    assert (block / "inside").is_dir()
    assert list(block.parent.iterdir()) == [block]


@pytest.fixture
def told() -> tuple[Replaced, LedgerState]:
    state = LedgerState(total_bytes=1000)
    state.mark_count()
    replaced = Replaced()
    replaced.tell(state, "")
    return replaced, state


def test_the_ledger_is_told_once(told: tuple[Replaced, LedgerState]) -> None:
    replaced, state = told
    replaced.add(100, replaced.count)
    replaced.add(50, replaced.count)
    for _ in range(2):
        replaced.tell(state, "")
        assert state.total_bytes == 850


def test_what_a_count_may_have_missed_is_not_told(told: tuple[Replaced, LedgerState]) -> None:
    replaced, state = told
    before = replaced.count
    replaced.add(100, before)
    state.mark_count()
    replaced.tell(state, "")
    assert state.total_bytes == 1000, "noted before the count, told after it"
    replaced.add(100, before)
    replaced.tell(state, "")
    assert state.total_bytes == 1000, "taken away before the count, noted after it"
    state.count = ""
    replaced.tell(state, "")
    replaced.add(100, replaced.count)
    replaced.tell(state, "")
    assert state.total_bytes == 1000, "where there is no word, nobody can tell whether there was a count"
    replaced.add(100, state.mark_count())
    replaced.tell(state, "")
    assert state.total_bytes == 1000, "a word that has not been seen in the ledger"


@pytest.mark.parametrize("limit", ["capacity", "quota"])
def test_blocks_that_are_replaced_again_and_again_cost_no_other_its_place(tmp_path: Path, limit: str) -> None:
    path, limit_bytes = tmp_path / "kv", 8 << 20
    entry: dict[str, object] = {"type": "fs", "path": str(path), "capacity": "64MiB", "lookup_timeout": "60s"}
    entry |= {limit: limit_bytes, "codec": "aes-256-gcm"}
    rigs = [
        rig_of(
            {**entry, "encryption": {"keys": {key_id: secret * 32}}}, block_bytes=BLOCK_BYTES, num_blocks=64, wait_s=60
        )
        for key_id, secret in ((1, "11"), (2, "22"))
    ]
    cold, hot = make_keys(24, "cold"), make_keys(8, "hot")
    replaced_bytes = 0
    try:
        assert rigs[0].store(cold).success
        assert rigs[0].store(hot).success
        for number in range(32):
            rig = rigs[number % 2 == 0]
            (result,) = rig.wait([rig.submit_load(hot)])
            assert result.reason == "unknown_key"
            assert rig.store(hot).success
            replaced_bytes += len(hot) * BLOCK_BYTES
            assert occupied_bytes(path) <= limit_bytes
        assert replaced_bytes > limit_bytes
        assert rigs[0].lookup_all(cold) == [True] * len(cold)
        assert [rig.tier.stats()["evicted_files"] for rig in rigs] == [0, 0]
    finally:
        for rig in rigs:
            rig.close()
    with Ledger(str(path / LEDGER_NAME), 30.0).locked() as state:
        assert state.total_bytes is not None
        assert occupied_bytes(path) <= state.total_bytes < limit_bytes
