"""What counts as a block that a request asked for: each once a request, whatever was called how often."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.metrics.history.conftest import OBEDIENT
from tests.support.obedient import (
    BLOCK_BYTES,
    OTHERS,
    WAIT_S,
    Engine,
    blocks,
    get,
    misses,
    obedient,
    put,
    put_below,
    stack_of,
)
from tests.support.stacks import block_hashes, manager_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.history.fates import CHUNK_KEYS_MAX, hashes
from tiered_kv.metrics.history.ghosts import SIZES, Ghosts
from tiered_kv.metrics.history.recorder import BlockHistory
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.requests import ManagerLimits
from tiered_kv.workload.hit_rates import hit_curve, hit_rate
from tiered_kv.workload.replay import ReplaySettings, replay
from tiered_kv.workload.request import ChatWorkload, block_key

KEYS = make_keys(6)


def test_an_engine_that_asks_key_by_key_asks_for_no_block_behind_the_first_miss(stack: Stack) -> None:
    put(stack, KEYS[:2])
    assert Engine(manager_of(stack)).request(KEYS, "r") == 2
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((2, 1), (0, 1))


def test_lookup_many_asks_for_all_of_its_keys(stack: Stack) -> None:
    put(stack, KEYS[:2])
    engine = Engine(manager_of(stack))
    context = engine.begin("r")
    assert manager_of(stack).lookup_many(KEYS, context) == [True, True, False, False, False, False]
    engine.load(KEYS[:2], context)
    engine.end(context)
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((2, 4), (0, 4))


@pytest.mark.parametrize("many", [False, True])
def test_a_request_that_asks_again_and_again_counts_once(stack: Stack, many: bool) -> None:
    engine = Engine(manager_of(stack))
    context = engine.begin("r")
    for _ in range(5):
        if many:
            manager_of(stack).lookup_many(KEYS, context)
        for key in KEYS:
            assert manager_of(stack).lookup(key, context) is False
        manager_of(stack).on_schedule_end()
    engine.end(context)
    assert blocks(stack, "cpu") == blocks(stack, "disk") == (0, 6)
    assert Engine(manager_of(stack)).request(KEYS, "another") == 0
    assert blocks(stack, "cpu") == (0, 7)


def test_a_block_that_was_missed_first_and_loaded_then_is_a_hit(stack: Stack) -> None:
    engine = Engine(manager_of(stack))
    context = engine.begin("r")
    assert engine.look_up(KEYS, context) == 0
    manager_of(stack).on_schedule_end()
    engine.store(KEYS, "another")
    assert engine.look_up(KEYS, context) == 6
    engine.load(KEYS, context)
    engine.load(KEYS, context)  # once more, after a preemption
    engine.end(context)
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((6, 0), (0, 0))


@pytest.mark.parametrize(("admit_after", "fate"), [(1, "stored"), (2, "admission")])
def test_the_reason_is_that_of_the_miss_although_the_block_is_stored_in_the_same_step(
    admit_after: int, fate: str
) -> None:
    with open_stack(stack_of({**OBEDIENT, "admit_after": admit_after})) as stack:
        engine = Engine(manager_of(stack))
        context = engine.begin("r")
        assert manager_of(stack).lookup_many(KEYS, context) == [False] * 6
        engine.store(KEYS, "another")  # and ends the step
        engine.end(context)
        assert misses(stack, "disk") == {"absent": 6}
        assert [each.fate for each in stack.explain(block_hashes(KEYS))[0].tiers] == ["present", fate]


def test_a_request_that_asks_again_and_misses_another_block_between_two_counts_it(stack: Stack) -> None:
    tier, manager, engine = obedient(stack), manager_of(stack), Engine(manager_of(stack))
    tier.present.add(KEYS[1])
    tier.holds_jobs = True
    context = engine.begin("r")
    for _ in range(3):
        assert manager.lookup_many(KEYS[:4], context) == [False, None, False, False]
        manager.on_schedule_end()
    engine.store([KEYS[2]], "another")
    tier.let_go()
    manager.on_schedule_end()
    assert manager.lookup_many(KEYS[:4], context) == [False, False, True, False]
    engine.load([KEYS[2]], context)
    engine.end(context)
    assert blocks(stack, "cpu") == (1, 3)
    assert misses(stack, "disk") == {"absent": 2, "failed": 1}
    tier.let_go()  # or the end of the stack waits for the store


def test_a_block_that_was_found_and_not_loaded_is_neither_hit_nor_miss(stack: Stack) -> None:
    put(stack, KEYS)
    engine = Engine(manager_of(stack))
    context = engine.begin("r")
    assert engine.look_up(KEYS, context) == 6
    engine.end(context)
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((0, 0), (0, 0))


def test_prefetch_asks_for_nothing(stack: Stack) -> None:
    put_below(stack, KEYS[:2])
    engine = Engine(manager_of(stack))
    context = engine.begin("r")
    manager_of(stack).prefetch(KEYS, context)
    for _ in range(3):
        manager_of(stack).on_schedule_end()
    engine.end(context)
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((0, 0), (0, 0))


def test_keys_that_were_noted_are_not_kept_for_ever(stack: Stack) -> None:
    manager, engine, asked = manager_of(stack), Engine(manager_of(stack)), make_keys(3 << 14)
    for first in range(0, len(asked), 512):
        context = engine.begin(f"r-{first}")
        assert not any(manager.lookup_many(asked[first : first + 512], context))
        engine.end(context)
        put(stack, asked[first : first + 16])
    assert stack.history is not None
    assert len(stack.history._misses) <= 512
    stack.history.settle()
    assert not stack.history._pending


def test_calls_without_an_id_are_one_request(stack: Stack) -> None:
    nameless = ReqContext()
    for _ in range(3):
        assert manager_of(stack).lookup_many(KEYS, nameless) == [False] * 6
        manager_of(stack).on_schedule_end()
    stack.close()
    assert manager_of(stack).counters()["disk"]["blocks_total"] == {"miss": 6}


def test_a_request_that_is_forgotten_counts_too() -> None:
    primary = PrimaryRows(CPUBackend(PrimaryRegion(4, BLOCK_BYTES)), "lru")
    history = BlockHistory(64, ["cpu"], [None])
    manager = TieringOffloadingManager(primary, [], limits=ManagerLimits(requests_max=2), history=history)
    engine = Engine(manager)
    for number in range(4):
        assert engine.look_up(KEYS, engine.begin(f"never-finished-{number}")) == 0
        manager.on_schedule_end()
    history.settle()
    assert manager.counters()["cpu"]["blocks_total"] == {"miss": 2}
    manager.shutdown()
    history.settle()
    assert manager.counters()["cpu"]["blocks_total"] == {"miss": 4}
    history.close()


def test_the_facade_asks_once_however_long_it_waits(stack: Stack) -> None:
    put_below(stack, KEYS[:4])
    assert get(stack, KEYS) == 4
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((0, 6), (4, 2))
    assert get(stack, KEYS) == 4
    assert (blocks(stack, "cpu"), blocks(stack, "disk")) == ((4, 8), (4, 4))


def test_a_replay_counts_the_same_hits_as_the_counters_and_misses_add_up_with_reasons(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path), "capacity": "16MiB"}
    with open_stack(stack_of({"type": "memory", "capacity": "256KiB"}, nvme, blocks=48)) as stack:
        chats, hits = ChatWorkload(chats=20, turns=4, active_chats=8, turn_blocks=3), Counter[str]()
        for turn in itertools.count():  # on a busy machine the stores or loads of a replay may all come too late
            assert turn < 20
            report = replay(manager_of(stack), stack.region.kv_view, chats.requests())
            hits.update({tier: traffic.hits for tier, traffic in report.tiers.items()})
            assert manager_of(stack).drain_jobs(WAIT_S)
            if turn and hits["nvme"]:
                break
        assert stack.history is not None
        stack.history.settle()
        assert hits["cpu"] > 0
        for tier in ("cpu", "memory", "nvme"):
            assert hits[tier] == blocks(stack, tier)[0]
            assert sum(misses(stack, tier).values()) == blocks(stack, tier)[1]
        assert blocks(stack, "cpu")[1] == sum(blocks(stack, "memory"))
        # A miss in one tier is a lookup in the next, unless a tier that has the block cannot promote it. A request may
        # ask a second time, if that tier has evicted the block since.
        missed, refused = blocks(stack, "memory")[1], misses(stack, "memory").get("refused", 0)
        assert missed - refused <= sum(blocks(stack, "nvme")) <= missed
        assert stack.counters()["cpu"]["unexplained_blocks_total"] == 0


def test_without_a_history_nothing_is_counted_or_kept() -> None:
    with open_stack(stack_of(OBEDIENT, history=0)) as stack:
        get(stack, KEYS)
        assert stack.history is None
        assert "misses_total" not in stack.counters()["disk"]
        assert "unexplained_blocks_total" not in stack.counters()["cpu"]
        context = ReqContext("r")
        for _ in range(100):
            manager_of(stack).lookup_many(KEYS, context)
            manager_of(stack).on_schedule_end()
        state = manager_of(stack)._requests.get(context)
        assert state is not None
        assert state.log is None


def test_a_block_that_is_evicted_and_missed_in_one_step_was_evicted() -> None:
    with open_stack(stack_of()) as stack:
        put(stack, KEYS)
        engine, manager = Engine(manager_of(stack)), manager_of(stack)
        output = manager.prepare_store(OTHERS[: stack.region.num_blocks], engine.begin("evicts"))
        assert output is not None
        assert set(KEYS) <= set(output.evicted_keys)
        for name in ("r", "s"):
            assert manager.lookup(KEYS[0], engine.begin(name)) is False
        manager.on_schedule_end()
        for name in ("r", "s"):
            engine.end(ReqContext(name))
        assert misses(stack, "cpu") == {"evicted": 2}


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


@pytest.mark.slow
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
        replay(manager_of(opened), opened.region.kv_view, iter(requests), ReplaySettings(concurrency=1))
        found = opened.counters()["cpu"]["ghost_hits_total"]
    for name, times in SIZES.items():
        real = hit_rate(policy, int(times * blocks), requests, curve).hit_rate
        assert found[name] / asked == pytest.approx(real, abs=0.02 if policy == "lru" else 0.05), name


@pytest.fixture
def boundless() -> Iterator[Stack]:
    memory = {"type": "memory", "capacity": 64 * BLOCK_BYTES}
    with open_stack(stack_of(memory, {"type": "obedient", "name": "boundless"}, blocks=16)) as opened:
        yield opened


def test_a_stack_s_counters_have_the_hits_of_other_sizes(boundless: Stack) -> None:
    keys = make_keys(24)
    for _ in range(3):
        for key in keys:
            if not get(boundless, [key]):
                put(boundless, [key])
    counters = boundless.counters()
    assert counters["cpu"]["ghost_hits_total"] == {"0.5": 0, "1": 0, "2": 48, "4": 48}
    assert counters["memory"]["ghost_hits_total"]["0.5"] == 48
    assert "ghost_hits_total" not in counters["boundless"]
    manager_of(boundless).reset_cache()
    put(boundless, keys[:4])
    assert boundless.counters()["cpu"]["ghost_hits_total"]["4"] == 48
