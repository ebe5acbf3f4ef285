"""What an nvme tier behind a primary tier hits, and how often it writes a block again: a line of JSON for each size.

    python tests/performance/nvme_hits.py --trace FILE
    python tests/performance/nvme_hits.py --workloads chats agents documents uniform recency

`tiered-kv simulate` runs the requests, in blocks of 64 KiB. The workloads are those of `policy_hits.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.performance.policy_hits import WORKLOADS
from tiered_kv.config.stack_config import load_config
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import simulate
from tiered_kv.workload.trace import read_trace

BLOCK_BYTES = 64 << 10
TRACE = "conversation"
SIZES = {
    TRACE: ((1000, 5000), (1000, 10_000), (1000, 30_000), (5000, 30_000)),
    "chats": ((200, 800), (200, 2000)),
    "agents": ((200, 500), (200, 1000)),
    "documents": ((300, 1500), (300, 4000)),
    "uniform": ((300, 1000), (300, 2500)),
    "recency": ((200, 1000), (200, 4000)),
}
"""Blocks of the primary tier and of nvme."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=[], choices=sorted(WORKLOADS))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--sizes", nargs=2, type=int, help="blocks of the primary tier, and of nvme")
    parser.add_argument("--segments", type=int, help="segments of the tier; by default as many as the tier chooses")
    arguments = parser.parse_args()
    chosen = {
        name: [Request(number, 0, 0, tuple(ids)) for number, ids in enumerate(WORKLOADS[name][0]())]
        for name in arguments.workloads
    }
    if arguments.trace:
        chosen[TRACE] = list(read_trace(arguments.trace))
    for name, requests in chosen.items():
        for primary, blocks in [arguments.sizes] if arguments.sizes else SIZES[name]:
            tier: dict[str, object] = {"type": "nvme", "path": "unused", "capacity": blocks * BLOCK_BYTES}
            if arguments.segments:
                tier["segment"] = blocks // arguments.segments * BLOCK_BYTES
            stack = {
                "namespace": {"model": "none"},
                "block": {"bytes": BLOCK_BYTES},
                "primary": {"capacity": primary * BLOCK_BYTES},
                "secondary": [tier],
            }
            outcome = simulate(load_config(stack), requests)
            nvme = outcome.tiers["nvme"]
            rates = {"hit_rate": outcome.hit_rate, "moved_a_hit": round(nvme.moved_blocks / max(1, nvme.hits), 3)}
            sizes = {"workload": name, "primary_blocks": primary, "nvme_blocks": blocks}
            print(json.dumps({**sizes, "nvme_hits": nvme.hits, **rates}), flush=True)


if __name__ == "__main__":
    main()
