"""Killed at any call, without power, or on a failing disk: right bytes, no phantom, within the capacity, then usable.

A process is killed at each system call that changes its directory, or at each of its sends to a server, where others go
on. When a file system is shut down, what had not reached the device is a miss. nvme answers no block then that it
cannot load. fs may: it flushes no file, so a block's name may come back without its bytes, which its checksum finds
when it is loaded (`docs/reference/fs.md`). A disk that fails, fills up, comes short or lies costs blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Literal

import pytest

from tests.support.bad_place import BadPlace
from tests.support.crash_cases import FS, NO_BLOCKS, NVME, CrashCases, changes_of, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.figures import Figures, Profile
from tests.support.mounts import PowerLoss
from tests.support.places import PlaceOf
from tests.support.syscalls import Call, Fault

pytestmark = [pytest.mark.trust, pytest.mark.slow]

KILLS, CUTS, POWER_CUTS, SENDS = (10, 160), (4, 60), (3, 40), (5, 60)
"""How many the short and the full profile take. Many calls are alike: an even sample has all kinds of them. A kill
after a call is like one before the next."""


WITH_SHARES = dataclasses.replace(NVME, entry={**NVME.entry, "limits": {"default": "50%"}})


@pytest.mark.parametrize("scenario", [NVME, WITH_SHARES, FS], ids=["nvme", "nvme-shares", "fs"])
def test_killed_at_any_call_a_directory_is_sound(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    calls = changes_of(cases, scenario)
    kills = sample(calls, profile.pick(*KILLS), lambda call: call.name)
    cuts = sample(range(cases.count_writes(scenario)), profile.pick(*CUTS))
    killed = [Case(scenario, fault=Fault.kill(call)) for call in kills]
    torn = [Case(scenario, cut=cut, cut_ends=True) for cut in cuts]
    kinds = {(call.role, call.name) for call in calls}
    note = f"a run makes {len(calls)} such calls, of {len(kinds)} kinds; {len(cuts)} kills in the middle of a write"
    hit = settle(f"crash/{scenario.tier}", cases.run([*killed, *torn]), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), NO_BLOCKS


@pytest.mark.parametrize("tier", ["redis", "s3"])
def test_killed_at_any_send_to_a_server_a_process_leaves_others_what_they_need(
    cases: CrashCases, tier: str, place_of: PlaceOf, profile: Profile, figures: Figures
) -> None:
    more: dict[str, object] = {"connections": 1, "connect_timeout": 30.0} if tier == "redis" else {"connections": 2}
    entry = {**place_of(tier).entry, **more}
    tenants = itertools.count()

    def of_its_own() -> CrashScenario:
        """Return the scenario with a namespace that no other case uses."""
        return CrashScenario(entry, tenant=f"case-{next(tenants)}", jobs=4)

    calls = cases.record(of_its_own(), "sends")
    kills = sample(calls, profile.pick(*SENDS), lambda call: call.name)
    outcomes = cases.run([Case(of_its_own(), fault=Fault.kill(call)) for call in kills])
    hit = settle(f"crash/{tier}", outcomes, figures, f"a run makes {len(calls)} sends")
    assert sum(outcome.loaded for outcome in hit) > 0, NO_BLOCKS


NVME_ON_DEVICE = dataclasses.replace(NVME, device=True)
BUFFERED = dataclasses.replace(NVME_ON_DEVICE, entry={**NVME.entry, "direct": False})


@pytest.mark.parametrize(
    "scenario", [NVME_ON_DEVICE, BUFFERED, dataclasses.replace(FS, device=True)], ids=["nvme", "nvme-buffered", "fs"]
)
def test_a_file_system_that_is_shut_down_at_any_call_holds_no_wrong_byte(
    tmp_path: Path, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    # docs/reference/fs.md: a reset may be lost when the host dies, and the bytes of files that keep their names.
    is_fs = scenario.tier == "fs"
    with CrashCases(tmp_path / "power", image=True) as cases:
        cuts = [(call, power) for call in changes_of(cases, scenario) for power in PowerLoss]
        chosen = sample(cuts, profile.pick(*POWER_CUTS), lambda cut: cut[1])
        outcomes = cases.run(
            [
                Case(scenario, fault=Fault.kill(call), power=power, accepts_old=is_fs, loses_pages=is_fs)
                for call, power in chosen
            ]
        )
    hit = settle("power-loss", outcomes, figures, scenario.tier)
    assert sum(outcome.loaded for outcome in hit) > 0, "nothing ever reached the device: the cases prove nothing"


FAILURES, SHORT_WRITES = (6, 120), (3, 30)
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
    cuts = sample(range(cases.count_writes(scenario)), profile.pick(*SHORT_WRITES))
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


BAD_PLACES = (4, 60)
"""How many of each kind the short and the full profile take."""


@TIERS
def test_a_place_that_goes_bad_costs_its_blocks_only(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    kinds: list[tuple[Literal["reads", "writes"], str]] = [("writes", "EIO"), ("writes", "ENOSPC"), ("reads", "EIO")]
    writes = range(cases.count_writes(scenario))
    places = [
        BadPlace(write, refuses, code) for refuses, code in kinds for write in sample(writes, profile.pick(*BAD_PLACES))
    ]
    outcomes = cases.run([Case(scenario, bad=bad) for bad in places])
    hit = settle(f"io-errors/{scenario.tier}", outcomes, figures, "places that refuse all reads, or writes, for good")
    assert sum(outcome.loaded for outcome in hit) > len(hit), NO_BLOCKS


def takes_space(call: Call) -> bool:
    """Return whether a call may find the disk full."""
    return call.name in TAKES_SPACE and (call.name != "openat" or call.makes_file)


def writes_epoch(call: Call, *, onwards: bool) -> bool:
    """Return whether a reset may be lost because of this call: no promise holds on a disk that forgets what it took."""
    return call.name in (*WRITES, *FLUSHES) and (onwards or bool(re.search(r"/(?:epoch|owners/)", call.text)))
