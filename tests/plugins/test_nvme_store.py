"""Blocks of any alignment and key length are stored, and found again after closing."""

from __future__ import annotations

import errno
import mmap
import tracemalloc
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.disks import FaultyDisk, Interfere, fail, without_faults
from tests.support.segment_map import SegmentMap
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv_nvme.disk import Scratch
from tiered_kv_nvme.index import Index, place_of
from tiered_kv_nvme.layout import KEY_BYTES_MAX, PAGE_BYTES, Entry, EntryTable

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench


def test_unaligned_blocks_go_through_a_buffer(bench: StoreBench) -> None:
    refused: list[int] = []

    def refuse(buffers: Sequence[memoryview], offset: int) -> None:
        if any(np.frombuffer(buffer, dtype=np.uint8).ctypes.data % PAGE_BYTES for buffer in buffers):
            refused.append(offset)
            raise OSError(errno.EINVAL, "not aligned")

    store, keys, size = bench.open_ready(), make_keys(20), bench.block_bytes
    bench.disk.on_write = bench.disk.on_read = refuse
    memory = memoryview(mmap.mmap(-1, 41 * size))[7:]
    blocks = [memory[at : at + size] for at in range(0, 40 * size, size)]
    for key, block in zip(keys, blocks[:20], strict=True):
        block[:] = block_content(key, size)
    assert store.store(keys, blocks[:20]).successful_keys is None
    assert len(refused) == 1
    assert store.load(keys, blocks[20:]).successful_keys is None
    assert len(refused) > 1
    assert blocks[20:] == blocks[:20]
    assert store.counters["io_errors_total"] == 0


def test_keys_of_any_length_are_found_again_and_one_that_is_too_long_fails_alone(bench: StoreBench) -> None:
    store = bench.open()
    *kept, too_long = [OffloadKey(b"k" * size) for size in (1, 7, 100, KEY_BYTES_MAX, KEY_BYTES_MAX + 1)]
    outcome = bench.put(store, [*kept, too_long])
    assert outcome.successful_keys == kept
    assert outcome.reason == "key_size"
    assert store.contains([*kept, too_long]) == [True] * 4 + [False]
    store.close()
    assert bench.get(bench.open(), kept) == set(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transfer", "interfere", "reason"),
    [
        ("on_write", fail(errno.EINVAL), "a test write with O_DIRECT failed"),
        ("on_read", lambda buffers, offset: 0, "cannot be read back"),
    ],
)
def test_without_direct_transfers_blocks_go_through_the_page_cache(
    bench: StoreBench, transfer: str, interfere: Interfere, reason: str
) -> None:
    disk, keys = FaultyDisk(), make_keys(5)
    setattr(disk, transfer, interfere)
    store = bench.open(disk)
    setattr(disk, transfer, without_faults)
    assert reason in str(store.describe()["direct_io"])
    bench.put(store, keys)
    assert bench.get(store, keys) == set(keys)


def test_a_large_buffer_begins_on_a_huge_page() -> None:
    for size in (2 << 20, (2 << 20) + PAGE_BYTES):
        buffer = Scratch().take(size)
        assert len(buffer) == size
        assert np.frombuffer(buffer, np.uint8).ctypes.data % (2 << 20) == 0


@pytest.mark.full
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
                table.append(batch, entries, bytes(len(batch)))
            tables.append(table)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(index.places) == count
        assert (after - before) / count <= 150, f"{(after - before) / count:.0f} bytes a block"
        del tables


def test_after_a_clean_close_stores_continue_in_the_same_segment(bench: StoreBench) -> None:
    batches = [make_keys(5, f"batch {number}") for number in range(6)]
    for number, keys in enumerate(batches):
        store = bench.open()
        assert store.counters["recovered_blocks_total"] == 5 * number
        bench.put(store, keys)
        store.close()
    first = SegmentMap(bench.segments[0].read_bytes())
    assert {key for batch in first.batches for key, _, _ in batch.entries} == {*chain(*batches)}


def test_a_key_that_is_requested_twice_is_loaded_only_if_both_blocks_are(bench: StoreBench) -> None:
    store = bench.open()
    keys = make_keys(1)
    bench.put(store, keys)
    failures = iter([None, fail(errno.EIO)])
    bench.disk.on_read = lambda buffers, offset: (interfere := next(failures)) and interfere(buffers, offset)
    outcome = store.load(keys * 2, bench.memory(2))
    assert outcome.reason == "io_error"
    assert outcome.successful_keys is not None
    assert not outcome.successful_keys
    bench.disk.on_read = without_faults
    assert store.load(keys * 2, bench.memory(2)).successful_keys is None
