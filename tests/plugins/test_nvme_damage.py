"""Damaged files cost blocks, which are counted, and the room is used again.

`tests/trust/test_corruption_nvme.py` tries every field and kind of byte.
"""

from __future__ import annotations

from collections.abc import Callable
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


def flip(offset: int) -> Callable[[bytearray], object]:
    return lambda data: data.__setitem__(offset, data[offset] ^ 1)


def cut(size_bytes: int) -> Callable[[bytearray], object]:
    return lambda data: data.__delitem__(slice(size_bytes, None))


@pytest.mark.parametrize(
    ("damage", "left_clean", "left_after_crash"),
    [
        (flip(60), 0, 0),  # the segment's size
        (flip(PAGE_BYTES + 100), 20, 0),  # an entry of the first batch
        (flip(7 * PAGE_BYTES), 20, 5),  # the second batch's header
        (flip(24 * PAGE_BYTES + 1), 19, 15),  # the last batch's last payload
        (cut(100), 0, 0),
        (cut(7 * PAGE_BYTES), 5, 5),
        (cut(40 * PAGE_BYTES), 20, 20),
    ],
)
def test_damage_costs_what_it_hit(
    bench: StoreBench, damage: Callable[[bytearray], object], left_clean: int, left_after_crash: int
) -> None:
    for clean, left in ((True, left_clean), (False, left_after_crash)):
        bench.path = bench.path.with_name(f"clean {clean}")
        segment = filled(bench, clean=clean)
        data = bytearray(segment.read_bytes())
        damage(data)
        segment.write_bytes(data)
        assert count_loadable(bench) == left
