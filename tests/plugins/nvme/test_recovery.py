"""A restart finds the blocks that can be loaded, however the process ended, and none from before a reset.

A segment's header is flushed before its batches are written, and its batches before its summary.
`tests/trust/test_planted_defects.py` proves the flushes of the marker and of a reset, by a loss of power.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.disks import FaultyDisk, FlushOrder, fail, hold, without_faults
from tests.support.faulty import Gate
from tests.support.shortages import Resource, Shortage
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.direct import PROBE_NAME
from tiered_kv_nvme.layout import PAGE_BYTES

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench


def test_a_reset_does_not_wait_for_a_file_system_that_hangs(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    write = os.pwrite

    def hang(fd: int, data: bytes, offset: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        assert goes_on.wait(60.0)
        return write(fd, data, offset)

    store = bench.open()
    old = make_keys(20, "old")
    bench.put(store, old)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", hang)
        store.reset()
        store.reset()
        assert not any(store.contains(old))
        assert not store.close(timeout_s=0.0)  # the directory stays locked
        goes_on.set()
        bench.wait_until(lambda: store.close(timeout_s=0.0))
    assert bench.get(bench.open(), old) == set()


def test_a_store_that_was_offered_before_a_reset_stores_nothing(bench: StoreBench, gate: Gate) -> None:
    store = bench.open_ready()
    bench.disk.on_write = hold(gate, "held")
    written, late = make_keys(5, "in flight"), make_keys(5, "late")
    with bench.held(gate, lambda: bench.put(store, written).reason) as reasons:
        store.reset()
    reasons.append(bench.put(store, late, epoch=0).reason)  # it waited in a queue
    assert reasons == ["reset", "reset"]
    assert store.contains(written + late) == [False] * 10
    bench.put(store, late)
    store.close()
    assert bench.open().contains(written + late) == [False] * 5 + [True] * 5


@pytest.mark.parametrize("loss", ["deleted", "damaged"])
def test_a_directory_that_has_lost_its_epoch_says_so(
    bench: StoreBench, caplog: pytest.LogCaptureFixture, loss: str
) -> None:
    store = bench.open()
    keys = make_keys(5)
    bench.put(store, keys)
    store.close()
    bench.open().close()
    assert "epoch" not in caplog.text
    path = bench.path / "epoch"
    if loss == "deleted":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"epoch 1", b"epoch \xff"))
    store = bench.open()
    assert bench.get(store, keys) == set()
    assert caplog.text.count("the file 'epoch' was missing or damaged") == 1


def test_a_load_that_a_reset_overtakes_fails(bench: StoreBench, gate: Gate) -> None:
    store = bench.open()
    bench.disk.on_read = hold(gate, "held")
    keys = make_keys(5)
    bench.put(store, keys)
    with bench.held(gate, lambda: bench.get(store, keys)) as loaded:
        store.reset()
    assert loaded == [set()]


@pytest.mark.parametrize(("call", "recovers"), [("pwrite", True), ("pwrite", False), ("fdatasync", False)])
def test_a_reset_that_cannot_be_written_holds_at_once_and_after_closing(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch, call: str, recovers: bool
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "injected")

    store = bench.open()
    old, new = make_keys(20, "old"), make_keys(20, "new")
    bench.put(store, old)
    before = store.stats()["io_errors_total"]
    monkeypatch.setattr(os, call, refuse)
    store.reset()
    bench.wait_until(lambda: store.stats()["io_errors_total"] > before)
    assert bench.get(store, old) == set()
    if recovers:
        monkeypatch.undo()
        bench.put(store, new)
    store.close()
    monkeypatch.undo()
    store = bench.open()
    assert not any(store.contains(old))
    assert bench.get(store, new) == (set(new) if recovers else set())
    bench.put(store, old)
    store.close()
    assert bench.get(bench.open(), old) == set(old)


def test_blocks_before_a_read_error_stay_and_the_rest_is_found_later(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(20)
    for start in range(0, 20, 5):
        bench.put(store, keys[start : start + 5])
    bench.wait_until_ready(store)  # no segment is being made
    bench.crash()  # there is no summary
    store.close()
    disk = FaultyDisk()
    disk.on_read = fail(errno.EIO, offsets=[13 * PAGE_BYTES])  # the third batch
    store = bench.open(disk)
    assert store.contains(keys) == [True] * 10 + [False] * 10
    disk.on_read = without_faults
    assert bench.get(store, keys) == set(keys[:10])
    assert store.stats()["discarded_segments_total"] == 0
    store.close()
    assert bench.get(bench.open(), keys) == set(keys)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA])
def test_a_summary_that_cannot_be_read_costs_no_block(bench: StoreBench, code: int) -> None:
    keys = [key for number in range(8) for key in bench.batch(number)]
    store = bench.open()
    bench.fill(store, range(8))
    store.close()
    disk = FaultyDisk()
    disk.on_read = fail(code, offsets=[bench.segments[0].stat().st_size - PAGE_BYTES])
    for _ in range(2):
        store = bench.open(disk)
        assert bench.get(store, keys) == set(keys)
        store.close()
    assert bench.get(bench.open(), keys) == set(keys)


@pytest.mark.parametrize("refused", [1, 2])
def test_an_opening_without_threads_reads_the_directory_itself(bench: StoreBench, refused: int) -> None:
    store = bench.open()
    bench.fill(store, range(8))  # more segments than threads
    store.close()
    with Shortage(Resource.THREAD, refused) as shortage:
        store = bench.open()
    assert shortage.refused
    keys = [key for number in range(8) for key in bench.batch(number)]
    assert bench.get(store, keys) == set(keys)


def test_an_opening_without_a_descriptor_for_its_test_of_direct_io_fails(bench: StoreBench) -> None:
    bench.open().close()
    opened = os.open

    def refuse_probe(path: str, *arguments: Any, **named: Any) -> int:  # Any: as of `os.open`
        if path == PROBE_NAME:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse_probe)
        with pytest.raises(TierUnavailableError, match="raise the limit of open files"):
            bench.open()
    assert bench.open().describe()["direct_io"] == "yes"


@pytest.mark.parametrize("offset", [0, PAGE_BYTES])
def test_an_opening_without_memory_deletes_nothing(bench: StoreBench, offset: int) -> None:
    store = bench.open()
    keys = make_keys(20)
    bench.put(store, keys)
    bench.crash()
    store.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    disk = FaultyDisk()
    disk.on_read = fail(errno.ENOMEM, offsets=[offset])
    with pytest.raises(TierUnavailableError, match=os.strerror(errno.ENOMEM)):
        bench.open(disk)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert bench.get(bench.open(), keys) == set(keys)


def test_a_header_that_cannot_be_read_now_is_found_when_the_disk_has_recovered(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(20)
    bench.put(store, keys)
    store.close()
    files = bench.segments
    disk = FaultyDisk()
    disk.on_read = fail(errno.EIO, offsets=[0])
    store = bench.open(disk)
    assert not any(store.contains(keys))
    assert store.stats()["io_errors_total"] >= len(files)
    assert store.stats()["discarded_segments_total"] == 0
    disk.on_read = without_faults
    bench.put(store, make_keys(4, "meanwhile"))
    store.close()
    assert set(files) <= set(bench.segments)
    assert bench.get(bench.open(), keys) == set(keys)


@pytest.mark.parametrize("size_bytes", [100, 7 * PAGE_BYTES, 40 * PAGE_BYTES])
def test_a_file_that_was_cut_has_its_size_again_when_its_room_is_used(bench: StoreBench, size_bytes: int) -> None:
    """`tests/trust/test_corruption_nvme.py` says which blocks are left of it."""
    store = bench.open()
    bench.put(store, make_keys(20))
    store.close()
    os.truncate(bench.segments[0], size_bytes)
    store = bench.open()
    for number in range(25):
        assert bench.put(store, make_keys(50, f"batch {number}")).successful_keys is None
    bench.wait_until_ready(store)
    assert bench.segment_sizes() == {bench.segment_bytes}


@pytest.mark.parametrize("want_direct", [True, False])
def test_batches_come_after_their_header_and_before_their_summary(bench: StoreBench, want_direct: bool) -> None:
    disk = FlushOrder()
    store = bench.open(disk, want_direct=want_direct)
    bench.fill(store)
    bench.wait_until_ready(store)
    assert store.stats()["reclaimed_segments_total"]
    bench.wait_until(lambda: disk.summaries)  # the reclaimer seals when no segment is missing
    segments = int(store.stats()["segments"])
    assert store.close()
    assert disk.problems == []
    assert disk.headers > segments, "no segment was used again"
    assert disk.batches >= bench.BATCHES


def test_a_segment_that_is_full_when_the_store_is_closed_is_flushed_before_its_summary(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FlushOrder()
    store = bench.open_ready(disk)
    monkeypatch.setattr(store.pool, "next_to_seal", lambda: None)  # otherwise the reclaimer might seal it first
    assert bench.put(store, make_keys(20, "batch")).successful_keys is None
    assert (disk.batches, disk.summaries) == (1, 0)
    assert store.close()
    assert disk.summaries == 1
    assert disk.problems == []


def test_a_flush_that_fails_leaves_a_segment_without_a_summary(bench: StoreBench) -> None:
    class FailingFlush(FlushOrder):
        fails = False

        def datasync(self, fd: int) -> None:
            if self.fails:
                raise OSError(5, "injected")
            super().datasync(fd)

    disk = FailingFlush()
    store = bench.open_ready(disk, room_timeout_s=0.05)
    disk.fails = True
    for number in range(2):  # more than the free segment holds, and no other becomes free
        bench.put(store, bench.batch(number))
    bench.wait_until(lambda: store.stats()["io_errors_total"])
    assert store.close()
    assert disk.batches
    assert not disk.summaries
    assert disk.problems == []
