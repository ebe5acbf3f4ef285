"""Damaged files cost blocks, which are counted, and the room is used again.

`tests/trust/test_corruption_nvme.py` tries every field and kind of byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiered_kv.counters import count_of
from tiered_kv.testing.rig import make_keys
from tiered_kv_nvme.layout import PAGE_BYTES

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

KEYS = make_keys(20)


def filled(bench: StoreBench, *, clean: bool) -> Path:
    """Store `KEYS` in four batches and return the segment; without a summary in it unless `clean`."""
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


def count_loadable(bench: StoreBench) -> int:
    """Reopen, load all, check that what was lost is counted and gone, and use the room again."""
    store = bench.open()
    found = sum(store.contains(KEYS))
    loaded = bench.get(store, KEYS)
    assert count_of(store.stats(), "corrupt_blocks_total") == found - len(loaded)
    assert {key for key, here in zip(KEYS, store.contains(KEYS), strict=True) if here} == loaded
    for number in range(25):
        assert bench.put(store, make_keys(50, f"batch {number}")).successful_keys is None
    bench.wait_until_ready(store)
    assert bench.segment_sizes() == {bench.segment_bytes}
    return len(loaded)


@pytest.mark.parametrize(
    ("offset", "left_clean", "left_after_crash"),
    [
        (60, 0, 0),  # the segment's size
        (PAGE_BYTES + 100, 20, 0),  # an entry of the first batch
        (7 * PAGE_BYTES, 20, 5),  # the second batch's header
        (24 * PAGE_BYTES + 1, 19, 15),  # the last batch's last payload
    ],
)
def test_a_flipped_byte_costs_what_it_held(
    bench: StoreBench, offset: int, left_clean: int, left_after_crash: int
) -> None:
    for clean, left in ((True, left_clean), (False, left_after_crash)):
        bench.path = bench.path.with_name(f"clean {clean}")
        segment = filled(bench, clean=clean)
        data = bytearray(segment.read_bytes())
        data[offset] ^= 1
        segment.write_bytes(data)
        assert count_loadable(bench) == left


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(("size_bytes", "left"), [(100, 0), (7 * PAGE_BYTES, 5), (40 * PAGE_BYTES, 20)])
def test_a_truncated_segment_costs_what_was_cut_off(bench: StoreBench, clean: bool, size_bytes: int, left: int) -> None:
    with filled(bench, clean=clean).open("r+b") as file:
        file.truncate(size_bytes)
    assert count_loadable(bench) == left
