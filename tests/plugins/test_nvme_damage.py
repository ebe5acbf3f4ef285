"""Damaged files cost blocks and are counted. They never give wrong bytes, and never an error."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.layout import PAGE_BYTES, Entry, EntryBounds, EntryTable, SegmentHeader, Summary

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

KEYS = make_keys(20)


def filled(bench: StoreBench, *, clean: bool) -> Path:
    """Store `KEYS` in four batches and return the segment; without a summary in it unless `clean`."""
    bench.segment_bytes = 256 << 10
    store = bench.open()
    for start in range(0, 20, 5):
        bench.put(store, KEYS[start : start + 5])
    store.close()
    segment = bench.segments[0]
    if not clean:
        with segment.open("r+b") as file:
            file.seek(-PAGE_BYTES, 2)
            file.write(bytes(PAGE_BYTES))
    return segment


def flip(segment: Path, offset: int, bit: int = 0) -> None:
    with segment.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def loadable(bench: StoreBench) -> set[OffloadKey]:
    """Reopen, load all, check that what was lost is counted and gone, and that a second reopening agrees."""
    store = bench.open()
    found = [key for key, here in zip(KEYS, store.contains(KEYS), strict=True) if here]
    loaded = bench.get(store, KEYS)
    assert loaded <= set(found)
    assert count_of(store.stats(), "corrupt_blocks_total") == len(found) - len(loaded)
    assert {key for key, here in zip(KEYS, store.contains(KEYS), strict=True) if here} == loaded
    store.close()
    return loaded


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("offset", "lost_clean", "lost_after_crash"),
    [
        (0, 20, 20),  # the segment's magic
        (60, 20, 20),  # its size
        (4000, 20, 20),  # zeros after its header
        (PAGE_BYTES, 0, 20),  # the first batch's magic
        (PAGE_BYTES + 30, 0, 20),  # its count
        (PAGE_BYTES + 100, 0, 20),  # an entry
        (PAGE_BYTES + 4000, 0, 20),  # zeros after its keys
        (2 * PAGE_BYTES, 1, 20),  # its first payload
        (7 * PAGE_BYTES - 1, 1, 20),  # the last byte of its last payload
        (7 * PAGE_BYTES, 0, 15),  # the second batch's header
        (8 * PAGE_BYTES + 77, 1, 15),  # its first payload
        (24 * PAGE_BYTES + 1, 1, 5),  # the last batch's last payload
        (30 * PAGE_BYTES, 0, 0),  # behind all batches
    ],
)
def test_a_flipped_byte_costs_what_it_held(
    bench: StoreBench, clean: bool, offset: int, lost_clean: int, lost_after_crash: int
) -> None:
    flip(filled(bench, clean=clean), offset)
    assert len(loadable(bench)) == 20 - (lost_clean if clean else lost_after_crash)


@pytest.mark.parametrize("page_from_end", [1, 2])
def test_a_damaged_summary_costs_a_scan_and_nothing_else(bench: StoreBench, page_from_end: int) -> None:
    segment = filled(bench, clean=True)
    flip(segment, segment.stat().st_size - page_from_end * PAGE_BYTES + 40)
    assert loadable(bench) == set(KEYS)


def test_a_flipped_byte_anywhere_never_gives_wrong_bytes(bench: StoreBench) -> None:
    segments = {clean: filled(bench, clean=clean).read_bytes() for clean in (True, False)}
    size = len(segments[True])
    pristine = shutil.copytree(bench.path, bench.path.with_name("pristine"))

    @settings(max_examples=60)
    @given(clean=st.booleans(), offset=st.integers(0, size - 1), bit=st.integers(0, 7))
    def check(clean: bool, offset: int, bit: int) -> None:
        shutil.rmtree(bench.path)
        shutil.copytree(pristine, bench.path)
        bench.segments[0].write_bytes(segments[clean])
        flip(bench.segments[0], offset, bit)
        assert len(loadable(bench)) >= (0 if offset < PAGE_BYTES or not clean else 19)

    check()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("size_bytes", "left"),
    [
        (0, 0),
        (100, 0),
        (PAGE_BYTES, 0),
        (6 * PAGE_BYTES, 0),
        (7 * PAGE_BYTES, 5),
        (20 * PAGE_BYTES, 15),
        (40 * PAGE_BYTES, 20),
    ],
)
def test_a_truncated_segment_costs_what_was_cut_off(bench: StoreBench, clean: bool, size_bytes: int, left: int) -> None:
    segment = filled(bench, clean=clean)
    with segment.open("r+b") as file:
        file.truncate(size_bytes)
    assert len(loadable(bench)) == left
    store = bench.open()  # and the room is used again
    for number in range(25):
        assert bench.put(store, make_keys(50, f"batch {number}")).successful_keys is None
    bench.wait_until_ready(store)
    assert bench.segment_sizes() == {bench.segment_bytes}


def test_a_segment_that_is_cut_off_while_it_is_open_is_a_counted_miss(bench: StoreBench) -> None:
    store = bench.open()
    bench.put(store, KEYS[:10])
    bench.put(store, KEYS[10:])
    with bench.segments[0].open("r+b") as file:
        file.truncate(8 * PAGE_BYTES)
    loaded = bench.get(store, KEYS)
    assert loaded == set(KEYS[:6])
    assert count_of(store.stats(), "corrupt_blocks_total") == 14
    assert store.contains(KEYS) == [True] * 6 + [False] * 14


def test_a_block_that_was_corrupted_while_it_was_open_is_a_counted_miss(bench: StoreBench) -> None:
    store = bench.open()
    bench.put(store, KEYS)
    flip(bench.segments[0], 2 * PAGE_BYTES + 5 * bench.block_bytes + 99)
    outcome = store.load(KEYS, bench.memory(20))
    assert outcome.successful_keys == set(KEYS) - {KEYS[5]}
    assert outcome.reason == "checksum"
    assert count_of(store.stats(), "corrupt_blocks_total") == 1
    assert bench.put(store, [KEYS[5]]).successful_keys is None  # it may come again
    assert bench.get(store, KEYS) == set(KEYS)


@pytest.mark.parametrize("content", [b"", b"short", bytes(PAGE_BYTES), b"\xff" * PAGE_BYTES])
def test_a_damaged_epoch_forgets_everything(bench: StoreBench, content: bytes) -> None:
    filled(bench, clean=True)
    (bench.path / "epoch").write_bytes(content)
    assert loadable(bench) == set()


def test_a_missing_epoch_forgets_everything(bench: StoreBench) -> None:
    filled(bench, clean=True)
    (bench.path / "epoch").unlink()
    assert loadable(bench) == set()


@pytest.mark.parametrize(
    ("segment_bytes", "generation"),
    [(1 << 63, 1), ((1 << 64) - 4096, 1), (0, 1), (10_000, 1), (1 << 20, (1 << 64) - 1)],
)
def test_a_sealed_header_with_impossible_numbers_is_discarded(
    bench: StoreBench, segment_bytes: int, generation: int
) -> None:
    segment = filled(bench, clean=True)
    page = memoryview(bytearray(PAGE_BYTES))
    SegmentHeader(bench.identity.digest, generation, segment_bytes, bench.block_bytes).encode(page)
    with segment.open("r+b") as file:
        file.write(page)
    assert loadable(bench) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"end_offset": 0},
        {"end_offset": 25 * PAGE_BYTES + 1},
        {"end_offset": 256 << 10},
        {"end_offset": (1 << 64) - PAGE_BYTES},
        {"sequence": (1 << 64) - 1},
        {"table_bytes": 100},
    ],
)
def test_a_sealed_summary_with_impossible_numbers_costs_a_scan(bench: StoreBench, changes: dict[str, int]) -> None:
    segment = filled(bench, clean=True)
    page = memoryview(bytearray(segment.read_bytes()[-PAGE_BYTES:]))
    summary = Summary.decode(page)
    assert summary is not None
    replace(summary, **changes).encode(page)  # type: ignore[arg-type]  # by name
    with segment.open("r+b") as file:
        file.seek(-PAGE_BYTES, 2)
        file.write(page)
    assert loadable(bench) == set(KEYS)


@pytest.mark.parametrize("offset", [(1 << 64) - 1, (1 << 64) - PAGE_BYTES, 1 << 63, 1 << 20])
def test_an_entry_that_lies_outside_the_segment_makes_no_table(offset: int) -> None:
    table = EntryTable()
    table.append([OffloadKey(b"key")], [Entry(offset, 4096, 0, bytes(16))])
    assert EntryTable.decode(memoryview(table.encode()), 1, EntryBounds(4096, 256 << 10)) is None


@pytest.mark.parametrize(("size", "sound"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_keys_have_1_to_1024_bytes(size: int, sound: bool) -> None:
    table = EntryTable()
    table.append([OffloadKey(b"k" * size)], [Entry(PAGE_BYTES, 4096, 0, bytes(16))])
    decoded = EntryTable.decode(memoryview(table.encode()), 1, EntryBounds(4096, 256 << 10))
    assert (decoded is not None) is sound
