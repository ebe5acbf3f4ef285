"""Killed at any call, or without power: right bytes, no phantom, within the capacity, open for more.

A process is killed at each system call that changes its directory, or at each of its sends to a server, where others go
on. When a file system is shut down, what had not reached the device is a miss. nvme answers no block then that it
cannot load. fs may: it flushes no file, so a block's name may come back without its bytes, which its checksum finds
when it is loaded (`docs/reference/fs.md`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import (
    FS,
    NVME,
    OCCUPIED_BYTES_MAX,
    Case,
    CrashCases,
    changes_of,
    kind_of,
    sample,
    settle,
)
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures, Profile
from tests.support.mounts import PowerLoss, missing_for_ext4
from tests.support.syscalls import Call, Fault, missing_for_tracing
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.s3_servers import S3Server, moto_server

__all__ = ["moto_server", "redis_server"]

pytestmark = [pytest.mark.trust, pytest.mark.slow]

SHORT, FULL = 20, 240
"""Kills at calls of a directory: all of nvme's, and of fs', of which many are alike, an even sample with all kinds."""
CUTS_OF_SHORT, CUTS_OF_FULL = 8, 80
POWER_OF_SHORT, POWER_OF_FULL = 6, 80
"""Each makes, mounts and checks a file system."""
SENDS_OF_SHORT, SENDS_OF_FULL = 10, 90
NO_BLOCKS = "the cases found hardly any blocks: they prove nothing"


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    if missing := missing_for_tracing():
        pytest.skip(missing)
    with CrashCases(tmp_path / "crash") as cases:
        yield cases


def kills_at(calls: list[Call], profile: Profile, short: int, full: int) -> list[Fault]:
    """Return kills before calls, and a quarter as many after: a kill after one is like that before the next."""
    before = sample(list(map(Fault.kill, calls)), profile, short, lambda fault: fault.name, full_count=full)
    after = sample(list(map(Fault.kill_after, calls)), profile, short // 4, full_count=full // 4)
    return [*before, *after]


@pytest.mark.parametrize("scenario", [NVME, FS], ids=["nvme", "fs"])
def test_killed_at_any_call_a_directory_is_sound(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    tier = str(scenario.entry["type"])
    options: dict[str, object] = {"capacity_bytes": OCCUPIED_BYTES_MAX[tier]}
    calls = changes_of(cases, scenario)
    killed = [Case(scenario, {"fault": fault, **options}) for fault in kills_at(calls, profile, SHORT, FULL)]
    cuts = sample(range(cases.count_writes(scenario)), profile, CUTS_OF_SHORT, full_count=CUTS_OF_FULL)
    torn = [Case(scenario, {"cut": cut, "cut_ends": True, **options}) for cut in cuts]
    note = f"of {len(calls)} calls of {len(set(map(kind_of, calls)))} kinds, and {len(cuts)} amid a write"
    hit = settle(f"crash/{tier}", cases.run([*killed, *torn]), figures, note)
    assert sum(outcome.loaded for outcome in hit) > len(hit), NO_BLOCKS


@pytest.mark.parametrize("tier", ["redis", "s3"])
def test_killed_at_any_send_to_a_server_a_process_leaves_others_what_they_need(
    cases: CrashCases, tier: str, request: pytest.FixtureRequest, profile: Profile, figures: Figures
) -> None:
    if tier == "redis":
        redis: RedisServer = request.getfixturevalue("redis_server")
        entry: dict[str, object] = {"type": tier, "url": redis.url, "connections": 1, "connect_timeout": 30.0}
    else:
        moto: S3Server = request.getfixturevalue("moto_server")
        entry = moto.settings(moto.make_bucket(), connections=2, prefix="kv")
    tenants = itertools.count()

    def of_its_own() -> CrashScenario:
        """Return the scenario with a namespace that no other case uses."""
        return CrashScenario(entry, tenant=f"case-{next(tenants)}", jobs=4)

    calls = cases.record(of_its_own(), "sends")
    faults = kills_at(calls, profile, SENDS_OF_SHORT, SENDS_OF_FULL)
    outcomes = cases.run([Case(of_its_own(), {"fault": fault}) for fault in faults])
    hit = settle(f"crash/{tier}", outcomes, figures, f"of {len(calls)} sends")
    assert sum(outcome.loaded for outcome in hit) > 0, NO_BLOCKS


NVME_ON_DEVICE = dataclasses.replace(NVME, device=True)
BUFFERED = dataclasses.replace(NVME_ON_DEVICE, entry={**NVME.entry, "direct": "off"})


@pytest.mark.parametrize(
    "scenario",
    [NVME_ON_DEVICE, BUFFERED, dataclasses.replace(FS, device=True)],
    ids=["nvme", "nvme-buffered", "fs"],
)
def test_a_file_system_that_is_shut_down_at_any_call_holds_no_wrong_byte(
    tmp_path: Path, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    if missing := missing_for_tracing() or missing_for_ext4():
        pytest.skip(missing)
    tier = str(scenario.entry["type"])
    # docs/reference/fs.md: a reset may be lost when the host dies, and the bytes of files that keep their names.
    allowed = {"accepts_old": tier == "fs", "loses_pages": tier == "fs", "capacity_bytes": OCCUPIED_BYTES_MAX[tier]}
    with CrashCases(tmp_path / "power", image=True) as cases:
        calls = changes_of(cases, scenario)
        cuts = [(Fault.kill(call), power) for call in calls for power in PowerLoss]
        chosen = sample(cuts, profile, POWER_OF_SHORT, lambda cut: cut[1], full_count=POWER_OF_FULL)
        outcomes = cases.run([Case(scenario, {"fault": fault, "power": power, **allowed}) for fault, power in chosen])
    hit = settle("power-loss", outcomes, figures)
    assert sum(outcome.loaded for outcome in hit) > 0, "nothing ever reached the device: the cases prove nothing"
