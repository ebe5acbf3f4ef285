"""Calls that are interrupted at each instruction, and by signals at random: nothing stays taken, held or open.

An exception is raised before each instruction of the calling thread, in our code and in the standard library's. An
opening is interrupted where CPython may run a signal handler: after it has returned, nobody has what it opened.
"""

from __future__ import annotations

import pytest

from tests.support.entries import EntryOf
from tests.support.figures import Figures, Profile
from tests.support.interrupt_cases import CALLS, interrupt_by_signals, interrupt_call
from tests.support.stacks import PATIENT

pytestmark = [
    pytest.mark.trust,
    pytest.mark.slow,
    # Python ignores an interrupt that comes while a generator is closed, and pytest warns of it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TIERS = ["memory", "nvme", "fs"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("over", "verb"), CALLS)
def test_a_call_may_be_interrupted_at_any_instruction(
    over: str, verb: str, tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    count = interrupt_call(over, verb, {**entry_of(tier), **PATIENT}, profile.pick(5, 1))
    figures.add("interrupts", count, count, f"{len(CALLS)} calls")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("over", ["stack", "direct"])
def test_calls_may_be_interrupted_by_signals_at_any_time(
    tier: str, over: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    count = interrupt_by_signals(over, {**entry_of(tier), **PATIENT}, profile.pick(2.0, 20.0))
    figures.add("interrupts", count, count)
