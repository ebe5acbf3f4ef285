"""What a token of a prompt costs an engine, from its steps."""

from __future__ import annotations

import pytest

from tiered_kv.integrations.prefill_meter import PREFILL_TOKENS_MIN, STEPS_MAX, PrefillMeter, TokenCost
from tiered_kv.testing.control import ManualClock


def step(meter: PrefillMeter, clock: ManualClock, tokens: int, seconds: float, before: int = 0) -> TokenCost | None:
    meter.begin([(tokens, before)])
    clock.advance(seconds)
    return meter.end()


def test_it_follows_steps_with_many_tokens_and_no_others() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    assert meter.end() is None, "a step that began before"
    assert step(meter, clock, 1000, 10.0) == (0.01, 0.0), "the first one, which compiles"
    assert step(meter, clock, PREFILL_TOKENS_MIN - 1, 0.001) is None
    for _ in range(STEPS_MAX):
        clock.advance(60.0)  # nothing to do
        cost = step(meter, clock, 1000, 0.5)
    assert cost == (0.0005, 0.0)


def test_an_engine_may_allow_few_tokens_in_a_step() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(STEPS_MAX):
        assert step(meter, clock, 128, 0.064) == pytest.approx((0.0005, 0.0))
        assert step(meter, clock, 40, 10.0) is None, "the end of a prompt"


def test_a_step_begins_when_the_one_before_it_has_ended() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(5):
        meter.begin([(1000, 0)])
    for _ in range(5):
        clock.advance(0.5)
        assert meter.end() == (0.0005, 0.0)


def test_tokens_that_are_generated_are_none_of_prompts() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    meter.begin([(1, 50)] * 2 * PREFILL_TOKENS_MIN)
    clock.advance(10.0)
    assert meter.end() is None, "many requests that generate, and no prompt"
    meter.begin([*[(5, 50)] * 500, (1000, 0)])
    clock.advance(10.5)
    assert meter.end() == (0.0005, 0.0), "of the one prompt among them, which took half a second more"


def test_the_few_tokens_of_a_next_turn_do_not_seem_dear() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(STEPS_MAX):
        assert step(meter, clock, 1, 0.012) is None
        assert step(meter, clock, 0, 0.0001) is None, "nothing to do"
        step(meter, clock, 4096, 0.012 + 4096e-6)
        cost = step(meter, clock, 512, 0.012 + 512e-6, before=4096)
    assert cost == pytest.approx((1e-6, 0.0), abs=1e-12)


@pytest.mark.parametrize("is_in_parts", [False, True])
def test_a_token_costs_more_with_each_one_before_it(is_in_parts: bool) -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    step(meter, clock, 4096, 60.0)
    for size in (2048, 512, 1024, 4096) * 3:
        for before in range(0, size, 512) if is_in_parts else [0]:
            tokens = 512 if is_in_parts else size
            cost = step(meter, clock, tokens, tokens * (3e-4 + 2e-7 * (before + tokens / 2)), before)
    assert cost == pytest.approx((3e-4, 2e-7))
