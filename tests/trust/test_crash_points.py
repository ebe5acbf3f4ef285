"""Killed at any call, or without power: right bytes, no phantom, within the capacity, open for more.

A process is killed at each system call that changes its directory, or at each of its sends to a server, where others go
on. When a file system is shut down, what had not reached the device is a miss. nvme answers no block then that it
cannot load. fs may: it flushes no file, so a block's name may come back without its bytes, which its checksum finds
when it is loaded (`docs/reference/fs.md`).
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from tests.support.crash_cases import FS, NO_BLOCKS, NVME, CrashCases, changes_of, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.crash_server import Case
from tests.support.figures import Figures, Profile
from tests.support.mounts import PowerLoss
from tests.support.places import PlaceOf
from tests.support.syscalls import Fault

pytestmark = [pytest.mark.trust, pytest.mark.slow]

KILLS, CUTS, POWER_CUTS, SENDS = (10, 160), (4, 60), (3, 40), (5, 60)
"""How many the short and the full profile take. Many calls are alike: an even sample has all kinds of them. A kill
after a call is like one before the next."""


@pytest.mark.parametrize("scenario", [NVME, FS], ids=["nvme", "fs"])
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
