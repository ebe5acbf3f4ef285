"""What a quiet tenant finds beside one that floods the memory at ten times its requests: a line of JSON each.

    python tests/performance/fair_shares.py --policies lru arc density memory nvme --blocks 4000 --share 25

For each policy of the primary tier, and for a memory and an nvme tier below a small primary tier: the quiet tenant's
share of hits in a tier that has only its share, in the whole tier with `limits`, and in the whole tier without; and the
flooding tenant's, with `limits` and without. The requests are simulated, one after the other, so the figures do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

from tests.performance.bench import command_line
from tests.support.shares import (
    FLOODING,
    QUIET,
    flood,
    flooded,
    found_below,
    found_by_tenant,
    memory_of,
    nvme_of,
    quiet_requests,
)
from tiered_kv.cpu.policies import BUILT_IN_POLICIES

TIERS: dict[str, Callable[[int], dict[str, object]]] = {
    "memory": memory_of,
    "nvme": partial(nvme_of, segment_blocks=32),
}


def measure(policy: str, blocks: int, share: int, times: int, chats: int, *, is_chatting: bool) -> dict[str, float]:
    """Return the hit rates of both tenants, where the quiet one has `share` percent of `blocks`."""
    tier_of = TIERS.get(policy)
    found = partial(found_by_tenant, policy=policy) if tier_of is None else partial(found_below, tier_of=tier_of)
    quiet = quiet_requests(chats, active_chats=max(4, chats // 8))
    limits = {QUIET: f"{share}%", "default": f"{100 - share}%"}

    def rates(given: dict[str, str] | None) -> tuple[float, float]:
        asked = flooded(quiet, flood(len(quiet) * times, is_chatting=is_chatting), times)
        total, hits = found(asked, num_blocks=blocks, limits=given)
        return hits[QUIET] / total[QUIET], hits[FLOODING] / total[FLOODING]

    total, hits = found(((QUIET, each) for each in quiet), num_blocks=blocks * share // 100, limits=None)
    alone, with_limits, without = hits[QUIET] / total[QUIET], rates(limits), rates(None)
    return {
        "alone": round(alone, 4),
        "with_limits": round(with_limits[0], 4),
        "without": round(without[0], 4),
        "kept": round(with_limits[0] / alone, 4),
        "flooding_with_limits": round(with_limits[1], 4),
        "flooding_without": round(without[1], 4),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policies", nargs="+", default=[*BUILT_IN_POLICIES, *TIERS])
    parser.add_argument("--floods", nargs="+", default=["new", "chats"], choices=["new", "chats"])
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--share", type=int, default=25)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--chats", type=int, default=60)
    arguments: argparse.Namespace = parser.parse_args()
    for policy in arguments.policies:
        for kind in arguments.floods:  # prompts that never return, or chats
            rates = measure(
                policy,
                arguments.blocks,
                arguments.share,
                arguments.times,
                arguments.chats,
                is_chatting=kind == "chats",
            )
            print(json.dumps({"policy": policy, "flood": kind, **rates}), flush=True)


if __name__ == "__main__":
    main()
