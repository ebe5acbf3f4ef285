"""What a write budget costs in hits and saves in bytes, by workload, tier size and budget: a line of JSON for each.

    python tests/performance/write_budgets.py --trace FILE --blocks 5000 10000 30000
    python tests/performance/write_budgets.py --workloads chats agents documents recency

Each workload runs through the manager of a stack, as `tiered-kv simulate` does it: a primary tier, and an nvme tier
below it. A budget is a part of what the tier writes without one, what it moves included. The requests of a workload
come evenly in `HOURS`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tests.performance.policy_hits import WORKLOADS
from tiered_kv.config.stack_config import load_config
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Simulated, simulate
from tiered_kv.workload.trace import read_trace

BLOCK_BYTES = 1 << 20
HOURS = 4
DAY_S = 86400
PARTS = (1.0, 0.5, 0.25, 0.125)
SIZES = {"chats": (2000,), "agents": (8000,), "documents": (8000,), "recency": (4000,)}


def run(requests: Sequence[Request], blocks: int, **settings: int) -> Simulated:
    """Simulate a stack whose disk has room for `blocks`, and whose primary tier has room for an eighth of them."""
    tier = {"type": "nvme", "path": "kv", "capacity": blocks * BLOCK_BYTES, "store_budget": 1 << 40, **settings}
    capacity = {"capacity": blocks // 8 * BLOCK_BYTES}
    raw = {"namespace": {"model": "m"}, "block": {"bytes": BLOCK_BYTES}, "primary": capacity, "secondary": [tier]}
    return simulate(load_config(raw), requests)


def line(outcome: Simulated, whole: Simulated) -> dict[str, object]:
    """Return the figures of a run; `whole` is the one that stores everything."""
    tier = outcome.tiers["nvme"]
    return {
        "hit_rate": round(outcome.hit_rate, 4),
        "nvme_hits": tier.hits,
        "stored_blocks": tier.written_blocks - tier.moved_blocks,
        "moved_blocks": tier.moved_blocks,
        "written_a_hit": round(tier.written_blocks / max(1, tier.hits), 2),
        "hits_lost": round(1 - outcome.hit_rate / whole.hit_rate, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=[], choices=sorted(SIZES))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--blocks", nargs="+", type=int, help="of the nvme tier; by default what suits the workload")
    parser.add_argument("--parts", nargs="*", type=float, default=PARTS)
    arguments = parser.parse_args()
    chosen: dict[str, tuple[list[Request], tuple[int, ...]]] = {}
    for name in arguments.workloads:
        prompts = list(WORKLOADS[name][0]())
        gap_ms = HOURS * 3_600_000 / len(prompts)
        chosen[name] = [Request(int(at * gap_ms), 0, 0, tuple(ids)) for at, ids in enumerate(prompts)], SIZES[name]
    if arguments.trace:
        chosen["trace"] = list(read_trace(arguments.trace)), (5000, 10_000, 30_000)
    for name, (requests, sizes) in chosen.items():
        for blocks in arguments.blocks or sizes:
            whole = run(requests, blocks)
            bytes_per_day = whole.tiers["nvme"].written_blocks * BLOCK_BYTES / whole.seconds * DAY_S
            settings: dict[str, dict[str, int]] = {"all": {}, "admit_after 2": {"admit_after": 2}}
            settings |= {f"{part:g}": {"write_budget": int(part * bytes_per_day)} for part in arguments.parts}
            for admission, setting in settings.items():
                outcome = run(requests, blocks, **setting) if setting else whole
                about = {"workload": name, "blocks": blocks, "admission": admission}
                print(json.dumps({**about, **line(outcome, whole)}), flush=True)


if __name__ == "__main__":
    main()
