"""Every miss has its reason, in the counters and in what the stack explains."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.metrics.history.conftest import OBEDIENT
from tests.support.faulty import FourMethodTier
from tests.support.obedient import (
    BLOCK_BYTES,
    OTHERS,
    WAIT_S,
    Engine,
    blocks,
    evict_all,
    get,
    misses,
    obedient,
    put,
    put_below,
    stack_of,
)
from tests.support.stacks import Register, block_hashes, manager_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.metrics.history.recorder import PENDING_KEYS_MAX
from tiered_kv.stack import manager_type
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.pace import FIRST_LOADS

KEYS = make_keys(4)


@pytest.fixture
def clock(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock of the stacks' timeouts: they pass when the test says so, however slow the machine is."""
    monkeypatch.setattr(manager_type, "TieringOffloadingManager", partial(TieringOffloadingManager, clock=clock))
    return clock


def fates(stack: Stack, index: int = 0) -> list[str]:
    """Return the fate of one of KEYS in each tier."""
    return [each.fate for each in stack.explain(block_hashes([KEYS[index]]))[0].tiers]


def test_what_a_full_tier_evicted() -> None:
    small = {"type": "memory", "capacity": 8 * BLOCK_BYTES}
    with open_stack(stack_of(small)) as stack:
        put_below(stack, KEYS)
        assert get(stack, KEYS) == 0
        assert misses(stack, "cpu") == misses(stack, "memory") == {"evicted": 4}
        assert fates(stack) == ["evicted", "evicted"]
        ages = [each.age_s for each in stack.explain(block_hashes(KEYS))[0].tiers]
        assert all(age is not None and 0 <= age < 3600 for age in ages)


def test_a_block_that_came_from_below_is_a_miss_above() -> None:
    with open_stack(stack_of({"type": "memory", "capacity": 8 * BLOCK_BYTES}, OBEDIENT)) as stack:
        put_below(stack, KEYS)
        assert get(stack, KEYS) == 4
        assert (blocks(stack, "cpu"), blocks(stack, "memory"), blocks(stack, "disk")) == ((0, 4), (0, 4), (4, 0))
        assert misses(stack, "cpu") == misses(stack, "memory") == {"evicted": 4}
        assert misses(stack, "disk") == {}


def test_what_found_the_store_budget_used_up() -> None:
    with open_stack(stack_of({**OBEDIENT, "store_budget": BLOCK_BYTES})) as stack:
        Engine(manager_of(stack)).store(KEYS, "writer")
        for index, key in enumerate(OTHERS[:16]):
            Engine(manager_of(stack)).store([key], f"writer-{index}")
        obedient(stack).present.clear()
        context = Engine(manager_of(stack)).begin("reader")
        assert manager_of(stack).lookup_many(KEYS, context) == [False] * 4
        Engine(manager_of(stack)).end(context)
        assert misses(stack, "disk") == {"evicted": 1, "budget": 3}


def answers_after(stack: Stack, keys: list[OffloadKey], clock: ManualClock, seconds: float) -> list[bool | None]:
    """Return the answers to a request that asks, and asks again after some time."""
    engine = Engine(manager_of(stack))
    context = engine.begin("waits")
    assert manager_of(stack).lookup_many(keys, context) == [None] * len(keys)
    manager_of(stack).on_schedule_end()
    clock.advance(seconds)
    manager_of(stack).on_schedule_end()
    answers = manager_of(stack).lookup_many(keys, context)
    engine.end(context)
    return answers


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("no_space", "no_space"), ("io_error", "failed"), ("timeout", "timeout"), ("too_slow", "failed")],
)
def test_what_the_tier_did_not_store(stack: Stack, cause: str, reason: str) -> None:
    obedient(stack).store_reason = cause
    put_below(stack, KEYS)
    assert get(stack, KEYS) == 0
    assert misses(stack, "disk") == {reason: 4}
    assert fates(stack) == ["evicted", reason]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("io_error", "failed"), ("checksum", "corrupt"), ("absent", "evicted"), ("unknown_key", "failed")],
)
@pytest.mark.parametrize("tiers", [1, 2], ids=["alone", "the next one brings it"])
def test_what_the_tier_had_and_did_not_bring(tiers: int, cause: str, reason: str) -> None:
    with open_stack(stack_of(OBEDIENT, *({**OBEDIENT, "name": "last"} for _ in range(tiers - 1)))) as stack:
        put_below(stack, KEYS)
        obedient(stack).load_reason = cause
        assert get(stack, KEYS) == (0 if tiers == 1 else 4)
        assert misses(stack, "disk") == {reason: 4}
        if tiers == 1:
            assert fates(stack)[1] == ("stored" if reason == "failed" else reason)
        else:
            assert blocks(stack, "last") == (4, 0)


def test_an_open_breaker() -> None:
    with open_stack(stack_of({**OBEDIENT, "breaker_failures": 1, "breaker_cooldown": "1h"})) as stack:
        put(stack, KEYS[:2])
        obedient(stack).store_reason = "io_error"
        put(stack, KEYS[2:3])  # opens it
        put_below(stack, KEYS[3:])
        assert get(stack, KEYS) == 0
        assert misses(stack, "disk") == {"breaker": 4}
        assert [fates(stack, index)[1] for index in range(4)] == ["stored", "stored", "failed", "breaker"]


def test_a_tier_that_never_answers_is_too_slow(clock: ManualClock) -> None:
    with open_stack(stack_of({**OBEDIENT, "lookup_timeout": "1s"})) as stack:
        put_below(stack, KEYS)
        obedient(stack).answers_nothing = True
        assert answers_after(stack, KEYS, clock, 1.0) == [False] * 4
        assert misses(stack, "disk") == {"timeout": 4}
        assert fates(stack) == ["evicted", "stored"], "it still has the blocks"


def test_a_load_that_is_not_reported_is_too_slow(clock: ManualClock) -> None:
    with open_stack(stack_of({**OBEDIENT, "job_timeout": "1s"})) as stack:
        put_below(stack, KEYS[:1])
        obedient(stack).holds_jobs = True
        assert answers_after(stack, KEYS[:1], clock, 1.0) == [False]
        assert misses(stack, "disk") == {"timeout": 1}
        obedient(stack).let_go()


def test_a_request_that_has_waited_too_long(clock: ManualClock) -> None:
    with open_stack(stack_of(OBEDIENT, primary={"request_wait": "1s"})) as stack:
        put_below(stack, KEYS)
        obedient(stack).answers_nothing = True
        assert answers_after(stack, KEYS, clock, 1.0) == [False] * 4
        assert misses(stack, "cpu") == misses(stack, "disk") == {"too_late": 4}


def test_a_block_without_room_to_be_promoted_is_refused_and_tiers_below_are_not_asked() -> None:
    last = {"type": "memory", "capacity": "1MiB"}
    with open_stack(stack_of(OBEDIENT, last, primary={"promotion_budget": BLOCK_BYTES})) as stack:
        put_below(stack, KEYS)
        context = Engine(manager_of(stack)).begin("r")
        assert manager_of(stack).lookup_many(KEYS, context) == [None, False, False, False]
        Engine(manager_of(stack)).end(context)
        assert misses(stack, "disk") == {"refused": 3}
        assert blocks(stack, "memory") == (0, 0)
        assert misses(stack, "cpu") == {"evicted": 3}


def test_a_block_that_the_engine_computes_sooner_is_too_slow_and_tiers_below_are_asked() -> None:
    last = {"type": "memory", "capacity": "1MiB"}
    with open_stack(stack_of(OBEDIENT, last, prefill={"tokens_per_s": 1 << 40})) as stack:
        for _ in FIRST_LOADS:
            put_below(stack, KEYS)
            get(stack, KEYS)
        before = misses(stack, "disk").get("too_slow", 0)
        put_below(stack, KEYS)
        get(stack, KEYS)
        assert misses(stack, "disk")["too_slow"] == before + len(KEYS)
        assert stack.counters()["disk"]["too_slow_blocks_total"]["late"] >= len(KEYS)


def test_what_is_older_than_the_tier_keeps_it() -> None:
    with open_stack(stack_of({**OBEDIENT, "ttl": "1ms"})) as stack:
        put_below(stack, KEYS)
        obedient(stack).present.clear()
        time.sleep(0.002)  # longer than it keeps them
        assert get(stack, KEYS) == 0
        assert misses(stack, "disk") == {"expired": 4}
        assert fates(stack) == ["evicted", "expired"]


def test_what_went_with_a_reset(stack: Stack) -> None:
    put(stack, KEYS)
    manager_of(stack).reset_cache()
    assert get(stack, KEYS[:2]) == 0
    assert misses(stack, "cpu") == misses(stack, "disk") == {"reset": 2}
    put(stack, KEYS[2:])
    assert fates(stack, 0) == ["reset", "reset"]
    assert fates(stack, 2) == ["present", "stored"], "stored after the reset, within the same moment"


def test_a_store_that_ends_after_a_reset_went_with_it(stack: Stack) -> None:
    context = Engine(manager_of(stack)).begin("writer")
    output = manager_of(stack).prepare_store(KEYS, context)
    assert output is not None
    manager_of(stack).complete_store(output.keys_to_store, context)
    manager_of(stack).reset_cache()
    Engine(manager_of(stack)).end(context)  # the tier reports the store
    assert get(stack, KEYS) == 0
    assert misses(stack, "disk") == {"reset": 4}


def test_a_tier_that_cannot_be_reset_is_not_used(register: Register) -> None:
    register("four", FourMethodTier)
    with open_stack(stack_of({"type": "four"})) as stack:
        put(stack, KEYS)
        manager_of(stack).reset_cache()
        manager_of(stack).drain_jobs(10)  # the tier's thread has found that it cannot
        assert get(stack, KEYS, timeout=0.5) == 0
        assert set(misses(stack, "four")) <= {"disabled", "reset"}


@pytest.mark.parametrize("present", [4, 2], ids=["all are promoted", "some are misses"])
def test_a_request_that_waits_is_noted_once_however_often_it_asks(stack: Stack, present: int) -> None:
    """Otherwise the repetitions fill the history's queue, and other requests find no room."""
    tier, manager = obedient(stack), manager_of(stack)
    tier.present.update(KEYS[:present])
    tier.holds_jobs = True
    context = ReqContext("waits")
    manager.on_new_request(context)
    assert stack.history is not None
    stack.history.close()  # so that nothing is taken from the queue, which has room for few keys more
    stack.history.stored(OTHERS[:1] * (PENDING_KEYS_MAX - 64))
    for _ in range(100):
        assert manager.lookup_many(KEYS, context) == [None] * present + [False] * (4 - present)
        manager.on_schedule_end()
    assert stack.counters()["cpu"]["unexplained_blocks_total"] == 0
    stack.history.settle()
    tier.let_go()
    manager.on_request_finished(context)
    manager.on_schedule_end()
    assert stack.flush(WAIT_S)
    assert misses(stack, "disk") == ({} if present == 4 else {"absent": 2})


def test_what_was_not_stored_before_the_deadline(clock: ManualClock) -> None:
    with open_stack(stack_of({**OBEDIENT, "job_timeout": "1s"})) as stack:
        tier = obedient(stack)
        tier.holds_jobs = True
        engine = Engine(manager_of(stack))
        engine.store(KEYS, "stores")
        clock.advance(1.0)
        assert not stack.flush(0.0)
        assert stack.counters()["disk"]["expired_jobs_total"] == 1
        tier.let_go()
        tier.holds_jobs = False
        assert stack.flush(WAIT_S)
        evict_all(stack)
        assert get(stack, KEYS) == 0
        assert misses(stack, "disk") == {"timeout": 4}
        assert fates(stack)[1] == "timeout"
