"""Ghosts tell what a tier would hit at half, twice and four times its capacity."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest

from tests.observe.rig import BLOCK_BYTES, get, put, stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.observe.ghosts import SIZES, Ghosts
from tiered_kv.observe.table import CHUNK_KEYS_MAX, hashes
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.rig import make_keys


def used(keys: list[OffloadKey], ghosts: Ghosts) -> None:
    for first in range(0, len(keys), CHUNK_KEYS_MAX):
        ghosts.use(hashes(keys[first : first + CHUNK_KEYS_MAX]))


def test_a_small_tier_s_ghosts_are_exact() -> None:
    ghosts, keys = Ghosts(100), make_keys(150)
    for _ in range(3):
        used(keys, ghosts)
    # LRU has none of a circle that is larger than it.
    assert ghosts.counted() == {"0.5": 0, "1": 0, "2": 300, "4": 300}
    ghosts.reset()
    used(keys, ghosts)
    assert ghosts.counted()["4"] == 300


def lru_hits(numbers: np.ndarray[tuple[int], np.dtype[np.int64]], blocks: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in numbers.tolist():
        hits += number in held
        held[number] = None
        held.move_to_end(number)
        if len(held) > blocks:
            held.popitem(last=False)
    return hits


def test_a_sample_stands_for_a_large_tier_and_takes_bounded_memory() -> None:
    blocks, uses = 20_000, 200_000
    numbers = np.minimum(np.random.default_rng(0).geometric(1 / 30_000, uses), 200_000)
    keys = make_keys(200_001)
    uses_of_keys = [keys[number] for number in numbers.tolist()]
    tracemalloc.start()
    ghosts = Ghosts(blocks)
    used(uses_of_keys, ghosts)
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken_bytes < 4 << 20
    for name, hits in ghosts.counted().items():
        exact = lru_hits(numbers, int(SIZES[name] * blocks))
        assert hits == pytest.approx(exact, abs=0.06 * uses), name


@pytest.fixture
def stack() -> Iterator[Stack]:
    memory = {"type": "memory", "capacity": 64 * BLOCK_BYTES}
    with open_stack(stack_of(memory, {"type": "obedient", "name": "boundless"}, blocks=16)) as opened:
        yield opened


def test_a_stack_s_counters_tell_what_more_room_would_bring(stack: Stack) -> None:
    keys = make_keys(24)
    for _ in range(3):
        for key in keys:
            if not get(stack, [key]):
                put(stack, [key])
    counters = stack.counters()
    assert counters["cpu"]["ghost_hits_total"] == {"0.5": 0, "1": 0, "2": 48, "4": 48}
    assert counters["memory"]["ghost_hits_total"]["0.5"] == 48
    assert "ghost_hits_total" not in counters["boundless"]
    stack.manager.reset_cache()
    put(stack, keys[:4])
    assert stack.counters()["cpu"]["ghost_hits_total"]["4"] == 48
