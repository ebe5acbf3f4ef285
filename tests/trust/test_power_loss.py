"""When the file system is gone between two calls, what had not reached the device is a miss, never a wrong byte.

nvme answers no block then that it cannot load, with direct I/O or without: a segment's blocks are flushed before the
summary that lists them is written, and a segment without a summary is verified when it is opened. fs may: it flushes no
file, so a block's name may come back without its bytes. That is found by its checksum when it is loaded
(`docs/reference/fs.md`), and only then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.crash_cases import Case, CrashCases, sample, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures, Profile
from tests.support.mounts import PowerLoss, missing_for_ext4
from tests.support.syscalls import Fault, missing_for_tracing

pytestmark = [pytest.mark.trust, pytest.mark.slow]

CAPACITY_BYTES = {"nvme": 424 << 10, "fs": 768 << 10}
OCCUPIED_BYTES_MAX = {**CAPACITY_BYTES, "nvme": 384 << 10}
"""Five segments of 64 KiB and the small files; the capacity's reserves would hide a sixth."""
NVME = CrashScenario(
    {"type": "nvme", "path": "kv", "capacity": CAPACITY_BYTES["nvme"], "segment": 64 << 10, "threads": 1},
    tenant="power",
    jobs=14,
    device=True,
)
FS = CrashScenario(
    {"type": "fs", "path": "kv", "capacity": CAPACITY_BYTES["fs"], "threads": 2}, tenant="power", jobs=14, device=True
)
BUFFERED = dataclasses.replace(NVME, entry={**NVME.entry, "direct": "off"})
CASES_OF_SHORT = 10
CASES_OF_FULL = 150
"""Each makes, mounts and checks a file system. What a call leaves behind, the kills at every single one have shown."""


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[CrashCases]:
    if missing := missing_for_tracing() or missing_for_ext4():
        pytest.skip(missing)
    with CrashCases(tmp_path / "power", image=True) as cases:
        yield cases


@pytest.mark.parametrize("scenario", [NVME, BUFFERED, FS], ids=["nvme", "nvme-buffered", "fs"])
def test_a_file_system_that_is_shut_down_at_any_call_holds_no_wrong_byte(
    cases: CrashCases, scenario: CrashScenario, profile: Profile, figures: Figures
) -> None:
    tier = str(scenario.entry["type"])
    calls = [call for call in cases.record(scenario, "changes") if call.name != "openat" or call.makes_file]
    cuts = [(Fault.kill(call), power) for call in calls for power in PowerLoss]
    chosen = sample(cuts, profile, CASES_OF_SHORT, lambda cut: cut[1], full_count=CASES_OF_FULL)
    run = [
        Case(
            scenario,
            {
                "fault": fault,
                "power": power,
                # fs.md: a reset may be lost when the host dies, and the bytes of files that keep their names.
                "accepts_old": tier == "fs",
                "loses_pages": tier == "fs",
                "capacity_bytes": OCCUPIED_BYTES_MAX[tier],
            },
        )
        for fault, power in chosen
    ]
    hit = settle("power-loss", cases.run(run), figures)
    assert sum(outcome.loaded for outcome in hit) > 0, "nothing ever reached the device: the cases prove nothing"
