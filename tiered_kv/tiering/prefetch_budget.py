"""The blocks that prefetch orders load, what became of each, and how many more they may load.

`PrefetchOrders` (`tiering/orders.py`) owns it, on the manager's thread; other threads read `outcomes` and
`blocks_max`. A load that no request uses takes time of a disk and a processor from requests. So orders may load fewer
blocks while few of the loaded ones are used. What must stay true: while a third or more are used, orders may load
all that the setting `prefetch_budget` allows; and always some, which show when requests use them again. So a useless
order that holds all that may be loaded keeps the newest one waiting for `PROBE_S` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tiered_kv.base import OffloadKey

UNUSED_COST: Final = 0.5
"""What the budget loses by an unused block, in blocks; by a used one it gets one back. So it halves each time that all
loaded blocks go unused, and doubles each time that all are used."""
LEAST_SHARE: Final = 32
"""It keeps one block in so many of the setting's, but at least `LEAST_BLOCKS`."""
LEAST_BLOCKS: Final = 4
PROBE_S: Final = 2.0
"""If no order has begun its turn for so long, in seconds, the newest one's begins: it may load the least beside what is
held. At the least limit, useless ones that a router wants for a minute, the longest, fill no setting of 128 blocks."""


class PrefetchBudget:
    """Loaded blocks of orders, and their limit.

    Args:
        setting: Returns the limit in blocks that the setting `prefetch_budget` gives.

    Attributes:
        outcomes: The metric `prefetched_blocks_total`.
    """

    def __init__(self, setting: Callable[[], int]) -> None:
        self.outcomes = dict.fromkeys(("used", "unused", "refused"), 0)
        self._setting = setting
        self._withheld = 0.0
        """Blocks of the setting's that may not be loaded; below 0 what unused blocks may take before. That is as much
        as a whole budget of unused blocks takes: so a third that is used, before the rest or after it, is enough."""
        self._begun: set[OffloadKey] = set()  # their loads have begun, and not ended
        self._loaded: set[OffloadKey] = set()  # and these are held
        self._probe_s = 0.0  # when an order may load beside the limit
        self._probe_blocks = 0  # that it may still load so

    @property
    def blocks_max(self) -> int:
        """How many loaded blocks orders may hold or load. Any thread may call."""
        return self._setting() - int(min(max(0.0, self._withheld), self._withheld_max))

    @property
    def is_full(self) -> bool:
        """Whether no further load may begin now."""
        return self._is_over and not self._probe_blocks

    @property
    def is_small(self) -> bool:
        """Whether the limit is below half of the setting's."""
        return 2 * self.blocks_max < self._setting()

    def take_turn(self, now_s: float, *, is_free: bool) -> bool:
        """Return whether the newest order is looked up now, while the limit is small.

        The others wait: those that end before it is their turn have cost nothing.

        Args:
            now_s: The time.
            is_free: Whether no order that was looked up before has blocks to load.
        """
        if not (is_free and not self._is_over):
            if now_s < self._probe_s:
                return False
            self._probe_blocks = self._least
        self._probe_s = now_s + PROBE_S
        return True

    def begin(self, key: OffloadKey) -> None:
        """Note that the load of a block begins."""
        if self._is_over:
            self._probe_blocks = max(0, self._probe_blocks - 1)
        self._begun.add(key)

    def arrive(self, key: OffloadKey) -> None:
        """Note that a block is in memory, and held. Only one whose load was begun here counts."""
        if key in self._begun:
            self._begun.discard(key)
            self._loaded.add(key)

    def fail(self, key: OffloadKey) -> None:
        """Note that a block has not been loaded."""
        self._begun.discard(key)

    def refuse(self) -> None:
        """Note that there was no room for a block."""
        self.outcomes["refused"] += 1

    def use(self, key: OffloadKey) -> None:
        """Note that a request uses a held block."""
        if key in self._loaded:
            self._loaded.discard(key)
            self.outcomes["used"] += 1
            self._withheld = max(-UNUSED_COST * self._setting(), self._withheld - 1.0)

    def let_go(self, key: OffloadKey, *, is_in_vain: bool) -> None:
        """Note that no order wants a block any more: `is_in_vain` unless its router has said so."""
        if key in self._loaded or key in self._begun:
            self._loaded.discard(key)
            self._begun.discard(key)
            self.outcomes["unused"] += 1
            if is_in_vain:
                self._withheld = min(self._withheld + UNUSED_COST, self._withheld_max)

    @property
    def _is_over(self) -> bool:
        return len(self._begun) + len(self._loaded) >= self.blocks_max

    @property
    def _least(self) -> int:
        return max(LEAST_BLOCKS, self._setting() // LEAST_SHARE)

    @property
    def _withheld_max(self) -> int:
        return max(0, self._setting() - self._least)
