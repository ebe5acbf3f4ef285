"""Ghosts: hits of a tier at half, twice and four times its capacity."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from tests.support.obedient import BLOCK_BYTES, get, put, stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.history.fates import CHUNK_KEYS_MAX, hashes
from tiered_kv.history.ghosts import SIZES, Ghosts
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.workload.hit_rates import hit_curve, hit_rate
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload, block_key


def used(keys: list[OffloadKey], ghosts: Ghosts) -> None:
    for first in range(0, len(keys), CHUNK_KEYS_MAX):
        ghosts.use(hashes(keys[first : first + CHUNK_KEYS_MAX]))


def test_a_small_tier_s_ghosts_are_exact() -> None:
    ghosts, keys = Ghosts(100), make_keys(150)
    for _ in range(3):
        used(keys, ghosts)
    # LRU has none of a circle that is larger than it.
    assert ghosts.snapshot() == {"0.5": 0, "1": 0, "2": 300, "4": 300}
    ghosts.reset()
    used(keys, ghosts)
    assert ghosts.snapshot()["4"] == 300


def test_a_sample_stands_for_a_large_tier_and_takes_bounded_memory() -> None:
    """All chats use 32 common blocks, which are most of the hits. A sample may have many or few of them."""
    chats = [hashes(list(map(block_key, each.hash_ids))) for each in ChatWorkload(chats=960).requests()]
    blocks, shown = sum(map(len, chats)), [0]
    tracemalloc.start()
    ghosts = Ghosts(16_000)
    for digests in chats:
        ghosts.use(digests)
        shown.append(ghosts.snapshot()["4"])
    memory_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory_bytes < 2 << 20
    assert shown == sorted(shown), "a counter does not become less"
    exact = hit_curve(list(ChatWorkload(chats=960).requests()))
    for name, hits in ghosts.snapshot().items():
        assert hits / blocks == pytest.approx(exact.rate(int(SIZES[name] * 16_000)), abs=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "density"])
def test_ghosts_agree_with_tiers_of_their_sizes(policy: str) -> None:
    requests, blocks = list(ChatWorkload(chats=120, active_chats=40).requests()), 500
    curve, asked = hit_curve(requests), sum(len(each.hash_ids) for each in requests)
    with open_stack(stack_of(blocks=blocks)) as opened:
        replay(opened.manager, opened.kv_view, iter(requests), ReplaySettings(concurrency=1))
        found = opened.counters()["cpu"]["ghost_hits_total"]
    for name, times in SIZES.items():
        real = hit_rate(policy, int(times * blocks), requests, curve).hit_rate
        assert found[name] / asked == pytest.approx(real, abs=0.02 if policy == "lru" else 0.05), name


@pytest.fixture
def stack() -> Iterator[Stack]:
    memory = {"type": "memory", "capacity": 64 * BLOCK_BYTES}
    with open_stack(stack_of(memory, {"type": "obedient", "name": "boundless"}, blocks=16)) as opened:
        yield opened


def test_a_stack_s_counters_have_the_hits_of_other_sizes(stack: Stack) -> None:
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
