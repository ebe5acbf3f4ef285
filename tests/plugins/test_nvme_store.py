"""Blocks of any alignment and key length, also encrypted, are stored, and found again after closing."""

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
from tiered_kv.toolkit.codecs import AES_ID, ZSTD_AES_ID, CodecSet
from tiered_kv.toolkit.encryption import Cipher
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


def codecs(codec_id: int = AES_ID, *, key_id: int = 1) -> CodecSet:
    name = "aes-256-gcm" if codec_id == AES_ID else "zstd+aes-256-gcm"
    return CodecSet(name, Cipher({key_id: bytes(range(32))}, key_id))


@pytest.mark.parametrize(
    ("codec_id", "want_direct", "block_bytes"),
    [(AES_ID, True, 70_000), (AES_ID, False, 1000), (ZSTD_AES_ID, True, 4096)],
)
def test_blocks_come_back_and_are_nowhere_stored_in_clear(
    bench: StoreBench, codec_id: int, want_direct: bool, block_bytes: int
) -> None:
    bench.block_bytes, bench.segment_bytes, bench.capacity_bytes = block_bytes, 1 << 20, 16 << 20
    store = bench.open(codecs=codecs(codec_id), want_direct=want_direct)
    keys = make_keys(9)
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)
    store.close()
    stored = b"".join(path.read_bytes() for path in bench.segments)
    store = bench.open(codecs=codecs(codec_id), want_direct=not want_direct)
    assert bench.get(store, keys) == set(keys)
    blocks = bench.memory(len(keys))
    store.load(keys, blocks)
    for at in (0, block_bytes // 2, block_bytes - 8):
        assert not any(bytes(block[at : at + 8]) in stored for block in blocks)


def test_used_blocks_move_on_without_their_key(bench: StoreBench) -> None:
    store = bench.open(codecs=codecs())
    bench.fill(store, range(1000, 1020))  # nearly all that the tier has room for
    used = [key for number in range(1000, 1020) for key in bench.batch(number)[::8]]
    store.close()
    store = bench.open(codecs=codecs(key_id=2))  # a key that does not decrypt them
    for number in range(60):
        bench.fill(store, [number])
        store.touch(used)
    left = {key for key, is_stored in zip(used, store.contains(used), strict=True) if is_stored}
    assert left
    assert store.stats()["relocated_blocks_total"] > 0, "only those are used, so only those move"
    store.close()
    bench.capacity_bytes *= 2  # so that nothing is evicted once it is open
    assert bench.get(bench.open(codecs=codecs()), sorted(left)) == left


def test_batches_without_a_summary_are_recovered_without_a_key(bench: StoreBench) -> None:
    store = bench.open(codecs=codecs())
    bench.put(store, make_keys(20))
    bench.crash()
    store.close()
    assert bench.open(codecs=codecs(key_id=2)).stats()["recovered_blocks_total"] == 20
