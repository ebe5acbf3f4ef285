"""A disk that fails, is full, or transfers in part costs blocks. What the store finds can still be loaded."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FaultyDisk, fail, full_after, hold, without_faults
from tests.support.faulty import Gate
from tiered_kv.errors import TierBusyError
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.index import slot_of
from tiered_kv_nvme.reclaimer import Reclaimer

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv.base import OffloadKey
    from tiered_kv_nvme.store import SegmentStore


@pytest.mark.parametrize("want_direct", [True, False])
def test_short_writes_and_reads_are_continued(bench: StoreBench, want_direct: bool) -> None:
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
    store = bench.open_ready()
    before, failed, after = (make_keys(5, label) for label in ("before", "failed", "after"))
    bench.put(store, before)
    bench.wait_until_ready(store)
    bench.disk.on_write = fail(code)
    for _ in range(100):  # failures do not use segments up
        outcome = bench.put(store, failed)
        assert (outcome.successful_keys, outcome.reason) == ([], reason)
    assert store.contains(failed) == [False] * 5
    bench.disk.on_write = without_faults
    bench.put(store, after)
    assert store.stats()["io_errors_total"] == 100
    store.close()
    store = bench.open()
    assert store.contains(before + failed + after) == [True] * 5 + [False] * 5 + [True] * 5
    assert bench.get(store, before + after) == set(before + after)


def test_the_first_failure_of_each_kind_is_logged_with_the_system_s_words(
    bench: StoreBench, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.open_ready()
    keys = make_keys(5)
    bench.put(store, keys)
    bench.disk.on_write, bench.disk.on_read = fail(errno.ENOSPC), fail(errno.EIO)
    for _ in range(3):
        bench.put(store, make_keys(5, "more"))
        store.load(keys, bench.memory(5))
    bench.disk.on_write = fail(errno.EIO)
    bench.put(store, make_keys(5, "more"))
    lines = [text for text in caplog.messages if "blocks failed" in text]
    assert [text.partition(" failed: ")[0] for text in lines] == [
        f"{bench.path}: {operation}" for operation in ("writing blocks", "reading blocks", "writing blocks")
    ]
    for text, code in zip(lines, (errno.ENOSPC, errno.EIO, errno.EIO), strict=True):
        assert os.strerror(code) in text


def test_no_error_ends_the_reclaimer(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    store, make_room, errors = bench.open_ready(), Reclaimer._make_room, [SystemExit("unforeseen")]

    def fail_once(reclaimer: Reclaimer) -> bool:
        if errors:
            raise errors.pop()
        return make_room(reclaimer)

    monkeypatch.setattr(Reclaimer, "_make_room", fail_once)
    bench.fill(store)
    bench.wait_until_ready(store)
    assert not errors


@pytest.mark.parametrize(("code", "lost"), [(errno.EIO, 0), (errno.ENODEV, 1), (errno.ENOMEM, 1)])
def test_a_read_that_fails_once_costs_no_block(bench: StoreBench, code: int, lost: int) -> None:
    """The disk may read the blocks one by one; other errors are not of a place, and fail the blocks of the read."""
    store = bench.open_ready()
    keys = make_keys(100)  # two segments
    bench.put(store, keys)
    slots = {key: slot_of(store.pool.index.places.get(key)) for key in keys}
    first = {key for key in keys if slots[key] == slots[keys[0]]}
    interfere = chain([fail(code)], repeat(without_faults))
    bench.disk.on_read = lambda buffers, offset: next(interfere)(buffers, offset)
    outcome = store.load(keys, bench.memory(100))
    loaded = set(keys if outcome.successful_keys is None else outcome.successful_keys)
    assert (loaded, outcome.reason) == (set(keys) - (first if lost else set()), "io_error" if lost else None)
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
    bench.wait_until(lambda: len(bench.segments) == segments)  # the reclaimer may just try another


def test_a_write_that_hangs_keeps_the_directory_locked_after_closing(bench: StoreBench, gate: Gate) -> None:
    store = bench.open_ready()
    kept = make_keys(5, "kept")
    bench.put(store, kept)
    bench.wait_until_ready(store)
    bench.disk.on_write = hold(gate, "held")
    with bench.held(gate, lambda: bench.put(store, make_keys(5))):
        assert not store.close(timeout_s=1.0)
        with pytest.raises(TierBusyError):
            bench.open()
    assert store.close()
    assert bench.get(bench.open(), kept) == set(kept)


def test_a_failed_write_between_others_leaves_a_hole_that_loses_nothing_else(bench: StoreBench, gate: Gate) -> None:
    store = bench.open_ready()

    def hold_and_fail(buffers: Sequence[memoryview], offset: int) -> int | None:
        if threading.current_thread().name == "held":
            gate.pass_through()
            raise OSError(errno.EIO, "injected")
        return None

    bench.disk.on_write = hold_and_fail
    behind, later = make_keys(5, "behind"), make_keys(5, "later")
    with bench.held(gate, lambda: bench.put(store, make_keys(5, "unlucky"))):
        bench.put(store, behind)
    bench.put(store, later)
    assert slot_of(store.pool.index.places.get(later[0])) != slot_of(store.pool.index.places.get(behind[0]))
    store.close()
    assert bench.get(bench.open(), behind + later) == {*behind, *later}


@pytest.mark.parametrize("segments", [2, 5])
def test_on_a_full_file_system_existing_segments_are_used_again(bench: StoreBench, segments: int) -> None:
    disk = FaultyDisk()
    disk.on_allocate = full_after(segments)
    store = bench.open(disk, room_timeout_s=600.0)
    for number in range(20):
        bench.fill(store, [number])
        keys = bench.batch(number)
        assert keys[-1] in bench.get(store, keys)  # a use, so it would be relocated if there were space
    assert store.stats()["no_space_errors_total"] > 0
    assert store.stats()["refused_stores_total"] == store.stats()["room_timeouts_total"] == 0
    bench.wait_until(lambda: len(bench.segments) == segments)  # the reclaimer may just try another


def test_a_segment_whose_blocks_can_never_move_is_used_again_without_them(bench: StoreBench) -> None:
    store = bench.open()

    def refuse_relocations(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EIO, "injected")
        return None

    bench.disk.on_write = refuse_relocations
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        keys = bench.batch(number)
        store.touch(keys[:1])
    assert bench.get(store, keys) == set(keys)
    assert store.stats()["relocated_blocks_total"] == 0
    assert store.stats()["io_errors_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_disk_that_takes_no_headers_costs_the_blocks_of_few_segments_and_is_used_again(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, is_read_only: bool
) -> None:
    def unlink(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "injected")

    store = bench.open_ready(room_timeout_s=0.02)
    batches = [bench.batch(number) for number in range(bench.BATCHES)]
    for batch in batches:
        bench.wait_until(lambda: bench.put(store, batch).successful_keys is None)  # noqa: B023
    keys = [key for batch in batches for key in batch]
    bench.wait_until_ready(store)
    held = sum(store.contains(keys))
    bench.disk.on_write = fail(errno.EROFS, offsets=[0])
    if is_read_only:
        monkeypatch.setattr(os, "unlink", unlink)
    errors = store.stats()["io_errors_total"]
    for number in range(40):  # until no segment is free, and some more
        bench.put(store, make_keys(40, f"refused {number}"))
    bench.wait_until(lambda: store.stats()["io_errors_total"] >= errors + 5)
    blocks_of_a_segment = (256 << 10) // 4096
    assert sum(store.contains(keys)) >= held - 3 * blocks_of_a_segment, "at most the free ones and one more lose blocks"
    monkeypatch.undo()
    bench.disk.on_write = without_faults
    newest = make_keys(40, "newest")
    bench.wait_until(lambda: bench.put(store, newest).successful_keys is None)
    assert bench.get(store, newest) == set(newest)


class OneBadPage(FaultyDisk):
    """A disk that fails in one page of one file, until a new file is made."""

    bad = last_read = (-1, -1)
    """Descriptor and offset: of the page; of the last read."""

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


def fill_and_use(bench: StoreBench, store: SegmentStore, numbers: range, hot: Sequence[OffloadKey]) -> None:
    for number in numbers:
        bench.fill(store, [number])
        bench.get(store, hot)
        store.touch(hot)


def filled(bench: StoreBench, disk: FaultyDisk | None = None) -> tuple[SegmentStore, list[OffloadKey]]:
    """Return a full store whose reclaimer is idle, and blocks in it that were used all the time."""
    store, hot = bench.open_ready(disk), make_keys(40, "hot")
    bench.put(store, hot)
    fill_and_use(bench, store, range(40), hot)
    bench.wait_until_ready(store)
    return store, hot


def test_a_read_without_memory_damages_no_segment(bench: StoreBench) -> None:
    store, hot = filled(bench)
    bench.disk.on_read = fail(errno.ENOMEM)
    assert bench.get(store, hot) == set()
    bench.disk.on_read = without_faults
    assert bench.get(store, hot) == set(hot)
    fill_and_use(bench, store, range(100, 140), hot)
    assert store.stats()["damaged_segments_total"] == 0


def test_a_segment_whose_header_cannot_be_written_is_replaced(bench: StoreBench) -> None:
    disk = OneBadPage()
    store = bench.open_ready(disk)
    bench.fill(store)
    bench.wait_until_ready(store)
    segments = store.stats()["segments"]
    newest = bench.batch(bench.BATCHES - 1)
    assert bench.get(store, newest[:1]) == set(newest[:1])
    disk.bad = disk.last_read[0], 0
    bench.fill(store, range(100, 140))
    bench.wait_until_ready(store)
    stats = store.stats()
    assert (stats["damaged_segments_total"], stats["segments"]) == (1, segments)
    assert stats["room_timeouts_total"] == stats["refused_stores_total"] == 0
