"""Killed between two requests, a process leaves a server that others go on with: right bytes, no phantom, no lock."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tiered_kv.testing.crash_cases import Case, CaseOutcome, CrashCases, sample, settle
from tiered_kv.testing.crash_scenario import BLOCK_BYTES, JOB_BLOCKS, CrashScenario
from tiered_kv.testing.figures import Figures, Profile
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.redis_watch import NamespacesWatched
from tiered_kv.testing.s3_servers import S3Server, moto_server
from tiered_kv.testing.syscalls import Fault, missing_for_tracing
from tiered_kv.toolkit.record import HEADER_BYTES

__all__ = ["moto_server", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow]

RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
REDIS_QUOTA_BYTES = 144 << 10
"""Three quarters of what a run stores, and nearly the least that may be (docs/redis.md)."""
SURVEY_S = 130.0
"""A killed process's survey is in the way for a minute (docs/redis.md), and the rest that follows one."""
CASES_OF_SHORT = 16
FURTHER_CASES = 36
"""At most: what they do not come to, the tests below say."""
FURTHER_AT_ONCE = 6
_tenants = itertools.count()


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    if missing := missing_for_tracing():
        pytest.skip(missing)
    with CrashCases(tmp_path / "crash") as cases:
        yield cases


def entry_of(server: RedisServer, **more: object) -> dict[str, object]:
    """Return the entry of a tier that takes no server for gone because a busy machine holds it up."""
    return {"type": "redis", "url": server.url, "connections": 1, "connect_timeout": 30.0, **more}


def of_its_own(scenario: CrashScenario) -> CrashScenario:
    """Return the scenario with a namespace that no other case uses."""
    return dataclasses.replace(scenario, tenant=f"case-{next(_tenants)}")


def killed(
    cases: CrashCases,
    scenario: CrashScenario,
    profile: Profile,
    is_enough: Callable[[Sequence[CaseOutcome]], object] = lambda hit: True,
) -> tuple[list[CaseOutcome], str]:
    """Kill writers at their sends; return what came of it, and how many sends there are.

    How many there are differs from run to run, and what a proof is about comes late in a run. So where the cases have
    not come to that, further ones are tried, from the last send backwards, until they have. Of these only those whose
    fault happened are returned: late sends often do not come again, and nobody has promised a share of them.
    """
    calls = cases.record(of_its_own(scenario), "sends")
    faults = [fault for call in calls for fault in (Fault.kill(call), Fault.kill_after(call))]
    chosen = sample(faults, profile, CASES_OF_SHORT, lambda fault: (fault.role, fault.name))

    def run(faults: Sequence[Fault]) -> list[CaseOutcome]:
        options = [{"fault": fault, "capacity_bytes": 0} for fault in faults]
        return cases.run([Case(of_its_own(scenario), each) for each in options])

    outcomes = run(chosen)
    further = (Fault.kill(call) for call in calls[:: -max(1, math.ceil(len(calls) / FURTHER_CASES))])
    left = [fault for fault in further if fault not in chosen]
    while left and not is_enough([each for each in outcomes if each.was_hit]):
        outcomes += [each for each in run(left[:FURTHER_AT_ONCE]) if each.was_hit or each.problems]
        del left[:FURTHER_AT_ONCE]
    return outcomes, f"{len(calls)} sends, before and after each"


def test_killed_at_any_send_to_redis_a_process_leaves_others_what_they_need(
    cases: CrashCases, redis_server: RedisServer, profile: Profile, figures: Figures
) -> None:
    scenario = CrashScenario(entry_of(redis_server), tenant="", jobs=4)
    outcomes, note = killed(cases, scenario, profile)
    hit = settle("crash/redis", outcomes, figures, note)
    assert sum(outcome.loaded for outcome in hit) > 0, "the cases found no blocks: they prove nothing"


def test_killed_at_any_send_to_redis_a_process_with_a_quota_leaves_others_their_room_and_never_takes_more(
    cases: CrashCases, redis_server: RedisServer, profile: Profile, figures: Figures
) -> None:
    entry = entry_of(redis_server, quota=REDIS_QUOTA_BYTES)
    scenario = CrashScenario(entry, tenant="", jobs=6, store_s_max=SURVEY_S, keeps_newest=False)

    def is_enough(hit: Sequence[CaseOutcome]) -> bool:
        return bool(crowded(hit, REDIS_QUOTA_BYTES) and of_the_account(hit))

    with NamespacesWatched(redis_server, RECORD_BYTES, surveys_end_early=True) as watched:
        outcomes, note = killed(cases, scenario, profile, is_enough=is_enough)
    outcomes = with_problems(outcomes, watched.over(REDIS_QUOTA_BYTES))
    if profile is Profile.FULL:  # a sample has the patience that others need
        with NamespacesWatched(redis_server, RECORD_BYTES, surveys_end_early=False) as watched:
            patient, _ = killed(cases, scenario, Profile.SHORT)
        outcomes += with_problems(patient, watched.over(REDIS_QUOTA_BYTES))
    hit = settle("crash/redis", outcomes, figures, f"{note}, with a quota")
    assert sum(outcome.loaded for outcome in hit) > 0, "the cases found no blocks: they prove nothing"
    assert crowded(hit, REDIS_QUOTA_BYTES), "no case came to where the quota is full"
    assert of_the_account(hit), "the account's sends were left out"


def test_killed_at_any_send_to_s3_a_process_leaves_others_what_they_need(
    cases: CrashCases, moto_server: S3Server, profile: Profile, figures: Figures
) -> None:
    bucket = moto_server.make_bucket()
    settings = moto_server.settings(bucket, connections=2, prefix="kv")
    outcomes, note = killed(cases, CrashScenario(settings, tenant="", jobs=4), profile)
    hit = settle("crash/s3", outcomes, figures, note)
    assert sum(outcome.loaded for outcome in hit) > 0, "the cases found no blocks: they prove nothing"


def with_problems(outcomes: Sequence[CaseOutcome], problems: Sequence[str]) -> list[CaseOutcome]:
    """Return the outcomes, with problems that belong to all of them in the last."""
    *others, last = outcomes
    return [*others, dataclasses.replace(last, problems=[*last.problems, *problems])]


def of_the_account(outcomes: Sequence[CaseOutcome]) -> list[CaseOutcome]:
    """Return the cases that were killed by what the thread that keeps a quota's account sent."""
    return [each for each in outcomes if "-quota" in str(each.case.options["fault"])]


def crowded(outcomes: Sequence[CaseOutcome], limit_bytes: int) -> list[CaseOutcome]:
    """Return the cases that had stored more than there is room for when they were killed."""
    return [each for each in outcomes if each.details["jobs_stored"] * JOB_BLOCKS * RECORD_BYTES > limit_bytes]
