"""Killed at any system call, a tier comes back: right bytes, no phantom, within its capacity, open for more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import Case, CrashCases, kind_of, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures, Profile
from tests.support.syscalls import Call, Fault, missing_for_tracing

pytestmark = [pytest.mark.trust, pytest.mark.slow]

NVME_CAPACITY_BYTES = 424 << 10
NVME_OCCUPIED_BYTES_MAX = 384 << 10
"""Five segments of 64 KiB and the small files. The capacity has reserves for what file systems add, which would hide a
sixth."""
FS_CAPACITY_BYTES = 768 << 10
NVME = CrashScenario(
    {"type": "nvme", "path": "kv", "capacity": NVME_CAPACITY_BYTES, "segment": 64 << 10, "threads": 1},
    tenant="crash",
    jobs=14,
)
FS = CrashScenario({"type": "fs", "path": "kv", "capacity": FS_CAPACITY_BYTES, "threads": 2}, tenant="crash", jobs=14)
CASES_OF_SHORT = 32
CUTS_OF_SHORT = 10


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    if missing := missing_for_tracing():
        pytest.skip(missing)
    with CrashCases(tmp_path / "crash") as cases:
        yield cases


def changes_of(cases: CrashCases, scenario: CrashScenario) -> list[Call]:
    """Return the calls that change the disk, or its locks."""
    return [call for call in cases.record(scenario, "changes") if call.name != "openat" or call.makes_file]


@pytest.mark.parametrize(
    ("scenario", "capacity_bytes"), [(NVME, NVME_OCCUPIED_BYTES_MAX), (FS, FS_CAPACITY_BYTES)], ids=["nvme", "fs"]
)
def test_killed_at_any_call_a_directory_is_sound(
    cases: CrashCases, scenario: CrashScenario, capacity_bytes: int, profile: Profile, figures: Figures
) -> None:
    tier = scenario.entry["type"]
    calls = changes_of(cases, scenario)
    faults = [fault for call in calls for fault in (Fault.kill(call), Fault.kill_after(call))]
    chosen = sample(faults, profile, CASES_OF_SHORT, lambda fault: (fault.role, fault.name))
    killed = [Case(scenario, {"fault": fault, "capacity_bytes": capacity_bytes}) for fault in chosen]
    cuts = sample(range(cases.count_writes(scenario)), profile, CUTS_OF_SHORT)
    torn = [Case(scenario, {"cut": cut, "cut_ends": True, "capacity_bytes": capacity_bytes}) for cut in cuts]
    kinds = len(set(map(kind_of, calls)))
    note = f"{len(calls)} calls of {kinds} kinds, before and after each, and {len(cuts)} amid a write"
    hit = settle(f"crash/{tier}", cases.run([*killed, *torn]), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), "the cases found hardly any blocks: they prove nothing"
