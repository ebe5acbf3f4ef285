"""A file system that is full before the capacity is reached costs stores, which are counted; space is used again.

`test_full_disk.py FOLDER TIER_TYPE FREE_BYTES` is a program that runs in a new mount namespace. It opens a tier on a
file system in memory that is smaller than the tier's capacity, and prints its findings as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_scenario import BLOCK_BYTES, CrashScenario, ask, load, put
from tests.support.mounts import command_in_namespace, missing_for_tmpfs, small_tmpfs
from tests.support.patient_nvme import waiting_until_closed
from tests.support.stacks import forget_memory, manager_of
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack
from tiered_kv.testing.rig import block_content, make_keys

pytestmark = [pytest.mark.trust("full-disk"), pytest.mark.slow]

FILE_SYSTEM_BYTES = 4 << 20
CAPACITY_BYTES = 64 << 20
JOBS = 60
JOB_BLOCKS = 4
RECOVERY_S_MAX = 60.0
REFUSALS = ("no_space_errors_total", "refused_stores_total", "room_timeouts_total", "failed_calls_total")


@pytest.mark.parametrize("tier_type", ["nvme", "fs"])
@pytest.mark.parametrize("free_bytes", [384 << 10, 512 << 10, 900 << 10])
def test_a_full_file_system_costs_stores_only(tmp_path: Path, tier_type: str, free_bytes: int) -> None:
    """With room for one segment of nvme, for not quite two, and for three."""
    if missing := missing_for_tmpfs():
        pytest.skip(missing)
    command = [sys.executable, __file__, str(tmp_path), tier_type, str(free_bytes)]
    done = subprocess.run(command_in_namespace(command), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    told = json.loads(done.stdout.splitlines()[-1])
    passed = not told["wrong"] and told["refused"] and told["recovered"] and told["found_later"] >= 4
    assert passed, f"{' '.join(command)}: {told}"


def main() -> None:
    folder, tier_type, free_bytes = sys.argv[1:]
    keys = make_keys(JOBS * JOB_BLOCKS, "first")
    with small_tmpfs(Path(folder) / "full", FILE_SYSTEM_BYTES) as point:
        filler = point / "filler"  # another program's file
        filler.write_bytes(bytes(FILE_SYSTEM_BYTES - int(free_bytes)))
        entry = {"type": tier_type, "path": str(point / "kv"), "capacity": CAPACITY_BYTES, "job_timeout": "4s"}
        sizes = {"segment": 256 << 10, "threads": 2} if tier_type == "nvme" else {}
        scenario = CrashScenario({**entry, **sizes}, tenant="full disk", jobs=0)
        with scenario.opened() as stack:
            for start in range(0, len(keys), JOB_BLOCKS):
                put(stack, keys[start : start + JOB_BLOCKS], 0)
                assert stack.flush(30.0), "a job was not reported"
            forget_memory(manager_of(stack))
            _, wrong = found(stack, keys)
            refused = sum(count_of(stack.secondary_tiers[0].stats(), name) for name in REFUSALS)
            filler.unlink()
            again = stored_again(stack)
        with scenario.opened() as stack:
            found_later, wrong_later = found(stack, [*keys, *again])
    told = {"wrong": wrong + wrong_later, "refused": refused, "recovered": bool(again), "found_later": found_later}
    print(json.dumps(told))


def found(stack: Stack, keys: Sequence[OffloadKey]) -> tuple[int, int]:
    """Return how many blocks can be loaded, and how many of them are wrong."""
    contents = {key: load(stack, key) for key, here in zip(keys, ask(stack, keys), strict=True) if here}
    came = {key: content for key, content in contents.items() if content is not None}
    return len(came), sum(content != block_content(key, BLOCK_BYTES) for key, content in came.items())


def stored_again(stack: Stack) -> list[OffloadKey]:
    """Return the keys of blocks that are stored, and load, once there is space; none if that takes too long."""
    end_s = time.monotonic() + RECOVERY_S_MAX
    while time.monotonic() < end_s:
        keys = make_keys(JOB_BLOCKS, f"again {time.monotonic_ns()}")
        put(stack, keys, 0)
        stack.flush(30.0)
        forget_memory(manager_of(stack))
        if found(stack, keys) == (JOB_BLOCKS, 0):
            return keys
        time.sleep(0.1)
    return []


if __name__ == "__main__":
    with waiting_until_closed():
        main()
