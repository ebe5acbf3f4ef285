"""What an nvme tier behind a primary tier hits, and how often it writes a block again: a line of JSON for each size.

    python tests/performance/nvme_hits.py --trace FILE
    python tests/performance/nvme_hits.py --workloads chats agents documents uniform recency

`tiered-kv simulate` runs the requests, in blocks of 64 KiB. The workloads are those of `policy_hits.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.performance.policy_hits import TRACE, chosen, workload_line
from tiered_kv.stack_config import load_config
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Simulated, simulate

BLOCK_BYTES = 64 << 10
SIZES = {
    TRACE: ((1000, 5000), (1000, 10_000), (1000, 30_000), (5000, 30_000)),
    "chats": ((200, 800), (200, 2000)),
    "agents": ((200, 500), (200, 1000)),
    "documents": ((300, 1500), (300, 4000)),
    "uniform": ((300, 1000), (300, 2500)),
    "recency": ((200, 1000), (200, 4000)),
}
"""Blocks of the primary tier and of nvme."""


def run(
    requests: Sequence[Request], primary_blocks: int, nvme_blocks: int, block_bytes: int = BLOCK_BYTES, **settings: int
) -> Simulated:
    """Simulate a stack of a primary tier and an nvme tier."""
    tier = {"type": "nvme", "path": "unused", "capacity": nvme_blocks * block_bytes, **settings}
    stack = {
        "namespace": {"model": "none"},
        "block": {"bytes": block_bytes},
        "primary": {"capacity": primary_blocks * block_bytes},
        "secondary": [tier],
    }
    return simulate(load_config(stack), requests)


def main() -> None:
    parser = workload_line(__doc__)
    arguments = parser.parse_args()
    if arguments.sizes and len(arguments.sizes) != 2:
        parser.error("--sizes: give the blocks of the primary tier, and those of nvme")
    for name, requests in chosen(arguments):
        for primary, blocks in [arguments.sizes] if arguments.sizes else SIZES[name]:
            outcome = run(requests, primary, blocks)
            nvme = outcome.tiers["nvme"]
            rates = {"hit_rate": outcome.hit_rate, "moved_a_hit": round(nvme.moved_blocks / max(1, nvme.hits), 3)}
            sizes = {"workload": name, "primary_blocks": primary, "nvme_blocks": blocks}
            print(json.dumps({**sizes, "nvme_hits": nvme.hits, **rates}), flush=True)


if __name__ == "__main__":
    main()
