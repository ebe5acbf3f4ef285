"""Run in a mount namespace of its own: one tier on a file system in memory that is smaller than the tier's capacity.

python full_disk_program.py FOLDER TIER_TYPE FILE_SYSTEM_BYTES FILLED_BYTES

Another program's file of FILLED_BYTES lies there first. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.crash_scenario import BLOCK_BYTES, ask, load, put
from tests.support.mounts import small_tmpfs
from tests.support.patient_nvme import waiting_until_closed
from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.rig import block_content, make_keys

CAPACITY_BYTES = 64 << 20
JOBS = 60
JOB_BLOCKS = 4
RECOVERY_S_MAX = 60.0


def main() -> None:
    folder, tier_type, file_system_bytes, filled_bytes = sys.argv[1:]
    keys = make_keys(JOBS * JOB_BLOCKS, "first")
    with small_tmpfs(Path(folder) / "full", int(file_system_bytes)) as point:
        filler = point / "filler"
        filler.write_bytes(bytes(int(filled_bytes)))
        config = stack_on(point / "kv", tier_type)
        with open_stack(config) as stack:
            for start in range(0, len(keys), JOB_BLOCKS):
                put(stack, keys[start : start + JOB_BLOCKS], 0)
                assert stack.flush(30.0), "a job was not reported"
            stack.primary.reset_cache()
            _, wrong = found(stack, keys)
            refused = refusals(stack)
            filler.unlink()
            again = stored_again(stack)
        with open_stack(config) as stack:
            found_later, wrong_later = found(stack, [*keys, *again])
    told = {"wrong": wrong + wrong_later, "refused": refused, "recovered": bool(again), "found_later": found_later}
    print(json.dumps(told))


def stack_on(path: Path, tier_type: str) -> dict[str, object]:
    tier: dict[str, object] = {"type": tier_type, "path": str(path), "capacity": CAPACITY_BYTES, "job_timeout": "4s"}
    if tier_type == "nvme":
        tier |= {"segment": 256 << 10, "threads": 2}
    tier |= {"breaker_failures": 1_000_000, "lookup_timeout": "30s"}
    return {
        "version": 1,
        "namespace": {"model": "full disk"},
        "block": {"bytes": BLOCK_BYTES, "tokens": 16},
        "primary": {"capacity": 16 * BLOCK_BYTES},
        "secondary": [tier],
    }


def found(stack: Stack, keys: Sequence[OffloadKey]) -> tuple[int, int]:
    """Return how many blocks can be loaded, and how many of them are wrong."""
    contents = {key: load(stack, key) for key, here in zip(keys, ask(stack, keys), strict=True) if here}
    came = {key: content for key, content in contents.items() if content is not None}
    return len(came), sum(content != block_content(key, BLOCK_BYTES) for key, content in came.items())


def refusals(stack: Stack) -> int:
    """Return how many stores were counted as failed."""
    tier = stack.secondary_tiers[0].stats()
    names = ("no_space_errors_total", "refused_stores_total", "room_timeouts_total", "failed_calls_total")
    return sum(count_of(tier, name) for name in names)


def stored_again(stack: Stack) -> list[OffloadKey]:
    """Return the keys of blocks that are stored, and load, once there is space; none if that takes too long."""
    end_s = time.monotonic() + RECOVERY_S_MAX
    while time.monotonic() < end_s:
        keys = make_keys(JOB_BLOCKS, f"again {time.monotonic_ns()}")
        put(stack, keys, 0)
        stack.flush(30.0)
        stack.primary.reset_cache()
        if found(stack, keys) == (JOB_BLOCKS, 0):
            return keys
        time.sleep(0.1)
    return []


if __name__ == "__main__":
    with waiting_until_closed():
        main()
