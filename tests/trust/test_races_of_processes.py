"""Races of stacks and processes: opened, closed and killed amid transfers, on one storage; every byte compared."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from tests.support.children import Child
from tests.support.entries import EntryOf
from tests.support.figures import Figures, Profile
from tests.support.race_cases import BLOCK_BYTES, TIERS, race_from_arguments, seeds_of, stack_of, unless
from tests.support.races import Prompts, Race, open_guarded, phantoms, problems_at_rest, race_facade
from tests.support.racing_scheduler import RacingScheduler
from tests.support.stacks import manager_of
from tiered_kv.stack.open import open_stack

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]

WAIT_S = 60.0
LIMIT_S = 600.0
SHARED = ("fs", "redis", "s3")


# Opening and closing.


@pytest.mark.parametrize("tier", TIERS)
def test_a_shutdown_amid_transfers_is_bounded_and_what_is_opened_next_is_sound(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    entry = entry_of(tier)
    for seed, note in seeds_of(f"{tier}, shutdown", profile.pick(2, 6), figures):
        prompts = Prompts(BLOCK_BYTES, label="shutdown")
        stack, guard = open_guarded(stack_of(entry))
        scheduler = RacingScheduler(manager_of(stack), stack.region, prompts, seed=seed, has_epochs=False)
        scheduler.run(0.05 + 0.02 * seed)
        begin_s = time.monotonic()
        stack.close(timeout=0.0)
        if (took_s := time.monotonic() - begin_s) > 30:
            note([f"close took {took_s:.1f} s"])
        guard.check()
        note([*scheduler.race.problems, *guard.violations])
        with open_stack(stack_of(entry)) as again:  # at once, also where a directory has one owner
            scheduler = RacingScheduler(manager_of(again), again.region, prompts, seed=seed, has_epochs=False)
            scheduler.run(0.3)
            race = scheduler.finish()
            note([*race.problems, *problems_at_rest(manager_of(again)), *phantoms(manager_of(again))])


@pytest.mark.parametrize("tier", TIERS)
def test_a_stack_that_is_closed_under_its_threads_ends_their_calls(
    tier: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    """Without waiting for them, between any two steps of theirs: the interpreter changes threads as often as it can."""
    config = stack_of(entry_of(tier))
    count = profile.pick(20, 200) if tier == "memory" else profile.pick(2, 6)
    for seed, note in seeds_of(f"{tier}, closed under threads", count, figures):
        stack, guard = open_guarded(config)
        closer = threading.Timer(0.01 + 0.0005 * (seed % 40), stack.close, (0.0,))
        with switching_often():
            closer.start()
            race = race_facade(stack, Prompts(BLOCK_BYTES), seed=seed, threads=4, seconds=WAIT_S)
            closer.join()
        guard.check()
        note([*race.problems, *guard.violations])  # an exception that ends a thread fails the test by itself
        note([f"{manager_of(stack).jobs_in_flight} jobs are left"] if manager_of(stack).jobs_in_flight else [])
        note(unless(race.calls > 0, "no call was made"))


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Have the interpreter change threads after a microsecond, and not after five milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# Processes.


def racer(config: Mapping[str, object], seed: int, seconds: float, reset_every: int = 0) -> Child:
    """Start a process that races on its own stack over shared tiers."""
    return Child(race_from_arguments, json.dumps(config), str(seed), str(seconds), str(reset_every))


def race_of(child: Child) -> Race | None:
    """Return what happened in a process; None for one that was killed."""
    told = child.finish(LIMIT_S)
    return None if told is None else Race(**json.loads(told))


@pytest.mark.parametrize("what", ["both go on", "one resets", "one is killed"])
@pytest.mark.parametrize("tier", SHARED)
def test_two_processes_race_on_one_storage(
    tier: str, what: str, entry_of: EntryOf, profile: Profile, figures: Figures
) -> None:
    config = stack_of(entry_of(tier))
    seconds = profile.pick(2.0, 3.0)
    for seed, note in seeds_of(f"{tier}, two processes, {what}", profile.pick(1, 3), figures):
        # A process that will be killed must not end before.
        second_s = LIMIT_S if what == "one is killed" else seconds
        resets = 200 if what == "one resets" else 0
        with racer(config, seed, seconds) as first, racer(config, 1000 + seed, second_s, resets) as second:
            assert [each.line() for each in (first, second)] == ["running"] * 2
            if what == "one is killed":
                time.sleep(seconds / 2)
                second.kill()
            races = [race_of(first), race_of(second)]
        note([problem for race in races if race is not None for problem in race.problems])
        note(unless(races[0] is not None and races[0].verified_blocks > 0, "nothing was loaded"))
        note(unless((races[1] is None) == (what == "one is killed"), "no process was killed"))
        if what == "one resets":
            note(unless(races[1] is not None and races[1].resets > 0, "no process has reset"))
        # And what they have left is sound for a third.
        with open_stack(config) as stack:
            third = race_facade(stack, Prompts(BLOCK_BYTES), seed=seed, threads=2, seconds=0.5)
            note([*third.problems, *problems_at_rest(manager_of(stack)), *phantoms(manager_of(stack))])
