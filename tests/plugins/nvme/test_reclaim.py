"""Reclaiming segments: the capacity holds, used blocks stay, and reads are not disturbed."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, NoReturn

import pytest

from tests.support.disks import hold
from tests.support.faulty import Gate
from tests.support.segment_entries import entries_of
from tiered_kv.system.step import STEP
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.directory import DIRECTORY_RESERVE_BYTES, SEGMENT_RESERVE_BYTES
from tiered_kv_nvme.index import slot_of
from tiered_kv_nvme.layout import EntryTable
from tiered_kv_nvme.pool import CHUNK_KEYS, SegmentPool
from tiered_kv_nvme.reclaimer import survivors
from tiered_kv_nvme.segment import Segment, segment_bytes_min
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.simulation import NvmeKeys
from tiered_kv_nvme.worth import Worth

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench
    from tiered_kv_nvme.store import SegmentStore


def present(bench: StoreBench, store: SegmentStore, numbers: range) -> list[int]:
    """Return the number of stored blocks of each batch."""
    return [sum(store.contains(bench.batch(number))) for number in numbers]


def test_the_oldest_segments_make_room_and_the_newest_blocks_stay(bench: StoreBench) -> None:
    store = bench.open()
    bench.fill(store)
    bench.wait_until_ready(store)  # nothing is evicted from here on
    here = present(bench, store, range(bench.BATCHES))
    assert here[:20] == [0] * 20
    assert here[-10:] == [40] * 10
    stats = store.stats()
    assert stats["blocks"] == sum(here)
    assert stats["evicted_blocks_total"] == 40 * bench.BATCHES - sum(here)
    assert stats["relocated_blocks_total"] == 0


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_blocks_that_are_used_again_and_again_stay(bench: StoreBench, codec: str) -> None:
    store = bench.open(codec=codec)
    system_prompt, touched = make_keys(6, "system prompt"), make_keys(6, "touched")
    bench.put(store, system_prompt)
    bench.put(store, touched)
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        store.touch(touched)
        assert bench.get(store, system_prompt) == set(system_prompt)
    assert store.contains(touched) == [True] * 6
    store.close()
    bench.capacity_bytes *= 2  # so that nothing is evicted once it is open: uses are not stored
    assert bench.get(bench.open(), system_prompt + touched) == {*system_prompt, *touched}


@pytest.mark.slow
def test_segments_of_used_blocks_outlive_all_others_in_place(bench: StoreBench) -> None:
    store = bench.open()
    used = range(6)  # several whole segments, and far more than a quarter of each
    bench.fill(store, used)
    for number in range(100, 100 + bench.BATCHES):
        bench.fill(store, [number])
        for other in used:
            assert bench.get(store, bench.batch(other)) == set(bench.batch(other))
    assert store.stats()["relocated_blocks_total"] < 40  # of those beside others in one segment


def test_blocks_that_come_back_after_their_eviction_outlive_others(bench: StoreBench) -> None:
    settings = NvmeSettings.model_validate({"path": "unused", "capacity": 4 << 20, "segment": 256 << 10})
    store = NvmeKeys(settings, 4096, lambda: 0.0)  # chooses as the tier does, without threads
    returning, once = range(10), itertools.count(100)
    kept = []
    for _ in range(8):
        kept.append(sum(store.has(key) for number in returning for key in bench.batch(number)))
        for number in (*returning, *itertools.islice(once, 26)):  # a little more than the capacity
            store.store(bench.batch(number))
    assert kept[1] < 100 < 200 < kept[-1], kept


def test_blocks_that_are_evicted_together_teach_what_they_teach_one_by_one() -> None:
    together, apart = Worth(16, 8), Worth(16, 8)  # so few are remembered that those of a batch displace each other
    keys, table = make_keys(64), EntryTable()
    for turn in range(120):
        again = [keys[(turn * 7 + number * number) % 64] for number in range(4)]
        states = [worth.first_states(again) for worth in (together, apart)]
        assert states[0] == states[1]
        gone = [*again, *keys[turn % 32 : turn % 32 + 28]]
        used = [*states[0], *[states[0][number % 4] for number in range(28)]]
        together.remember_evicted(gone, used)
        for key, state in zip(gone, used, strict=True):
            apart.remember_evicted([key], [state])
        for worth in (together, apart):
            worth.filled += 1
            worth.advance()
        table.append(gone, entries_of(gone), used)
    segment = Segment(0, -1, 1 << 30, 1)
    segment.table = table
    for worth in (together, apart):
        worth.least([segment])
    assert 0 < len(together.movable(table)) < len(table)
    assert together.movable(table) == apart.movable(table)


def test_after_a_restart_the_blocks_that_were_written_first_go_first(bench: StoreBench) -> None:
    store = bench.open()
    bench.fill(store, range(15))
    store.close()
    store = bench.open()
    bench.fill(store, range(100, 116))
    bench.wait_until_ready(store)
    here = present(bench, store, range(15))
    assert here == sorted(here)
    assert (here[0], here[-1]) == (0, 40)


def test_a_bounded_share_of_a_segment_moves_on(bench: StoreBench) -> None:
    store = bench.open()
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        store.touch([key for other in range(number + 1) for key in bench.batch(other)[::2]])
    stats = store.stats()
    assert 0 < stats["relocated_blocks_total"] <= 16 * (stats["reclaimed_segments_total"] + 1)


def test_a_lower_capacity_holds_from_the_moment_of_opening(bench: StoreBench) -> None:
    store = bench.open()
    bench.fill(store)
    store.close()
    bench.capacity_bytes = 2 << 20
    store = bench.open()
    assert bench.occupied_bytes() <= bench.capacity_bytes
    assert store.stats()["discarded_segments_total"] > 0
    newest = [key for number in range(bench.BATCHES - 4, bench.BATCHES) for key in bench.batch(number)]
    assert bench.get(store, newest) == set(newest)
    bench.fill(store, range(1000, 1030))
    assert bench.occupied_bytes() <= bench.capacity_bytes


def test_segments_of_another_size_keep_their_blocks_until_they_are_reclaimed_and_deleted(bench: StoreBench) -> None:
    store = bench.open()
    bench.fill(store, range(10))
    store.close()
    bench.segment_bytes = 512 << 10
    store = bench.open()
    assert present(bench, store, range(10)) == [40] * 10
    bench.fill(store, range(1000, 1060))
    assert bench.occupied_bytes() <= bench.capacity_bytes
    assert bench.get(store, bench.batch(1059)) == set(bench.batch(1059))
    bench.wait_until(lambda: bench.segment_sizes() == {512 << 10})


@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_the_least_capacity_works(bench: StoreBench, block_bytes: int) -> None:
    bench.block_bytes = block_bytes
    bench.segment_bytes = segment_bytes_min(block_bytes, 1024, 1)
    bench.capacity_bytes = DIRECTORY_RESERVE_BYTES + 4 * (bench.segment_bytes + SEGMENT_RESERVE_BYTES)
    store = bench.open()
    for key in make_keys(100):
        assert bench.put(store, [key]).successful_keys is None
        store.touch([key])
    assert bench.occupied_bytes() <= bench.capacity_bytes
    store.reset()
    for key in make_keys(20):
        assert bench.put(store, [key]).successful_keys is None


def test_a_store_without_memory_leaves_its_segment_to_others(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(worth: Worth, keys: object) -> NoReturn:
        raise MemoryError

    store = bench.open()
    with monkeypatch.context() as patch:
        patch.setattr(Worth, "first_states", no_memory)
        with pytest.raises(MemoryError):
            bench.put(store, bench.batch(0))
    bench.fill(store)
    assert store.close(), "no writer is left"
    newest = bench.batch(bench.BATCHES - 1)
    assert bench.get(bench.open(), newest) == set(newest)


def move_every_block(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.worth, "movable", lambda table: list(range(len(table))))


def test_the_blocks_to_move_are_chosen_in_chunks_that_give_way_to_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, segment = SegmentPool(bytes(16), 1, Worth(4096, 4)), Segment(0, -1, 1 << 30, 1)
    keys = make_keys(4 * CHUNK_KEYS)
    segment.table.append(keys, entries_of(keys), [0] * len(keys))
    pool.index.add(keys, 0)
    move_every_block(pool, monkeypatch)
    STEP.pauses_left = 10
    try:
        assert sum(map(len, survivors(pool, segment))) == len(keys)
        assert STEP.pauses_left == 10 - 4
    finally:
        STEP.pauses_left = 0


def test_blocks_that_were_written_out_of_order_can_move(
    bench: StoreBench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first, second = bench.open_ready(), make_keys(5, "first"), make_keys(5, "second")
    bench.disk.on_write = hold(gate, "held")
    with bench.held(gate, lambda: bench.put(store, first)):
        bench.put(store, second)
    segment = store.pool.segments[slot_of(store.pool.index.places.get(first[0]))]
    assert segment.table.keys() == second + first
    move_every_block(store.pool, monkeypatch)
    (ordinals,) = survivors(store.pool, segment)
    assert len(ordinals) == 10
    assert None not in store._reader.read_stored(segment, ordinals)


def test_a_segment_that_is_being_read_is_not_used_again(bench: StoreBench, gate: Gate) -> None:
    store, batch = bench.open(), bench.batch(0)
    bench.fill(store, [0])
    bench.disk.on_read = hold(gate, "held")
    with bench.held(gate, lambda: bench.get(store, batch)) as loaded:
        bench.fill(store, range(1, bench.BATCHES))
    assert loaded == [set(batch)], "other blocks were written where it reads"
    bench.fill(store, range(bench.BATCHES, 2 * bench.BATCHES))
    assert not all(store.contains(batch)), "it is not used again after the read"


def test_when_every_segment_is_being_read_a_store_times_out(bench: StoreBench, gate: Gate) -> None:
    store = bench.open(room_timeout_s=0.2)
    bench.disk.on_read = hold(gate, "held")
    gate.close()
    readers: list[threading.Thread] = []
    outcome = bench.put(store, bench.batch(0))
    while not outcome.reason and len(readers) < bench.BATCHES:
        readers.append(threading.Thread(target=bench.get, args=(store, bench.batch(len(readers))), name="held"))
        readers[-1].start()
        bench.wait_until(lambda: gate.waiting == len(readers))
        outcome = bench.put(store, bench.batch(len(readers)))
    assert outcome.reason == "no_space"
    assert store.stats()["room_timeouts_total"] == 1
    gate.open()
    for reader in readers:
        reader.join()
    bench.wait_until(lambda: bench.put(store, bench.batch(2000)).successful_keys is None)


def test_blocks_that_move_while_the_store_is_closed_are_found_afterwards(bench: StoreBench, gate: Gate) -> None:
    store = bench.open(room_timeout_s=0.1)
    bench.fill(store, range(20))
    used = [key for number in range(20) for key in bench.batch(number)[::8]]
    bench.disk.on_read = hold(gate, "tiered-kv-nvme-reclaimer")
    gate.close()
    newest = itertools.count(20)
    while not gate.waiting:
        number = next(newest)
        assert number < 20 * bench.BATCHES, "the reclaimer moves no block"
        bench.put(store, bench.batch(number))
        store.touch(used)
    used = [key for key, is_stored in zip(used, store.contains(used), strict=True) if is_stored]
    closing = threading.Thread(target=store.close, name="closing")
    closing.start()
    bench.wait_until(lambda: store.pool.closed)
    gate.open()
    closing.join()
    bench.capacity_bytes *= 2  # so that nothing is evicted once it is open
    assert used
    assert bench.get(bench.open(), used) == set(used)
