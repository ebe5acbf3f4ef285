"""A prefetch order: blocks that a router wants in memory until a time, and what has become of each.

The HTTP server's threads make it and read its counts; the thread of a warm start makes orders that only fill memory.
`PrefetchOrders` owns all else, on the manager's thread. What must stay true: the counts of its phases add up to its
blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.chain import OldChain
from tiered_kv.tiering.guarded import GuardedTier

ORDERS_MAX: Final = 1024
"""Limit of orders that have not ended."""
ORDER_BLOCKS_MAX: Final = 4096
"""Limit of the blocks of one order."""
KEYS_MAX: Final = 1 << 16
"""Limit of the blocks of all orders."""
UNTIL_S_MAX: Final = 60.0
"""How long an order may last, in seconds."""


class Phase(Enum):
    """What has become of a block of an order."""

    COMING = auto()
    """It waits to be looked up or loaded, or is being loaded."""
    IN_MEMORY = auto()
    """It is held in memory; of an order that fills memory, it came."""
    USED = auto()
    """A request has used it: the order holds it no more."""
    ABSENT = auto()
    """No tier has it, or none could load it."""
    REFUSED = auto()
    """There was no room for it, or a request needed the room."""


@dataclass(slots=True, eq=False)
class PrefetchOrder:
    """Blocks that are wanted in memory until a time.

    Any thread makes it, and reads its counts. All else belongs to the manager's thread once it was given.
    """

    name: str
    keys: Sequence[OffloadKey]  # distinct
    until_s: float
    """When it ends, by the manager's clock (`time.monotonic`)."""
    unknown: int = 0
    """Blocks of which only 64 bits were given, and which no block here has."""
    chain: OldChain | None = None
    """Set: the order fills memory. Its blocks take free rows only, have this place in the eviction order, and are not
    held. It ends as soon as each has come, or cannot come."""
    on_ended: Callable[[], None] = lambda: None
    """Called at its end, on the manager's thread."""
    phases: dict[OffloadKey, Phase] = field(default_factory=dict)
    is_ended: bool = False
    asked: deque[OffloadKey] = field(default_factory=deque)  # not looked up yet, or without an answer
    found: dict[OffloadKey, GuardedTier] = field(default_factory=dict)
    """Blocks that a tier has said to have in the lookups that are made now."""
    loading: set[OffloadKey] = field(default_factory=set)
    uses_before: int = 0
    """What `RecentUses.number` was when the order was taken."""

    def counts(self) -> dict[str, int]:
        """Return how many blocks are in each phase. Any thread may call."""
        counted = Counter(list(self.phases.values()))
        return {
            **{phase.name.lower(): counted[phase] for phase in Phase},
            "coming": counted[Phase.COMING] + len(self.keys) - sum(counted.values()),
            "absent": counted[Phase.ABSENT] + self.unknown,
        }
