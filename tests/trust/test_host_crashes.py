"""An engine, a worker or a host's server is killed at any system call of a session, or many are at random.

Then no row has two uses and no block wrong bytes, rows of the dead are free, and others go on, a new engine too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import host_crashes
from tests.support.children import Child
from tests.support.crash_cases import CrashCases, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.figures import Figures, Profile
from tests.support.syscalls import Fault

pytestmark = [pytest.mark.trust, pytest.mark.slow]

CALLS, KILLS = (10, 10_000), (60, 10_000)
"""How many the short and the full profile take."""
_WAITS = ("clock_nanosleep", "restart_syscall")
"""Of waits for a tracer, or until something is over, there are as many as there is time."""
_SECONDS_MAX = 3600.0


@pytest.mark.parametrize("role", host_crashes.ROLES)
def test_killed_at_any_call_of_a_session(tmp_path: Path, role: str, profile: Profile, figures: Figures) -> None:
    scenario = CrashScenario({"type": role}, tenant="", jobs=0)
    with CrashCases(tmp_path / "c", main=host_crashes.main) as cases:
        calls = [call for call in cases.record(scenario, "all") if call.name not in _WAITS]
        chosen = sample(calls, profile.pick(*CALLS))
        outcomes = cases.run([Case(scenario, fault=Fault.kill(call)) for call in chosen])
    hit = settle("crash/host", outcomes, figures, f"{len(calls)} calls of the {role}")
    assert role == "worker" or sum(outcome.loaded for outcome in hit) > len(hit), "hardly any block was found"


def test_many_kills_lose_no_row_and_spoil_no_byte(tmp_path: Path, profile: Profile, figures: Figures) -> None:
    count = profile.pick(*KILLS)
    with Child(host_crashes.kill_many, str(tmp_path), str(count), "7") as child:
        found = json.loads(child.finish(_SECONDS_MAX) or "{}")
    assert found["loaded"] > count
    assert found["back_ms"][len(found["back_ms"]) // 2] < 50
    notes = [f"{name} {number:,}" for name, number in found["counts"].items()]
    for name in ("back_ms", "attach_ms"):
        values = found[name]
        notes.append(f"{name} {values[len(values) // 2]:.0f}, at most {values[-1]:.0f}")
    figures.add("kills", count, count, ", ".join(notes))
