"""Damaged files cost blocks and are counted. They never give wrong bytes, and never an error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.layout import PAGE_BYTES

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
