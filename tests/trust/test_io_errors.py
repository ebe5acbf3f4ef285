"""A disk that fails, fills up, comes short or lies costs blocks: no wrong byte, no crash, no hang."""

from __future__ import annotations

import re

import pytest

from tests.support.crash_cases import FS, NO_BLOCKS, NVME, CrashCases, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.figures import Figures, Profile
from tests.support.syscalls import Call, Fault

pytestmark = [pytest.mark.trust, pytest.mark.slow]

FAILURES, CUTS = (6, 120), (3, 30)
"""How many the short and the full profile take. Many calls are alike: an even sample has all kinds of them."""
READS, BROKEN = 100, 60
"""Of the calls that only read, and of those that fail for good, whose jobs wait for deadlines."""
TIERS = pytest.mark.parametrize("scenario", [NVME, FS], ids=["nvme", "fs"])

WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2")
FLUSHES = ("fsync", "fdatasync")
TAKES_SPACE = (*WRITES, *FLUSHES, "fallocate", "ftruncate", "mkdir", "mkdirat", "rename", "renameat", "openat")


@TIERS
def test_whichever_call_fails_the_engine_goes_on(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    changes, reads = (cases.record(scenario, kind, kills=False) for kind in ("changes", "reads"))
    calls = [*changes, *sample(reads, READS, lambda call: (call.role, call.name))]
    faults = [Fault.fail(call, "EIO") for call in calls]
    faults += [Fault.fail(call, "ENOSPC") for call in calls if takes_space(call)]
    chosen = sample(faults, profile.pick(*FAILURES), lambda fault: (fault.name, fault.what))
    cuts = sample(range(cases.count_writes(scenario)), profile.pick(*CUTS))
    run = [Case(scenario, fault=fault) for fault in chosen] + [Case(scenario, cut=cut) for cut in cuts]
    note = f"EIO and ENOSPC at calls that change something and calls that read, {len(cuts)} short writes"
    hit = settle(f"io-errors/{scenario.tier}", cases.run(run), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), NO_BLOCKS


@pytest.mark.parametrize("scenario", [NVME, pytest.param(FS, marks=pytest.mark.full)], ids=["nvme", "fs"])
def test_a_disk_that_never_recovers_and_one_that_lies_cost_blocks_only(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    calls = [call for kind in ("changes", "reads") for call in cases.record(scenario, kind, kills=False)]
    broken = sample(calls, BROKEN, lambda call: (call.role, call.name))
    lied = [call for call in calls if call.name in (*WRITES, *FLUSHES) and (call.result or 0) >= 0]
    faults = [(call, Fault.fail(call, "EIO", onwards=True)) for call in broken]
    faults += [(call, Fault.lie(call)) for call in lied]
    chosen = sample(faults, profile.pick(*FAILURES), lambda each: (each[1].name, each[1].onwards))
    run = [
        Case(scenario, fault=fault, lies=True, accepts_old=writes_epoch(call, onwards=fault.onwards))
        for call, fault in chosen
    ]
    note = "calls that fail for good, writes and flushes that lie"
    hit = settle(f"io-errors/{scenario.tier}", cases.run(run), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), NO_BLOCKS


def takes_space(call: Call) -> bool:
    """Return whether a call may find the disk full."""
    return call.name in TAKES_SPACE and (call.name != "openat" or call.makes_file)


def writes_epoch(call: Call, *, onwards: bool) -> bool:
    """Return whether a reset may be lost because of this call: no promise holds on a disk that forgets what it took."""
    return call.name in (*WRITES, *FLUSHES) and (onwards or bool(re.search(r"/(?:epoch|owners/)", call.text)))
