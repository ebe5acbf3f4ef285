"""What an engine computes in a second, from its steps."""

from __future__ import annotations

from tiered_kv.integrations.prefill_meter import PREFILL_TOKENS_MIN, STEPS_MAX, PrefillMeter
from tiered_kv.testing.clock import ManualClock


def step(meter: PrefillMeter, clock: ManualClock, tokens: int, seconds: float) -> float | None:
    meter.begin([tokens])
    clock.advance(seconds)
    return meter.end()


def test_it_follows_steps_with_many_tokens_and_no_others() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    assert meter.end() is None, "a step that began before"
    assert step(meter, clock, PREFILL_TOKENS_MIN - 1, 0.001) is None
    assert step(meter, clock, 1000, 10.0) == 100, "the first one, which compiles"
    for _ in range(STEPS_MAX):
        clock.advance(60.0)  # nothing to do
        rate = step(meter, clock, 1000, 0.5)
    assert rate == 2000


def test_a_step_begins_when_the_one_before_it_has_ended() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    for _ in range(5):
        meter.begin([1000])
    for _ in range(5):
        clock.advance(0.5)
        assert meter.end() == 2000


def test_tokens_that_are_generated_are_none_of_prompts() -> None:
    clock = ManualClock()
    meter = PrefillMeter(clock)
    meter.begin([1] * 2 * PREFILL_TOKENS_MIN)
    clock.advance(10.0)
    assert meter.end() is None, "many requests that generate, and no prompt"
    meter.begin([*[5] * 500, 1000])
    clock.advance(0.5)
    assert meter.end() == 2000, "of the one prompt among them"
