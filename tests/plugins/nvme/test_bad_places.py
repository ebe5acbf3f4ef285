"""One bad place on the disk costs the blocks there: the rest of the disk stores, finds and loads as before."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.disks import BadPlaces, fail
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.index import ordinal_of, slot_of
from tiered_kv_nvme.layout import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.plugins.conftest import StoreBench
    from tiered_kv.base import OffloadKey
    from tiered_kv_nvme.store import SegmentStore

SEGMENT_BYTES = 256 << 10
WHOLE = (0, SEGMENT_BYTES)
MIDDLE = (SEGMENT_BYTES // 2, SEGMENT_BYTES // 2 + 512)


def place(store: SegmentStore, key: OffloadKey) -> tuple[int, int, int]:
    """Return the place of a block: its segment's slot, its first byte, and the one behind its last."""
    slot, ordinal = slot_of(store.pool.index.places.get(key)), ordinal_of(store.pool.index.places.get(key))
    entry = store.pool.segments[slot].table[ordinal]
    return slot, entry.offset, entry.offset + entry.stored_bytes


# Writes.


@pytest.mark.one_quick(7)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENODATA, errno.EREMOTEIO, errno.EPERM])
@pytest.mark.parametrize("bad", [MIDDLE, (PAGE_BYTES, SEGMENT_BYTES), WHOLE], ids=["middle", "batches", "file"])
def test_a_place_that_refuses_writes_costs_no_store(bench: StoreBench, code: int, bad: tuple[int, int]) -> None:
    disk = BadPlaces(code)
    store = bench.open_ready(disk)
    bench.fill(store)
    disk.writes = [(3, *bad), (9, *bad)]
    bench.fill(store, range(100, 200))  # each is stored, though each segment's turn comes several times
    newest = bench.batch(199)
    assert bench.get(store, newest) == set(newest)
    stats = store.stats()
    assert stats["room_timeouts_total"] == stats["refused_stores_total"] == 0
    assert stats["refused_places_total"] == stats["left_out_segments"] or bad == WHOLE, "each is tried once"
    assert bench.occupied_bytes() <= bench.capacity_bytes


def test_a_bad_place_in_every_segment_costs_no_store(bench: StoreBench) -> None:
    disk = BadPlaces()
    store = bench.open_ready(disk)
    bench.fill(store)
    disk.writes = [(slot, *MIDDLE) for slot in range(100)]
    for number in range(160):
        assert bench.put(store, make_keys(10, f"few {number}")).successful_keys is None
    stats = store.stats()
    assert stats["refused_places_total"] == stats["left_out_segments"] == stats["segments"]
    assert stats["room_timeouts_total"] == stats["refused_stores_total"] == 0


def test_a_bad_place_is_known_after_a_restart_and_blocks_beside_it_can_be_loaded(bench: StoreBench) -> None:
    disk = BadPlaces(errno.ENOSPC)
    store = bench.open_ready(disk)
    slot = slot_of(place_of_the_next(bench, store))
    disk.writes = [(slot, 200 << 10, 201 << 10)]
    keys = [key for number in range(4) for key in bench.batch(number)]
    bench.fill(store, range(1, 4))
    assert store.stats()["left_out_segments"] == 1
    assert "1 segments" in str(store.describe()["left_out"])
    kept = {key for key in keys if slot_of(store.pool.index.places.get(key)) == slot}
    assert kept
    store.close()
    for has_crashed in (False, True):  # then batches are read, up to the bad place
        if has_crashed:
            bench.crash()
        store = bench.open_ready(disk)
        assert store.stats()["left_out_segments"] == 1
        assert bench.get(store, keys) == set(keys)
        bench.fill(store, range(10, 14))


def place_of_the_next(bench: StoreBench, store: SegmentStore) -> int:
    """Return where stores write now."""
    bench.fill(store, [0])
    return store.pool.index.places.get(bench.batch(0)[0])


def test_a_place_that_takes_writes_again_is_used_again(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = BadPlaces()
    store = bench.open_ready(disk)
    bench.fill(store)
    disk.writes = [(3, PAGE_BYTES, SEGMENT_BYTES)]
    bench.fill(store, range(100, 130))
    assert store.stats()["left_out_segments"] == 1
    disk.writes = []
    for module in ("pool", "segment"):
        monkeypatch.setattr(f"tiered_kv_nvme.{module}.LEFT_OUT_S", 0.0)
    bench.fill(store, range(200, 230))
    assert store.stats()["left_out_segments"] == 0
    assert any(slot_of(at) == 3 for _, at in store.pool.index.places.items())


def test_a_bad_header_of_every_new_file_in_a_slot_stops_no_store(bench: StoreBench) -> None:
    disk = BadPlaces()
    store = bench.open_ready(disk)
    bench.fill(store)
    disk.writes = [(3, 0, PAGE_BYTES)]
    bench.fill(store, range(100, 200))
    assert store.stats()["room_timeouts_total"] == store.stats()["refused_stores_total"] == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV, errno.EPERM])
def test_a_disk_that_refuses_every_write_leaves_nothing_out(bench: StoreBench, code: int) -> None:
    store = bench.open_ready()
    bench.fill(store, range(5))
    bench.wait_until_ready(store)
    bench.disk.on_write = fail(code)
    for number in range(20):
        assert bench.put(store, make_keys(3, f"refused {number}")).successful_keys == []
    assert store.stats()["refused_places_total"] == store.stats()["left_out_segments"] == 0
    assert store.stats()["io_errors_total"] < 25, "each store is tried once"


def test_a_disk_that_takes_headers_alone_fails_stores_at_once(bench: StoreBench) -> None:
    disk = BadPlaces()
    disk.writes = [(slot, PAGE_BYTES, SEGMENT_BYTES) for slot in range(100)]
    store = bench.open_ready(disk, room_timeout_s=600.0)
    bench.wait_until(lambda: bench.put(store, make_keys(3)).reason == "io_error")
    # Until a segment is tried again there is none, and no store waits for it.
    bench.wait_until(lambda: store.stats()["refused_stores_total"] > 0 or bench.put(store, make_keys(3, "more")))


def test_a_refused_write_changes_no_segment_that_could_not_be_read(bench: StoreBench) -> None:
    """Its header may be read again later, and its blocks be found."""
    store = bench.open()
    keys = make_keys(20)
    bench.put(store, keys)
    store.close()
    slots = range(len(bench.segments))
    disk = BadPlaces()
    disk.reads = [(slot, 0, PAGE_BYTES) for slot in slots]
    store = bench.open_ready(disk, room_timeout_s=3.0)
    assert not any(store.contains(keys))
    disk.reads = []
    disk.writes = [(slot, *WHOLE) for slot in range(len(slots), 100)]
    unread = [segment.slot for segment in store.pool.segments.values() if segment.damaged]
    with store.pool.changed:
        store.pool.pin(unread)  # else the reclaimer may need their room, since no new segment takes a write
    bench.put(store, make_keys(4, "meanwhile"))
    with store.pool.changed:
        store.pool.close()
        store.pool.unpin(unread)
    store.close()
    assert bench.get(bench.open(), keys) == set(keys)


# Reads.


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODATA, errno.EILSEQ])
@pytest.mark.parametrize("want_direct", [True, False])
def test_a_block_that_cannot_be_read_is_stored_anew_and_its_neighbours_are_loaded(
    bench: StoreBench, code: int, want_direct: bool
) -> None:
    disk = BadPlaces(code)
    store = bench.open_ready(disk, want_direct=want_direct)
    keys = make_keys(40)
    bench.put(store, keys)
    disk.reads = [place(store, keys[20])]
    blocks = bench.memory(40)
    outcome = store.load(keys, blocks)
    assert set(outcome.successful_keys or ()) == set(keys) - {keys[20]}
    assert outcome.reason == "bad_place"
    assert store.contains(keys) == [key != keys[20] for key in keys]
    assert store.stats()["corrupt_blocks_total"] == {"bad_place": 1}
    assert bench.get(store, keys[:20] + keys[21:]) == set(keys) - {keys[20]}
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)


def test_a_file_of_which_nothing_can_be_read_costs_its_blocks_alone(bench: StoreBench) -> None:
    disk = BadPlaces()
    store = bench.open_ready(disk)
    bench.fill(store, range(6))
    keys = [key for number in range(6) for key in bench.batch(number)]
    slot = slot_of(store.pool.index.places.get(keys[0]))
    there = {key for key in keys if slot_of(store.pool.index.places.get(key)) == slot}
    disk.reads = [(slot, *WHOLE)]
    assert bench.get(store, keys) == set(keys) - there
    assert store.contains(keys) == [key not in there for key in keys]
    assert bench.put(store, keys).successful_keys is None
    assert bench.get(store, keys) == set(keys)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV, errno.ESTALE, errno.ENXIO])
def test_a_disk_that_is_away_keeps_its_blocks(bench: StoreBench, code: int) -> None:
    store = bench.open_ready()
    bench.fill(store, range(6))
    keys = [key for number in range(6) for key in bench.batch(number)]
    bench.disk.on_read = fail(code)
    for _ in range(3):
        outcome = store.load(keys, bench.memory(len(keys)))
        assert (outcome.successful_keys, outcome.reason) == (set(), "io_error")
    bench.disk.on_read = lambda buffers, offset: None
    assert bench.get(store, keys) == set(keys)
    assert store.stats()["corrupt_blocks_total"] == {}


@pytest.mark.parametrize("blocks", [40, 1])
def test_after_its_deadline_a_load_reads_no_block_again(bench: StoreBench, blocks: int) -> None:
    """A disk may try for long before it fails. A block that was read alone is not offered all the same."""
    store = bench.open_ready()
    keys = make_keys(blocks)
    bench.put(store, keys)
    reads: list[int] = []

    def note_and_fail(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset:
            reads.append(offset)
            monotonic[0] += 10.0
            raise OSError(errno.EIO, "injected")
        return None

    monotonic = [0.0]
    bench.disk.on_read = note_and_fail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered_kv_nvme.reader.time.monotonic", lambda: monotonic[0])
        outcome = store.load(keys, bench.memory(blocks), deadline=5.0)
    assert (outcome.successful_keys, len(reads)) == (set(), 1)
    assert store.contains(keys) == [blocks > 1] * blocks


def test_a_slow_bad_place_among_many_blocks_is_found_by_the_next_load(bench: StoreBench) -> None:
    store = bench.open_ready()
    keys = make_keys(40)
    bench.put(store, keys)
    _, first, last = place(store, keys[20])

    def fail_late(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset < last and first < offset + sum(map(len, buffers)):
            monotonic[0] += 10.0
            raise OSError(errno.EIO, "injected")
        return None

    monotonic = [0.0]
    bench.disk.on_read = fail_late
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiered_kv_nvme.reader.time.monotonic", lambda: monotonic[0])
        for start_s, is_offered in ((0.0, True), (20.0, False)):
            monotonic[0] = start_s
            assert keys[20] not in set(store.load(keys, bench.memory(40), deadline=start_s + 5.0).successful_keys or ())
            assert store.contains(keys) == [is_offered or key != keys[20] for key in keys]
        others = [key for key in keys if key != keys[20]]
        assert store.load(others, bench.memory(39), deadline=monotonic[0] + 5.0).successful_keys is None


def test_a_reclaimer_ends_its_reads_of_a_segment_with_many_bad_places(bench: StoreBench) -> None:
    store = bench.open_ready()
    failures: list[int] = []

    def note_and_fail(buffers: Sequence[memoryview], offset: int) -> int | None:
        if offset and threading.current_thread().name.endswith("reclaimer"):
            failures.append(offset)
            raise OSError(errno.EIO, "injected")
        return None

    bench.disk.on_read = note_and_fail
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        store.touch([each for other in range(number + 1) for each in bench.batch(other)[::2]])
        bench.wait_until_ready(store)
    reclaimed = store.stats()["reclaimed_segments_total"]
    assert 0 < len(failures) <= 8 * reclaimed


def test_a_reclaimed_segment_with_a_bad_place_keeps_its_other_blocks_in_use(bench: StoreBench) -> None:
    disk = BadPlaces()
    disk.reads = [(slot, 100 << 10, 101 << 10) for slot in range(100)]
    store = bench.open_ready(disk)
    for number in range(bench.BATCHES):
        bench.fill(store, [number])
        store.touch([key for other in range(number + 1) for key in bench.batch(other)[::2]])
    assert store.stats()["relocated_blocks_total"] > 0, "one read of neighbours moves all but those at the bad place"
