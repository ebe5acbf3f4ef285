"""A change of state is a notice."""

from __future__ import annotations

from tests.support.obedient import obedient, put, stack_of
from tests.support.stacks import Register
from tiered_kv.metrics.notices import NOTICES_MAX, Notices
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.rig import FourMethodTier, make_keys

OBEDIENT = {"type": "obedient", "breaker_failures": 1, "breaker_cooldown": "1h"}
PATIENT_OBEDIENT = {"type": "obedient", "breaker_failures": 1000}


def notices_of(stack: Stack) -> dict[object, object]:
    """Return the count of each notice, the oldest first."""
    return {notice["what"]: notice["count"] for notice in stack.manager.notices.snapshot()}


def test_a_breaker_that_flips_takes_no_room_from_other_notices() -> None:
    clock = ManualClock()
    began_s = clock()
    notices = Notices(clock)
    notices.add("disk", "damaged blocks", 3)
    for _ in range(2 * NOTICES_MAX):
        clock.advance(2.0)
        notices.add("other", "breaker open")
        notices.add("other", "breaker half open")
    notices.add("disk", "damaged blocks", 2)
    found = [(notice["tier"], notice["what"], notice["count"]) for notice in notices.snapshot()]
    assert found == [
        ("other", "breaker open", 2 * NOTICES_MAX),
        ("other", "breaker half open", 2 * NOTICES_MAX),
        ("disk", "damaged blocks", 5),
    ]
    assert {notice["time"] for notice in notices.snapshot()} == {began_s + 4.0 * NOTICES_MAX}


def test_of_too_many_notices_the_latest_are_kept() -> None:
    notices = Notices(ManualClock())
    for number in range(2 * NOTICES_MAX):
        notices.add("disk", f"change {number}")
    notices.add("disk", f"change {NOTICES_MAX}")
    found = [notice["what"] for notice in notices.snapshot()]
    assert found == [f"change {number}" for number in (*range(NOTICES_MAX + 1, 2 * NOTICES_MAX), NOTICES_MAX)]


def test_a_breaker_that_opens_is_a_notice() -> None:
    with open_stack(stack_of(OBEDIENT)) as stack:
        obedient(stack).store_reason = "timeout"
        put(stack, make_keys(4))
        assert notices_of(stack) == {"breaker open": 1}


def test_damaged_blocks_are_one_notice() -> None:
    with open_stack(stack_of(PATIENT_OBEDIENT)) as stack:
        obedient(stack).store_reason = "checksum"
        put(stack, make_keys(16))
        assert notices_of(stack) == {"damaged blocks": 16}


def test_the_first_exception_is_a_notice_without_its_text() -> None:
    with open_stack(stack_of(PATIENT_OBEDIENT)) as stack:
        obedient(stack).store_error = RuntimeError("the password is tulip")
        put(stack, make_keys(16))
        assert notices_of(stack) == {"first exception, in submit_store": 1}


def test_a_tier_that_cannot_reset_is_a_notice(register: Register) -> None:
    class Nonblocking(FourMethodTier):
        is_nonblocking = True

    register("four", Nonblocking)
    with open_stack(stack_of({"type": "four"})) as stack:
        stack.manager.reset_cache()
        stack.manager.reset_cache()
        assert notices_of(stack) == {"disabled: it cannot reset": 1, "cache reset": 2}
        assert stack.manager.disabled_tiers() == {"four"}
