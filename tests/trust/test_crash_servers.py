"""Killed between two requests, a process leaves a server that others go on with: right bytes, no phantom, no lock."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import Case, CaseOutcome, CrashCases, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures, Profile
from tests.support.syscalls import Fault, missing_for_tracing
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.s3_servers import S3Server, moto_server

__all__ = ["moto_server", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow]

CASES_OF_SHORT = 16
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


def killed(cases: CrashCases, scenario: CrashScenario, profile: Profile) -> tuple[list[CaseOutcome], str]:
    """Kill writers at their sends; return what came of it, and how many sends there are, which differs between runs."""
    calls = cases.record(of_its_own(scenario), "sends")
    faults = [fault for call in calls for fault in (Fault.kill(call), Fault.kill_after(call))]
    chosen = sample(faults, profile, CASES_OF_SHORT, lambda fault: (fault.role, fault.name))
    outcomes = cases.run([Case(of_its_own(scenario), {"fault": fault, "capacity_bytes": 0}) for fault in chosen])
    return outcomes, f"{len(calls)} sends, before and after each"


def test_killed_at_any_send_to_redis_a_process_leaves_others_what_they_need(
    cases: CrashCases, redis_server: RedisServer, profile: Profile, figures: Figures
) -> None:
    scenario = CrashScenario(entry_of(redis_server), tenant="", jobs=4)
    outcomes, note = killed(cases, scenario, profile)
    hit = settle("crash/redis", outcomes, figures, note)
    assert sum(outcome.loaded for outcome in hit) > 0, "the cases found no blocks: they prove nothing"


def test_killed_at_any_send_to_s3_a_process_leaves_others_what_they_need(
    cases: CrashCases, moto_server: S3Server, profile: Profile, figures: Figures
) -> None:
    bucket = moto_server.make_bucket()
    settings = moto_server.settings(bucket, connections=2, prefix="kv")
    outcomes, note = killed(cases, CrashScenario(settings, tenant="", jobs=4), profile)
    hit = settle("crash/s3", outcomes, figures, note)
    assert sum(outcome.loaded for outcome in hit) > 0, "the cases found no blocks: they prove nothing"
