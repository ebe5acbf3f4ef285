"""A tier with a bad place on its disk stays in use; one whose disk fails everywhere does not, and keeps its blocks."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bad_files import BadFiles, BadPlace, bad_files
from tests.support.stacks import PATIENT
from tiered_kv import DirectTiers, Namespace, make_offload_key
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import block_content

__all__ = ["bad_files"]  # a fixture

BLOCK_BYTES = 64 << 10
JOB_BLOCKS = 16
WAIT_S = 60.0
of_each_kind = pytest.mark.parametrize("kind", ["nvme", "fs"])


class Host:
    """A host with rows for two jobs: one to store, one to load."""

    def __init__(self, entry: dict[str, object]) -> None:
        self.memory = mmap.mmap(-1, 2 * JOB_BLOCKS * BLOCK_BYTES)
        self.offsets = [number * BLOCK_BYTES for number in range(2 * JOB_BLOCKS)]
        namespace = Namespace(model="test")
        self.tiers = DirectTiers(self.memory, block_bytes=BLOCK_BYTES, tiers=[entry], namespace=namespace)

    def keys(self, job: int) -> list[OffloadKey]:
        return [make_offload_key(b"%8d%8d" % (job, number), 0) for number in range(JOB_BLOCKS)]

    def store(self, keys: list[OffloadKey]) -> int:
        for key, offset in zip(keys, self.offsets, strict=False):
            self.memory[offset : offset + BLOCK_BYTES] = block_content(key, BLOCK_BYTES)
        return sum(self.tiers.wait("store", keys, self.offsets[: len(keys)], timeout_s=WAIT_S))

    def load(self, keys: list[OffloadKey]) -> list[bool]:
        into = self.offsets[JOB_BLOCKS : JOB_BLOCKS + len(keys)]
        loaded = self.tiers.wait("load", keys, into, timeout_s=WAIT_S)
        for key, offset, is_loaded in zip(keys, into, loaded, strict=True):
            assert not is_loaded or self.memory[offset : offset + BLOCK_BYTES] == block_content(key, BLOCK_BYTES)
        return loaded

    def contains(self, keys: list[OffloadKey]) -> list[bool]:
        return self.tiers.wait("contains", keys, timeout_s=WAIT_S)

    def count(self, name: str) -> object:
        ((_, counters),) = [each for each in self.tiers.counters().items() if each[0]]
        return counters[name]


@pytest.fixture
def open_host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    opened: list[Host] = []

    def open_one(kind: str, **settings: object) -> Host:
        entry = {"type": kind, "path": str(tmp_path / "kv"), "capacity": 64 << 20, "breaker_cooldown": 3600.0}
        opened.append(Host({**entry, **PATIENT, **settings}))
        return opened[-1]

    yield open_one
    for host in opened:
        assert host.tiers.close(WAIT_S)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_place_that_refuses_writes_never_opens_the_breaker(
    open_host: Callable[..., Host], bad_files: BadFiles, tmp_path: Path, code: int
) -> None:
    bad_files.code = code
    host = open_host("nvme", capacity=24 << 20, segment=2 << 20)
    assert all(host.store(host.keys(job)) == JOB_BLOCKS for job in range(30))
    segment = sorted((tmp_path / "kv").glob("segment-*"))[3]
    bad_files.writes.append(BadPlace(segment, 512 << 10, 1 << 20))
    assert all(host.store(host.keys(job)) == JOB_BLOCKS for job in range(100, 140))
    assert bad_files.refused > 0
    assert host.count("breaker_opened_total") == 0


@of_each_kind
def test_a_disk_that_refuses_every_write_opens_the_breaker_and_keeps_what_it_has(
    open_host: Callable[..., Host], bad_files: BadFiles, tmp_path: Path, kind: str
) -> None:
    host = open_host(kind)
    keys = host.keys(0)
    assert host.store(keys) == JOB_BLOCKS
    bad_files.writes.append(BadPlace(tmp_path))
    assert [host.store(host.keys(job)) for job in range(1, 7)] == [0] * 6
    assert host.count("breaker_opened_total") == 1


@of_each_kind
def test_one_unreadable_block_is_a_miss_is_stored_anew_and_costs_no_other(
    open_host: Callable[..., Host], bad_files: BadFiles, tmp_path: Path, kind: str
) -> None:
    host = open_host(kind)
    keys = host.keys(0)
    assert host.store(keys) == JOB_BLOCKS
    content = block_content(keys[5], BLOCK_BYTES)
    (bad,) = [
        BadPlace(path, data.index(content) + 4096, data.index(content) + 8192)
        for path in (tmp_path / "kv").rglob("*")
        if path.is_file() and content in (data := path.read_bytes())
    ]
    bad_files.reads.append(bad)
    expected = [key != keys[5] for key in keys]
    assert host.load(keys) == expected
    assert host.contains(keys) == expected
    if kind == "fs":  # another file is another place
        bad_files.reads.clear()
    assert host.store(keys) == JOB_BLOCKS
    assert host.contains(keys) == host.load(keys) == [True] * JOB_BLOCKS
    assert host.count("breaker_opened_total") == 0


def test_a_disk_that_reads_nothing_opens_the_breaker_and_every_block_is_there_afterwards(
    open_host: Callable[..., Host], bad_files: BadFiles, tmp_path: Path
) -> None:
    host = open_host("nvme", breaker_cooldown=0.01)
    keys = host.keys(0)
    assert host.store(keys) == JOB_BLOCKS
    bad_files.reads.append(BadPlace(tmp_path))
    for _ in range(20):
        assert not any(host.load(keys))
    assert host.count("breaker_opened_total") != 0
    bad_files.reads.clear()
    while not all(host.load(keys)):  # once the breaker lets a job through
        pass
