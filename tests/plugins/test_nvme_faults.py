"""A disk that fails, fills up, or does half the work costs blocks. What is answered is still what is there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.writer import BatchWriter

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv_nvme.store import SegmentStore


class FaultyDisk(Disk):
    """A disk whose calls of one kind go wrong as a test wants.

    Attributes:
        on_write, on_read: Called with (buffers, offset) before the call; may raise, or return a limit of bytes.
        on_allocate: Called before space is allocated; may raise.
    """

    def __init__(self) -> None:
        self.on_write: Callable[[Sequence[memoryview], int], int | None] = lambda buffers, offset: None
        self.on_read: Callable[[Sequence[memoryview], int], int | None] = lambda buffers, offset: None
        self.on_allocate: Callable[[], None] = lambda: None

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, _limited(buffers, self.on_write(buffers, offset)), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, _limited(buffers, self.on_read(buffers, offset)), offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self.on_allocate()
        super().fallocate(fd, size_bytes)


def _limited(buffers: Sequence[memoryview], limit: int | None) -> list[memoryview]:
    if limit is None:
        return list(buffers)
    limited: list[memoryview] = []
    for buffer in buffers:
        if limit <= 0:
            break
        limited.append(buffer[:limit])
        limit -= len(buffer)
    return limited


def fail(code: int) -> Callable[[Sequence[memoryview], int], int | None]:
    def raise_error(buffers: Sequence[memoryview], offset: int) -> int | None:
        raise OSError(code, "injected")

    return raise_error


def full_after(allocations: int) -> Callable[[], None]:
    allowed = iter(range(allocations))

    def allocate() -> None:
        if next(allowed, None) is None:
            raise OSError(errno.ENOSPC, "injected")

    return allocate


def opened(bench: StoreBench, disk: Disk, **options: object) -> SegmentStore:
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
    disk.on_write = lambda buffers, offset: None
    bench.put(store, after)
    assert store.stats()["io_errors_total"] == 100
    store.close()
    store = bench.open()
    assert store.contains(before + failed + after) == [True] * 5 + [False] * 5 + [True] * 5
    assert bench.get(store, before + after) == set(before + after)


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
    behind = make_keys(5, "behind")
    bench.put(store, behind)
    gate.open()
    unlucky.join()
    later = make_keys(5, "later")
    bench.put(store, later)
    assert store.index.places[later[0]] >> 32 != store.index.places[behind[0]] >> 32
    assert bench.get(store, behind + later) == {*behind, *later}
    store.close()
    assert bench.get(bench.open(), behind + later) == {*behind, *later}


def test_a_failed_read_fails_its_run_and_keeps_the_blocks(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    keys = make_keys(100)  # two segments
    bench.put(store, keys)
    slots = {key: store.index.places[key] >> 32 for key in keys}
    first = {key for key in keys if slots[key] == slots[keys[0]]}
    failures = iter([True])

    def fail_once(buffers: Sequence[memoryview], offset: int) -> int | None:
        if next(failures, False):
            raise OSError(errno.EIO, "injected")
        return None

    disk.on_read = fail_once
    outcome = store.load(keys, bench.memory(100))
    assert outcome.successful_keys == set(keys) - first
    assert outcome.reason == "io_error"
    assert bench.get(store, keys) == set(keys)


def test_a_full_file_system_makes_do_with_the_segments_there_are(bench: StoreBench) -> None:
    disk = FaultyDisk()
    disk.on_allocate = full_after(5)
    store = bench.open(disk)
    for number in range(20):
        assert bench.put(store, make_keys(40, f"batch {number}")).successful_keys is None
    newest = make_keys(40, "batch 19")
    assert bench.get(store, newest) == set(newest)
    assert store.stats()["no_space_errors_total"] > 0
    bench.wait_until(lambda: len(bench.segments) == 5)  # another one may be tried, and given up, just now


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


def test_two_segments_are_enough_to_keep_the_newest_blocks(bench: StoreBench) -> None:
    disk = FaultyDisk()
    disk.on_allocate = full_after(2)
    store = bench.open(disk, room_timeout_s=600.0)
    for number in range(20):
        keys = make_keys(40, f"batch {number}")
        assert bench.put(store, keys).successful_keys is None
        assert keys[-1] in bench.get(store, keys)  # used, so it would move on if there were room
    assert store.stats()["no_space_errors_total"] > 0
    assert store.stats()["refused_stores_total"] == store.stats()["room_timeouts_total"] == 0
    bench.wait_until(lambda: len(bench.segments) == 2)  # another one may be tried, and given up, just now


def test_a_disk_that_recovers_is_used_again(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk, room_timeout_s=0.05)
    disk.on_write = disk.on_read = fail(errno.EIO)
    for number in range(30):
        assert bench.put(store, make_keys(3, f"lost {number}")).successful_keys == []
    disk.on_write = disk.on_read = lambda buffers, offset: None
    keys = make_keys(40)
    bench.wait_until(lambda: bench.put(store, keys).successful_keys is None)
    assert bench.get(store, keys) == set(keys)


def test_a_disk_that_takes_no_headers_costs_the_blocks_of_one_segment(bench: StoreBench) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    batches = [make_keys(40, f"batch {number}") for number in range(60)]
    for keys in batches:
        assert bench.put(store, keys).successful_keys is None
    bench.wait_until_ready(store)
    patience_s = store._writer.room_timeout_s
    store._writer.room_timeout_s = 0.02  # from here on there is no room to come
    segments = len(bench.segments)
    held = sum(store.contains([key for keys in batches for key in keys]))

    def refuse_headers(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset == 0:
            raise OSError(errno.EROFS, "injected")
        return None

    disk.on_write = refuse_headers
    errors = store.stats()["io_errors_total"]
    for number in range(40):  # until there is no free segment any more, and then some
        bench.put(store, make_keys(40, f"refused {number}"))
    bench.wait_until(lambda: store.stats()["io_errors_total"] >= errors + 5)
    assert len(bench.segments) == segments
    blocks_of_a_segment = (256 << 10) // 4096
    reclaimed_before = 2 * blocks_of_a_segment  # free ones that were ready, and the one that is tried again and again
    assert (
        sum(store.contains([key for keys in batches for key in keys])) >= held - reclaimed_before - blocks_of_a_segment
    )
    disk.on_write = lambda buffers, offset: None
    store._writer.room_timeout_s = patience_s
    newest = make_keys(40, "newest")
    bench.wait_until(lambda: bench.put(store, newest).successful_keys is None)
    assert bench.get(store, newest) == set(newest)


def test_a_segment_whose_blocks_can_never_move_is_used_again_without_them(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("injected")

    monkeypatch.setattr(BatchWriter, "relocate", fail)
    store = bench.open()
    for number in range(60):
        keys = make_keys(40, f"batch {number}")
        assert bench.put(store, keys).successful_keys is None
        store.touch(keys[:1])
    assert bench.get(store, keys) == set(keys)
    assert store.stats()["relocated_blocks_total"] == 0


def test_a_write_that_hangs_keeps_the_directory_locked_after_closing(bench: StoreBench, gate: Gate) -> None:
    disk = FaultyDisk()
    store = opened(bench, disk)
    kept = make_keys(5, "kept")
    bench.put(store, kept)
    bench.wait_until_ready(store)

    def hang(buffers: Sequence[memoryview], offset: int) -> int | None:
        gate.pass_through()
        return None

    disk.on_write = hang
    gate.close()
    thread = threading.Thread(target=bench.put, args=(store, make_keys(5)))
    thread.start()
    bench.wait_until(lambda: gate.waiting)
    assert not store.close(timeout_s=1.0)
    gate.open()
    thread.join()
    assert store.close()
    assert bench.get(bench.open(), kept) == set(kept)
