"""What an nvme tier stores, also encrypted, is found after closing; and its directory has one owner and namespace."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.disks import FaultyDisk, Interfere, fail, full_after, without_faults
from tests.support.segment_entries import entries_of
from tests.support.segment_map import SegmentMap
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import ConfigError, FormatError, TierUnavailableError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.tiering.base import JobMetadata
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import AES_ID, ZSTD_AES_ID, CodecSet, ThreadBuffer
from tiered_kv.toolkit.encryption import Cipher
from tiered_kv_nvme.directory import SegmentDirectory
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.index import place_of
from tiered_kv_nvme.layout import KEY_BYTES_MAX, PAGE_BYTES
from tiered_kv_nvme.pool import CHUNK_KEYS, SegmentPool
from tiered_kv_nvme.segment import Segment, SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.tier import NvmeTier
from tiered_kv_nvme.worth import Worth

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.conftest import StoreBench
    from tiered_kv_nvme.store import SegmentStore


@pytest.mark.parametrize(
    ("start_at", "refused_at_most"),
    [(0, 0), (7, 0), (16, 0), (512, 1)],  # where a sector is larger than usual, the first refusal tells
)
def test_blocks_at_any_address_move_once(bench: StoreBench, start_at: int, refused_at_most: int) -> None:
    refused: list[int] = []
    moved: list[int] = []

    def refuse(buffers: Sequence[memoryview], offset: int) -> None:
        if any(np.frombuffer(buffer, dtype=np.uint8).ctypes.data % PAGE_BYTES for buffer in buffers):
            refused.append(offset)
            raise OSError(errno.EINVAL, "not aligned")
        moved.append(sum(map(len, buffers)))

    store, size = bench.open_ready(), bench.block_bytes
    bench.disk.on_write = bench.disk.on_read = refuse
    memory = memoryview(mmap.mmap(-1, 41 * size))[start_at:]
    blocks = [memory[at : at + size] for at in range(0, 40 * size, size)]
    for number in range(4):
        keys = make_keys(20, f"batch {number}")
        for key, block in zip(keys, blocks[:20], strict=True):
            block[:] = block_content(key, size)
        assert store.store(keys, blocks[:20]).successful_keys is None
        assert store.load(keys, blocks[20:]).successful_keys is None
        assert blocks[20:] == blocks[:20]
    assert len(refused) <= refused_at_most
    assert sum(moved) < 9 * 20 * size
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
        buffer = ThreadBuffer().take(size)
        assert len(buffer) == size
        assert np.frombuffer(buffer, np.uint8).ctypes.data % (2 << 20) == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_block_takes_less_than_120_bytes_of_memory_with_its_key() -> None:
    for count in (20_000, 45_000, 90_000):
        keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(count)]
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        pool = SegmentPool(bytes(16), 0, Worth(1, 1))
        for slot, start in enumerate(range(0, count, 1000)):
            segment = Segment(slot, -1, 1 << 30, 1)
            for first in range(start, min(start + 1000, count), 32):
                batch = keys[first : min(first + 32, start + 1000)]
                pool.index.add(batch, place_of(slot, len(segment.table)))
                segment.table.append(batch, entries_of(batch), bytes(len(batch)))
            with pool.changed:
                pool.adopt(segment)
            pool.note_sealed(segment)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(pool.index.places) == count
        assert (after - before) / count < 120, f"{(after - before) / count:.0f} bytes a block"


def test_no_collection_walks_the_blocks() -> None:
    pool, count = SegmentPool(bytes(16), 0, Worth(1, 1)), 8 * CHUNK_KEYS
    segment = Segment(0, -1, 1 << 30, 1)
    before = walked(pool)
    keys = make_keys(count)
    pool.index.add(keys, 0)
    segment.table.append(keys, entries_of(keys), [0] * count)
    with pool.changed:
        pool.adopt(segment)
    pool.note_sealed(segment)
    assert walked(pool) - before < count / 4


def walked(root: object) -> int:
    """Return how many references a full collection follows from an object, those to the same object once."""
    seen, waiting, count = {id(root)}, [root], 0
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            count += 1
            if gc.is_tracked(each) and id(each) not in seen and not isinstance(each, type | ModuleType | FunctionType):
                seen.add(id(each))
                waiting.append(each)
    return count


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
    failures = iter([None, fail(errno.ENODEV)])
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


def test_a_second_process_is_refused_with_the_id_of_the_owner(bench: StoreBench) -> None:
    bench.open()
    program = (
        "import sys\n"
        "from tiered_kv_nvme.directory import SegmentDirectory, Identity\n"
        "SegmentDirectory(sys.argv[1], Identity(bytes(range(16)), {}, 4096), tier='second')\n"
    )
    command = [sys.executable, "-c", program, str(bench.path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode != 0
    assert f"tier 'second' cannot be opened: {bench.path} is in use by process {os.getpid()}" in result.stderr


def test_an_error_shows_only_the_differences_of_namespaces(tmp_path: Path) -> None:
    def identity(tenant: str, rank: int) -> Identity:
        inner = {"model": "m", "tenant": tenant, "parallel": {"tensor": 2, "rank": rank}}
        return Identity(tenant.encode().ljust(16), {"namespace": inner, "format": 1}, 4096)

    SegmentDirectory(str(tmp_path / "kv"), identity("default", 0)).close()
    with pytest.raises(FormatError) as caught:
        SegmentDirectory(str(tmp_path / "kv"), identity("bob", 1))
    assert "(parallel.rank: 0 there, 1 here; tenant: 'default' there, 'bob' here)" in str(caught.value)


def test_foreign_files_are_left_alone_and_count_against_the_capacity(bench: StoreBench) -> None:
    bench.open().close()
    foreign = bench.path / "core.1234"
    foreign.write_bytes(bytes(2 << 20))
    other = bench.path / "segment-ffffffff-000000.kv"  # of another namespace
    other.write_bytes(bytes(4096))
    nested = bench.path / "backup"
    nested.mkdir()
    (nested / "old.kv").write_bytes(bytes(1 << 20))
    store = bench.open()
    assert store.describe()["foreign_files"] == 3
    bench.fill(store, range(15))
    assert store.stats()["reclaimed_segments_total"] > 0
    occupied = bench.occupied_bytes() + (nested / "old.kv").stat().st_blocks * 512
    assert occupied <= bench.capacity_bytes
    store.close()
    assert foreign.stat().st_size == 2 << 20
    assert (nested / "old.kv").exists()
    assert other.exists()


def test_a_capacity_beyond_the_free_space_of_the_disk_is_a_warning(bench: StoreBench) -> None:
    store = bench.open()
    described = store.describe()
    assert isinstance(described["free_bytes"], int)
    assert "warning" not in described
    store.close()
    bench.capacity_bytes, bench.segment_bytes = 1 << 60, None
    bench.path = bench.path.with_name("larger")
    disk = FaultyDisk()
    disk.on_allocate = full_after(0)
    described = bench.open(disk).describe()
    assert "of the capacity can be had" in str(described["warning"])


def test_segments_that_cannot_be_opened_are_not_deleted(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    store = bench.open()
    keys = make_keys(150)
    bench.put(store, keys)
    store.close()

    def too_many(files: SegmentFiles, slot: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "open", too_many)
        with pytest.raises(TierUnavailableError, match="cannot be used: Too many open files"):
            bench.open()
    assert bench.get(bench.open(), keys) == set(keys)


def test_temporary_files_of_a_crash_while_opening_are_removed(bench: StoreBench) -> None:
    bench.path.mkdir(mode=0o700)
    (bench.path / "lock").write_text("1\n")
    leftovers = [bench.path / name for name in ("probe.tmp", f".tiered-kv-nvme.json.{'0' * 16}.tmp")]
    for path in leftovers:
        path.write_bytes(b"{")
    bench.open()
    assert not any(path.exists() for path in leftovers)


pytestmark = pytest.mark.usefixtures("patient_nvme")


def test_an_engine_that_passes_no_spec_is_served(tmp_path: Path) -> None:
    view = memoryview(mmap.mmap(-1, 16 * 4096)).cast("B", (16, 4096))
    settings = NvmeSettings(path=str(tmp_path / "kv"), capacity=64 << 20)
    tier = NvmeTier(None, view, "nvme", settings)
    assert tier.describe()["path"] == str(tmp_path / "kv")
    tier.shutdown()


@pytest.mark.parametrize(("codec", "has_many"), [("raw", True), ("zstd", False)])
def test_a_part_has_many_blocks_only_if_they_need_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, has_many: bool
) -> None:
    block_bytes = 1 << 20
    memory = mmap.mmap(-1, 16 * block_bytes)
    memory.write(np.random.default_rng(0).bytes(16 * block_bytes))  # which does not get shorter
    settings = NvmeSettings.model_validate({"path": str(tmp_path), "capacity": 64 << 20, "codec": codec})
    written: list[int] = []
    pwritev = Disk.pwritev

    def noted(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        written.append(sum(map(len, buffers)) // block_bytes)
        return pwritev(disk, fd, buffers, offset)

    monkeypatch.setattr(Disk, "pwritev", noted)
    tier = NvmeTier(None, memoryview(memory).cast("B", (16, block_bytes)), "nvme", settings)
    try:
        tier.submit_store(JobMetadata(1, make_keys(16), np.arange(16), False, ReqContext()))
        wait_until(lambda: [result.success for result in tier.get_finished()] == [True])
    finally:
        tier.shutdown()
    assert sum(written) == 16
    assert (max(written) > 2) is has_many, "a segment ends after seven"


@pytest.mark.parametrize("block_bytes", [1, 512, 4096, 65536, 1 << 20, 2 << 20, 24 << 20])
def test_the_least_capacity_that_an_error_names_is_enough(block_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^capacity: .* it takes at least ") as caught:
        Sizing.of(1, block_bytes)
    least = str(caught.value).rpartition(" ")[2]
    settings = NvmeSettings.model_validate({"path": "kv", "capacity": least})
    assert Sizing.of(settings.capacity, block_bytes).segments_max >= 4
    with pytest.raises(ConfigError):
        Sizing.of(settings.capacity - 1, block_bytes)


@pytest.mark.parametrize("capacity_gib", [0.0625, 0.25, 1, 4, 100, 4000])
@pytest.mark.parametrize("block_bytes", [4096, 65536, 1 << 20])
def test_segments_are_several_and_of_a_sensible_size(capacity_gib: float, block_bytes: int) -> None:
    sizing = Sizing.of(int(capacity_gib * 2**30), block_bytes)
    assert sizing.segments_max >= 7
    assert sizing.segment_bytes % 4096 == 0
    assert sizing.segment_bytes <= 256 << 20 or sizing.segments_max >= 500
    assert sizing.segments_max <= 512
    assert sizing.segments_max * sizing.segment_bytes >= 0.85 * sizing.capacity_bytes


@pytest.mark.parametrize("segment_bytes", [0, 4096, 1 << 20, (2 << 20) + 1])
def test_a_segment_that_holds_no_block_is_refused(segment_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"^segment: .* at least "):
        Sizing.of(1 << 30, 1 << 20, segment_bytes)


def test_segments_that_would_be_too_many_open_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^segment: .* more than 512 open files: it takes at least 200MiB"):
        Sizing.of(100 << 30, 4096, 8 << 20)


def test_a_full_collection_visits_no_more_with_many_stored_blocks_than_with_few(bench: StoreBench) -> None:
    bench.capacity_bytes, bench.segment_bytes = 32 << 20, 4 << 20
    store = bench.open_ready()
    bench.fill(store, range(2))
    store.close()
    at_first = visited()
    store = bench.open_ready()
    before, batches = visited(), 30
    opening = before - at_first  # what a store has without a block
    bench.fill(store, range(2, batches))
    blocks = count_found(bench, store, batches)
    assert blocks == batches * len(bench.batch(0))
    assert visited() - before < blocks / 4
    store.close()
    store = bench.open_ready()  # which reads the keys from the disk
    assert count_found(bench, store, batches) == blocks
    assert visited() - before - opening < blocks / 4


def count_found(bench: StoreBench, store: SegmentStore, batches: int) -> int:
    return sum(sum(store.contains(bench.batch(number))) for number in range(batches))


def visited() -> int:
    """Return how many references a full collection of this process follows."""
    while gc.collect():  # a free-threaded build finds some of the garbage by a second collection only
        pass
    return sum(len(gc.get_referents(each)) for each in gc.get_objects())
