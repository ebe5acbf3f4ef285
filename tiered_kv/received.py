"""What one request got: how many of its blocks and tokens each tier served, and how long it waited for them.

A manager counts each load as it begins, and answers `received` from the counts, on its own thread. A program's `get`
and `TieredKVConnector` hand the answer on. What must stay true: a load costs a few calls, and no call for each block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

from tiered_kv.base import OffloadKey, group_of

CPU = "cpu"
"""The name of the primary tier."""
LoadCounts = dict[tuple[bytes, str], int]
"""The blocks that a request loaded, by KV cache group and tier."""


@dataclass(slots=True)
class Received:
    """What a request got. A tier is named as in the stack's file; the primary tier is "cpu".

    A block that was promoted for the request counts for the tier that had it.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    """The loaded blocks, by tier."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Their tokens, in the KV cache group with the most blocks; empty if the tokens of a block are unknown."""
    missed_blocks: int = 0
    """Blocks that were asked for and did not come: the request computes them. A program's `get` counts them."""
    waited_s: float = 0.0
    """Seconds that the request waited, in all, for tiers to answer and for blocks to come."""

    def take(self, other: Received, missed_blocks: int) -> None:
        """Become a copy of `other`, with `missed_blocks`."""
        self.blocks, self.tokens, self.waited_s = other.blocks, other.tokens, other.waited_s
        self.missed_blocks = missed_blocks


def count_load(
    counts: LoadCounts, groups: list[bytes], keys: Collection[OffloadKey], sources: Mapping[OffloadKey, str]
) -> bool:
    """Add a load of `keys`, whose groups are `groups`; `sources` has the tiers of promoted blocks.

    Returns:
        Whether all blocks are of one group.
    """
    is_one_group = bool(groups) and groups.count(groups[0]) == len(groups)
    if is_one_group:  # hot path: no tuple for each block
        of_tier = Counter(map(sources.get, keys, repeat(CPU))) if sources else {CPU: len(groups)}
        found: Iterable[tuple[tuple[bytes, str], int]] = (((groups[0], tier), of_tier[tier]) for tier in of_tier)
    else:
        found = Counter(zip(groups, map(sources.get, keys, repeat(CPU)), strict=True)).items()
    for each, count in found:
        counts[each] = counts.get(each, 0) + count
    return is_one_group


def received_of(counts: LoadCounts, waited_s: float, block_tokens: int) -> Received:
    """Return what a request got; `block_tokens` is 0 if unknown."""
    of_group, blocks = Counter[bytes](), Counter[str]()
    for (group, tier), count in counts.items():
        of_group[group] += count
        blocks[tier] += count
    tokens = {}
    if block_tokens and of_group:
        most = max(of_group, key=of_group.__getitem__)
        tokens = {tier: count * block_tokens for (group, tier), count in counts.items() if group == most}
    return Received(dict(blocks), tokens, waited_s=waited_s)


def groups_of(keys: Collection[OffloadKey]) -> list[bytes]:
    """Return the KV cache group of each key."""
    return list(map(group_of, keys))
