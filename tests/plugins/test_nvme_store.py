"""Blocks go into segments and come back the same, across closing, and in every form they can be stored in."""

from __future__ import annotations

import errno
import threading
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.index import Index, place_of, slot_of
from tiered_kv_nvme.layout import KEY_BYTES_MAX, Entry, EntryTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.plugins.conftest import StoreBench


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("want_direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("block_bytes", [4096, 8192, 1000, 12345])
def test_blocks_come_back_in_any_form_and_after_reopening(
    bench: StoreBench, codec: str, want_direct: bool, aligned: bool, block_bytes: int
) -> None:
    bench.block_bytes = block_bytes
    keys = make_keys(50)
    store = bench.open(codec=codec, want_direct=want_direct, aligned=aligned)
    for start in range(0, 50, 7):
        assert bench.put(store, keys[start : start + 7]).successful_keys is None
    assert store.contains(keys) == [True] * 50
    assert bench.get(store, keys) == set(keys)
    assert bench.get(store, keys[::-3]) == set(keys[::-3])
    store.close()
    # What was written in one form is read by a store that would write another.
    store = bench.open(codec="raw", want_direct=not want_direct)
    assert store.counters["recovered_blocks_total"] == 50
    assert bench.get(store, keys) == set(keys)


def test_blocks_that_do_not_get_smaller_are_stored_as_they_are(bench: StoreBench) -> None:
    store = bench.open(codec="zstd")
    keys = make_keys(8)
    zeros = make_keys(8, "zeros")
    bench.put(store, keys)  # random bytes
    store.store(zeros, bench.memory(8))
    table = store._pool.segments[0].table
    assert list(table.codecs) == [0] * 8 + [1] * 8
    assert table.stored_bytes[0] == bench.block_bytes
    assert table.stored_bytes[8] < 100
    assert bench.get(store, keys) == set(keys)
    assert store.load(zeros, blocks := bench.memory(8)).successful_keys is None
    assert all(block == bytes(bench.block_bytes) for block in blocks)


def test_a_job_larger_than_the_rest_of_a_segment_goes_on_in_the_next(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(300)  # a segment holds some sixty
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    assert len({slot_of(place) for place in store.index.places.values()}) >= 5


def test_blocks_that_are_here_are_not_written_again(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(6)
    bench.put(store, keys[:4])
    outcome = store.store(keys + keys, bench.memory(12))  # zeros
    assert outcome.successful_keys is None
    assert bench.get(store, keys[:4]) == set(keys[:4])
    assert len(store._pool.segments[0].table) == 6


def test_a_key_that_is_too_long_fails_alone(bench: StoreBench) -> None:
    store = bench.open()
    longest, too_long = OffloadKey(b"k" * KEY_BYTES_MAX), OffloadKey(b"k" * (KEY_BYTES_MAX + 1))
    outcome = bench.put(store, [longest, too_long])
    assert outcome.successful_keys == [longest]
    assert outcome.reason == "key_size"
    assert store.contains([longest, too_long]) == [True, False]
    store.close()
    assert bench.get(bench.open(), [longest]) == {longest}


def test_a_block_is_found_only_after_its_batch_is_written(bench: StoreBench, gate: Gate) -> None:
    class SlowDisk(Disk):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if len(buffers) > 1:
                gate.pass_through()
            return super().pwritev(fd, buffers, offset)

    store = bench.open(SlowDisk())
    keys = make_keys(4)
    gate.close()
    writer = threading.Thread(target=bench.put, args=(store, keys))
    writer.start()
    bench.wait_until(lambda: gate.waiting == 1)
    assert store.contains(keys) == [False] * 4
    assert bench.get(store, keys) == set()
    gate.open()
    writer.join()
    assert store.contains(keys) == [True] * 4


def test_what_follows_a_clean_close_goes_on_in_the_same_segment(bench: StoreBench) -> None:
    batches = [make_keys(5, f"batch {number}") for number in range(6)]
    for number, keys in enumerate(batches):
        store = bench.open()
        assert store.counters["recovered_blocks_total"] == 5 * number
        bench.put(store, keys)
        store.close()
    everything = [key for keys in batches for key in keys]
    store = bench.open()
    assert bench.get(store, everything) == set(everything)
    assert len(store._pool.segments[0].table) == 30


@pytest.mark.slow
def test_the_index_takes_at_most_150_bytes_a_block_beyond_its_key() -> None:
    # Sizes just before and just after the dictionary grows: the worst is right after.
    for count in (174_000, 200_000, 350_000):
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        index = Index()
        tables = []
        for slot, start in enumerate(range(0, count, 1000)):
            table = EntryTable()
            for first in range(start, min(start + 1000, count), 32):
                batch = keys[first : min(first + 32, start + 1000)]
                entries = [Entry(4096 * number, 4096, 0, bytes(16)) for number in range(len(batch))]
                index.add(batch, place_of(slot, len(table)))
                table.append(batch, entries)
            tables.append(table)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(index.places) == count
        assert (after - before) / count <= 150, f"{(after - before) / count:.0f} bytes a block"
        del tables


def test_a_key_that_is_asked_for_twice_is_loaded_only_if_both_blocks_are(bench: StoreBench) -> None:
    class FailingDisk(Disk):
        reads = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.reads += 1
            if self.reads == 2:
                raise OSError(errno.EIO, "injected")
            return super().preadv(fd, buffers, offset)

    disk = FailingDisk()
    store = bench.open(disk)
    keys = make_keys(1)
    bench.put(store, keys)
    disk.reads = 0
    outcome = store.load(keys * 2, bench.memory(2))
    assert outcome.reason == "io_error"
    assert not outcome.successful_keys
    assert outcome.successful_keys is not None
    assert store.load(keys * 2, bench.memory(2)).successful_keys is None
