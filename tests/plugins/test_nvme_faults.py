"""A disk that fails, fills up, or does half the work costs blocks. What is answered is still what is there."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FaultyDisk, fail, full_after, hold, in_peace
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.index import slot_of

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv.base import OffloadKey
    from tiered_kv_nvme.store import SegmentStore


def opened(bench: StoreBench, disk: FaultyDisk, **options: object) -> SegmentStore:
    """Open a store and let its reclaimer get ready, so that what goes wrong next does so in a store or load."""
    store = bench.open(disk, **options)
    bench.wait_until_ready(store)
    return store


@pytest.mark.parametrize("want_direct", [True, False])
def test_short_writes_and_reads_are_gone_on_with(bench: StoreBench, want_direct: bool) -> None:
    disk = FaultyDisk()
    disk.on_write = disk.on_read = lambda buffers, offset: 3 * 4096
    store = bench.open(disk, want_direct=want_direct)
    keys = make_keys(40)
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    store.close()
    assert bench.get(bench.open(disk), keys) == set(keys)


@pytest.mark.parametrize(("code", "reason"), [(errno.EIO, "io_error"), (errno.ENOSPC, "no_space")])
def test_a_failed_write_stores_nothing_and_its_room_is_used_again(bench: StoreBench, code: int, reason: str) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    before, failed, after = (make_keys(5, label) for label in ("before", "failed", "after"))
    bench.put(store, before)
    bench.wait_until_ready(store)
    disk.on_write = fail(code)
    for _ in range(100):  # failures do not use segments up
        outcome = bench.put(store, failed)
        assert (outcome.successful_keys, outcome.reason) == ([], reason)
    assert store.contains(failed) == [False] * 5
    disk.on_write = in_peace
    bench.put(store, after)
    assert store.stats()["io_errors_total"] == 100
    store.close()
    store = bench.open()
    assert store.contains(before + failed + after) == [True] * 5 + [False] * 5 + [True] * 5
    assert bench.get(store, before + after) == set(before + after)


def test_a_failed_read_fails_its_run_and_keeps_the_blocks(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    keys = make_keys(100)  # two segments
    bench.put(store, keys)
    slots = {key: slot_of(store.index.places[key]) for key in keys}
    first = {key for key in keys if slots[key] == slots[keys[0]]}
    interfere = chain([fail(errno.EIO)], repeat(in_peace))
    disk.on_read = lambda buffers, offset: next(interfere)(buffers, offset)
    outcome = store.load(keys, bench.memory(100))
    assert outcome.successful_keys == set(keys) - first
    assert outcome.reason == "io_error"
    assert bench.get(store, keys) == set(keys)


def test_after_its_deadline_a_job_takes_no_block_from_its_memory_and_puts_none_there(bench: StoreBench) -> None:
    store = bench.open()
    keys, more = make_keys(300), make_keys(300, "more")  # more than a batch
    bench.put(store, keys)
    late, memory = time.monotonic(), bench.memory(300)
    outcome = store.store(more, memory, deadline=late)
    assert (outcome.successful_keys, outcome.reason) == ([], "expired")
    assert store.contains(more) == [False] * 300
    for block in memory:
        block[:] = bytes(len(block))
    outcome = store.load(keys, memory, late)
    assert (outcome.successful_keys, outcome.reason) == (set(), "expired")
    assert not any(map(any, memory))
    assert bench.get(store, keys) == set(keys)


@pytest.mark.parametrize("segments", [0, 1])
def test_a_file_system_with_too_little_space_fails_stores_at_once(bench: StoreBench, segments: int) -> None:
    disk = FaultyDisk()
    disk.on_allocate = full_after(segments)
    store = bench.open(disk, room_timeout_s=600.0)
    for number in range(20):
        outcome = bench.put(store, make_keys(3, f"batch {number}"))
        assert (outcome.successful_keys, outcome.reason) == ([], "no_space")
    assert store.stats()["refused_stores_total"] == 20
    assert store.stats()["room_timeouts_total"] == 0
    bench.wait_until(lambda: len(bench.segments) == segments)  # another one may be tried, and given up, just now


def test_a_write_that_hangs_keeps_the_directory_locked_after_closing(bench: StoreBench, gate: Gate) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    kept = make_keys(5, "kept")
    bench.put(store, kept)
    bench.wait_until_ready(store)

    disk.on_write = hold(gate, "writer")
    gate.close()
    thread = threading.Thread(target=bench.put, args=(store, make_keys(5)), name="writer")
    thread.start()
    bench.wait_until(lambda: gate.waiting)
    assert not store.close(timeout_s=1.0)
    gate.open()
    thread.join()
    assert store.close()
    assert bench.get(bench.open(), kept) == set(kept)


def test_a_failed_write_between_others_leaves_a_hole_that_loses_nothing_else(bench: StoreBench, gate: Gate) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)

    def hold_and_fail(buffers: Sequence[memoryview], offset: int) -> int | None:
        if threading.current_thread().name == "unlucky":
            gate.pass_through()
            raise OSError(errno.EIO, "injected")
        return None

    disk.on_write = hold_and_fail
    gate.close()
    unlucky = threading.Thread(target=bench.put, args=(store, make_keys(5, "unlucky")), name="unlucky")
    unlucky.start()
    bench.wait_until(lambda: gate.waiting)
    behind, later = make_keys(5, "behind"), make_keys(5, "later")
    bench.put(store, behind)
    gate.open()
    unlucky.join()
    bench.put(store, later)
    assert slot_of(store.index.places[later[0]]) != slot_of(store.index.places[behind[0]])
    store.close()
    assert bench.get(bench.open(), behind + later) == {*behind, *later}


@pytest.mark.parametrize("segments", [2, 5])
def test_a_full_file_system_makes_do_with_the_segments_there_are(bench: StoreBench, segments: int) -> None:
    disk = FaultyDisk()
    disk.on_allocate = full_after(segments)
    store = bench.open(disk, room_timeout_s=600.0)
    for number in range(20):
        keys = make_keys(40, f"batch {number}")
        assert bench.put(store, keys).successful_keys is None
        assert keys[-1] in bench.get(store, keys)  # used, so it would move on if there were room
    assert store.stats()["no_space_errors_total"] > 0
    assert store.stats()["refused_stores_total"] == store.stats()["room_timeouts_total"] == 0
    bench.wait_until(lambda: len(bench.segments) == segments)  # another one may be tried, and given up, just now


def test_a_segment_whose_blocks_can_never_move_is_used_again_without_them(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store = bench.open(disk)

    def refuse_relocations(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "injected")
        return None

    disk.on_write = refuse_relocations
    for number in range(60):
        keys = make_keys(40, f"batch {number}")
        assert bench.put(store, keys).successful_keys is None
        store.touch(keys[:1])
    assert bench.get(store, keys) == set(keys)
    assert store.stats()["relocated_blocks_total"] == 0
    assert store.stats()["io_errors_total"] > 0


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_disk_that_takes_no_headers_costs_the_blocks_of_few_segments_and_is_used_again(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, is_read_only: bool
) -> None:
    def unlink(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "injected")

    disk = FaultyDisk()
    store = opened(bench, disk, room_timeout_s=0.02)
    keys = [key for number in range(60) for key in make_keys(40, f"batch {number}")]
    for start in range(0, len(keys), 40):
        bench.wait_until(lambda: bench.put(store, keys[start : start + 40]).successful_keys is None)  # noqa: B023
    bench.wait_until_ready(store)
    held = sum(store.contains(keys))
    disk.on_write = fail(errno.EROFS, offsets=[0])
    if is_read_only:
        monkeypatch.setattr(os, "unlink", unlink)
    errors = store.stats()["io_errors_total"]
    for number in range(40):  # until there is no free segment any more, and then some
        bench.put(store, make_keys(40, f"refused {number}"))
    bench.wait_until(lambda: store.stats()["io_errors_total"] >= errors + 5)
    blocks_of_a_segment = (256 << 10) // 4096
    assert sum(store.contains(keys)) >= held - 3 * blocks_of_a_segment, "free ones, and the one that is tried again"
    monkeypatch.undo()
    disk.on_write = in_peace
    newest = make_keys(40, "newest")
    bench.wait_until(lambda: bench.put(store, newest).successful_keys is None)
    assert bench.get(store, newest) == set(newest)


class OneBadPage(FaultyDisk):
    """A disk that fails in one page of one file. A file that is made later has none.

    Attributes:
        bad: The file and the offset of the page.
        last_read: Those of the last read.
    """

    bad = last_read = (-1, -1)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.last_read = fd, offset
        self._check(fd, buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self.bad = (-1, -1)
        super().fallocate(fd, size_bytes)

    def _check(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        if fd == self.bad[0] and offset <= self.bad[1] < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "injected")


def fill(bench: StoreBench, store: SegmentStore, label: str, hot: Sequence[OffloadKey] = ()) -> None:
    """Store more than the capacity holds, and use `hot` meanwhile."""
    for number in range(40):
        assert bench.put(store, make_keys(40, f"{label} {number}")).successful_keys is None
        bench.get(store, hot)
        store.touch(hot)


def filled(bench: StoreBench, disk: FaultyDisk) -> tuple[SegmentStore, list[OffloadKey]]:
    """Return a full store that has nothing to do, and blocks in it that are used all the time."""
    store, hot = opened(bench, disk), make_keys(40, "hot")
    bench.put(store, hot)
    fill(bench, store, "before", hot)
    bench.wait_until_ready(store)
    return store, hot


def test_a_segment_that_cannot_be_read_below_blocks_in_use_is_given_up(bench: StoreBench) -> None:
    disk = OneBadPage()
    store, hot = filled(bench, disk)
    assert bench.get(store, hot) == set(hot)
    assert bench.get(store, hot[:1]) == set(hot[:1])
    disk.bad = disk.last_read
    fill(bench, store, "after", hot)
    assert store.stats()["damaged_segments_total"] == 1
    assert bench.put(store, hot).successful_keys is None
    assert bench.get(store, hot) == set(hot)


def test_a_read_without_memory_costs_no_segment(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store, hot = filled(bench, disk)
    disk.on_read = fail(errno.ENOMEM)
    assert bench.get(store, hot) == set()
    disk.on_read = in_peace
    assert bench.get(store, hot) == set(hot)
    fill(bench, store, "after", hot)
    assert store.stats()["damaged_segments_total"] == 0


def test_a_segment_that_takes_no_header_is_given_up_and_another_takes_its_room(bench: StoreBench) -> None:
    disk = OneBadPage()
    store = opened(bench, disk)
    fill(bench, store, "before")
    bench.wait_until_ready(store)
    segments = store.stats()["segments"]
    newest = make_keys(40, "before 39")
    assert bench.get(store, newest[:1]) == set(newest[:1])
    disk.bad = disk.last_read[0], 0
    fill(bench, store, "after")
    bench.wait_until_ready(store)
    stats = store.stats()
    assert (stats["damaged_segments_total"], stats["segments"]) == (1, segments)
    assert stats["room_timeouts_total"] == stats["refused_stores_total"] == 0
