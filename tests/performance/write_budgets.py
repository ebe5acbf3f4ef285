"""What a write budget costs in hits and saves in bytes, by workload, tier size and budget: a line of JSON for each.

    python tests/performance/write_budgets.py --trace FILE
    python tests/performance/write_budgets.py --workloads chats agents documents recency

`tiered-kv simulate` runs the requests over an nvme tier, and a primary tier of an eighth of its blocks. A budget is a
part of what the tier writes without one, what it moves included. A workload's requests come evenly in `DURATION_MS`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from tests.performance.nvme_hits import run
from tests.performance.policy_hits import TRACE, chosen, workload_line
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Simulated

BLOCK_BYTES = 1 << 20
DURATION_MS = 4 * 3_600_000
DAY_S = 86400
PARTS = (1.0, 0.5, 0.25, 0.125)
SIZES = {
    TRACE: (5000, 10_000, 30_000),
    "chats": (2000,),
    "agents": (8000,),
    "documents": (8000,),
    "recency": (4000,),
}


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


def measure(name: str, requests: Sequence[Request], blocks: int) -> None:
    """Print a line for each budget."""
    simulated = partial(run, requests, blocks // 8, blocks, BLOCK_BYTES, store_budget=1 << 40)
    whole = simulated()
    bytes_per_day = whole.tiers["nvme"].written_blocks * BLOCK_BYTES / whole.seconds * DAY_S
    outcomes = {"all": whole, "admit_after 2": simulated(admit_after=2)}
    outcomes |= {f"{part:g}": simulated(write_budget=int(part * bytes_per_day)) for part in PARTS}
    for admission, outcome in outcomes.items():
        about = {"workload": name, "blocks": blocks, "admission": admission}
        print(json.dumps({**about, **line(outcome, whole)}), flush=True)


def main() -> None:
    arguments = workload_line(__doc__).parse_args()
    for name, requests in chosen(arguments, duration_ms=DURATION_MS):
        for blocks in arguments.sizes or SIZES[name]:
            measure(name, requests, blocks)


if __name__ == "__main__":
    main()
