"""Run in a mount namespace of its own: one tier on a file system in memory that is smaller than the tier's capacity.

python full_disk_program.py FOLDER TIER_TYPE FILE_SYSTEM_BYTES FILLED_BYTES

Another program's file of FILLED_BYTES lies there first. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
import time
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
    told: dict[str, object] = {}
    with small_tmpfs(Path(folder) / "full", int(file_system_bytes)) as point:
        filler = point / "filler"
        filler.write_bytes(bytes(int(filled_bytes)))
        config = stack_on(point / "kv", tier_type)
        with open_stack(config) as stack:
            told["taken"], told["wrong"] = fill(stack, "first")
            told["refused_by"] = refusals(stack)
            filler.unlink()
            again = recovers(stack)
            told["recovered"] = bool(again)
        with open_stack(config) as stack:
            keys = [*make_keys(JOBS * JOB_BLOCKS, "first"), *again]
            found = [load(stack, key) for key, here in zip(keys, ask(stack, keys), strict=True) if here]
            contents = {block_content(key, BLOCK_BYTES) for key in keys}
            told["found_later"] = sum(content in contents for content in found)
            told["wrong_later"] = sum(content is not None and content not in contents for content in found)
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


def fill(stack: Stack, label: str) -> tuple[int, int]:
    """Store more than there is room for; return how many blocks the tier has then, and how many of them are wrong."""
    keys = make_keys(JOBS * JOB_BLOCKS, label)
    for start in range(0, len(keys), JOB_BLOCKS):
        put(stack, keys[start : start + JOB_BLOCKS], 0)
        assert stack.flush(30.0), "a job was not reported"
    stack.primary.reset_cache()
    taken = wrong = 0
    for key, here in zip(keys, ask(stack, keys), strict=True):
        content = load(stack, key) if here else None
        taken += content is not None
        wrong += content is not None and content != block_content(key, BLOCK_BYTES)
    return taken, wrong


def refusals(stack: Stack) -> dict[str, int]:
    """Return the counters that tell of stores that failed."""
    tier = stack.secondary_tiers[0].stats()
    names = ("no_space_errors_total", "refused_stores_total", "room_timeouts_total")
    told = {name: tier.get(name, 0) for name in names}
    told["failed_calls_total"] = count_of(tier, "failed_calls_total", "no_space")
    return {name: count for name, count in told.items() if count}


def late_jobs(stack: Stack) -> int:
    """Return how many jobs have missed their deadline so far."""
    (name,) = stack.tier_names
    return count_of(stack.counters(), name, "expired_jobs_total")


def recovers(stack: Stack) -> list[OffloadKey]:
    """Return the keys of blocks that are stored again once there is space; none if that takes too long."""
    end_s = time.monotonic() + RECOVERY_S_MAX
    attempt = 0
    while time.monotonic() < end_s:
        keys = make_keys(JOB_BLOCKS, f"again {attempt}")
        attempt += 1
        put(stack, keys, 0)
        stack.flush(30.0)
        if all(ask(stack, keys)):
            stack.primary.reset_cache()
            wanted = [block_content(key, BLOCK_BYTES) for key in keys]
            late = late_jobs(stack)
            loaded = [load(stack, key) for key in keys]
            if loaded == wanted:
                return keys
            is_wrong = any(content not in (None, right) for content, right in zip(loaded, wanted, strict=True))
            if is_wrong or late_jobs(stack) == late:
                return []
            continue  # a load came too late, as on a busy machine it may
        time.sleep(0.1)
    return []


if __name__ == "__main__":
    with waiting_until_closed():
        main()
