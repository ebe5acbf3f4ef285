"""A disk that fails, fills up, comes short or lies costs blocks: no wrong byte, no crash, no hang."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import FS, NVME, OCCUPIED_BYTES_MAX, Case, CrashCases, kind_of, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures, Profile
from tests.support.syscalls import Call, Fault, missing_for_tracing

pytestmark = [pytest.mark.trust, pytest.mark.slow]

CASES_OF_SHORT, CASES_OF_FULL = 12, 240
CUTS_OF_SHORT, CUTS_OF_FULL = 6, 40
READS_OF_FULL = 100
BROKEN_OF_FULL = 80
"""Disks that fail for good wait for deadlines. Many calls of fs are alike: an even sample has all kinds of them."""
TIERS = pytest.mark.parametrize("scenario", [NVME, FS], ids=["nvme", "fs"])

WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
FLUSHES = ("fsync", "fdatasync")
TAKES_SPACE = (*WRITES, *FLUSHES, "fallocate", "ftruncate", "mkdir", "mkdirat", "rename", "renameat", "openat")


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    if missing := missing_for_tracing():
        pytest.skip(missing)
    with CrashCases(tmp_path / "errors") as cases:
        yield cases


@TIERS
def test_whichever_call_fails_the_engine_goes_on(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    tier = str(scenario.entry["type"])
    options: dict[str, object] = {"capacity_bytes": OCCUPIED_BYTES_MAX[tier]}
    changes, reads = (cases.record(scenario, kind, kills=False) for kind in ("changes", "reads"))
    calls = [*changes, *sample(reads, Profile.FULL, 0, kind_of, full_count=READS_OF_FULL)]
    faults = [Fault.fail(call, "EIO") for call in calls]
    faults += [Fault.fail(call, "ENOSPC") for call in calls if takes_space(call)]
    chosen = sample(faults, profile, CASES_OF_SHORT, lambda fault: (fault.name, fault.what), full_count=CASES_OF_FULL)
    failed = [Case(scenario, {"fault": fault, **options}) for fault in chosen]
    cuts = sample(range(cases.count_writes(scenario)), profile, CUTS_OF_SHORT, full_count=CUTS_OF_FULL)
    short = [Case(scenario, {"cut": cut, **options}) for cut in cuts]
    hit = settle(
        f"io-errors/{tier}",
        cases.run([*failed, *short]),
        figures,
        f"EIO and ENOSPC at {len(changes)} calls that change something and {len(calls) - len(changes)} that read, "
        f"{len(cuts)} short writes",
    )
    assert sum(outcome.loaded for outcome in hit) > len(hit), "the cases found hardly any blocks: they prove nothing"


@TIERS
def test_a_disk_that_never_recovers_and_one_that_lies_cost_blocks_only(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    tier = str(scenario.entry["type"])
    calls = [call for kind in ("changes", "reads") for call in cases.record(scenario, kind, kills=False)]
    broken = [Fault.fail(call, "EIO", onwards=True) for call in calls]
    lied = [Fault.lie(call) for call in calls if call.name in (*WRITES, *FLUSHES) and (call.result or 0) >= 0]
    broken = sample(broken, Profile.FULL, 0, lambda fault: (fault.role, fault.name), full_count=BROKEN_OF_FULL)
    chosen = sample(
        [*broken, *lied],
        profile,
        CASES_OF_SHORT,
        lambda fault: (fault.name, fault.what.partition("=")[0]),
        full_count=CASES_OF_FULL,
    )
    told = {(call.role, call.name, call.number): call for call in calls}
    run = [
        Case(
            scenario,
            {
                "fault": fault,
                "lies": True,
                "accepts_old": writes_epoch(told[fault.role, fault.name, fault.number], onwards=fault.onwards),
                "capacity_bytes": OCCUPIED_BYTES_MAX[tier],
            },
        )
        for fault in chosen
    ]
    note = f"{len(broken)} calls that fail for good, {len(lied)} writes and flushes that lie"
    hit = settle(f"io-errors/{tier}", cases.run(run), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), "the cases found hardly any blocks: they prove nothing"


def takes_space(call: Call) -> bool:
    """Return whether a call may find the disk full."""
    return call.name in TAKES_SPACE and (call.name != "openat" or call.makes_file)


def writes_epoch(call: Call, *, onwards: bool) -> bool:
    """Return whether a reset may be lost because of this call: no promise holds on a disk that forgets what it took."""
    return call.name in (*WRITES, *FLUSHES) and (onwards or bool(re.search(r"/(?:epoch|owners/)", call.text)))
