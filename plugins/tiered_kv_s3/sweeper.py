"""Deleting the oldest blocks: those past their time, and as many as the capacity demands."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from tiered_kv_s3.counters import Counters
from tiered_kv_s3.ledger import Ledger
from tiered_kv_s3.listing import Listed, Listing

LISTING_S_MAX = 600.0
"""How long the listing of one sweep may take."""
SWEPT_MAX = 10_000
"""Blocks that one sweep deletes at most; it holds as many names in memory."""


class Sweeper:
    """Keeps a namespace's capacity, and the age of its blocks. One thread, the caretaker's.

    Blocks of every epoch are counted and deleted: nothing else removes those that a reset made invalid.

    Args:
        listing: Lists and deletes.
        prefix: What the names of all blocks begin with.
        ledger: What is counted.
        ttl_s: How old a block may be; None for any age.
        counters: Where deletions are counted.
    """

    def __init__(self, listing: Listing, prefix: str, ledger: Ledger, ttl_s: float | None, counters: Counters) -> None:
        self._listing = listing
        self._prefix = prefix
        self._ledger = ledger
        self._ttl_s = ttl_s
        self._counters = counters

    def sweep(self, is_stopping: Callable[[], bool]) -> bool:
        """List all blocks and delete what has to go; return whether more has to go.

        Raises:
            TierUnavailableError: The server does not list, or does not delete.
        """
        self._ledger.begin_listing()
        listed_bytes = 0
        oldest: list[tuple[float, str, int]] = []  # heap of (age, name, size), the youngest on top
        for page in self._listing.pages(self._prefix, time.monotonic() + LISTING_S_MAX):
            if is_stopping():
                return False
            for entry in page:
                listed_bytes += entry.size_bytes
                self._keep_if_old(oldest, entry)
        self._ledger.end_listing(listed_bytes)
        doomed = self._doomed(sorted(oldest, reverse=True))
        if not doomed:
            return False
        deleted = self._listing.delete([name for _, name, _ in doomed])
        self._counters.add("deleted_blocks", deleted)
        if deleted == len(doomed):
            self._ledger.remove(sum(size_bytes for _, _, size_bytes in doomed))
        return len(doomed) == SWEPT_MAX or self._ledger.wants_sweep

    def _keep_if_old(self, oldest: list[tuple[float, str, int]], entry: Listed) -> None:
        """Remember the block if it is among the oldest `SWEPT_MAX`."""
        item = (entry.age_s, entry.name, entry.size_bytes)
        if len(oldest) < SWEPT_MAX:
            heapq.heappush(oldest, item)
        elif item > oldest[0]:
            heapq.heapreplace(oldest, item)

    def _doomed(self, oldest_first: list[tuple[float, str, int]]) -> list[tuple[float, str, int]]:
        """Return those that are too old, and as many more as the capacity demands."""
        surplus_bytes = self._ledger.surplus_bytes
        doomed = []
        for item in oldest_first:
            age_s, _, size_bytes = item
            if surplus_bytes <= 0 and (self._ttl_s is None or age_s <= self._ttl_s):
                break
            doomed.append(item)
            surplus_bytes -= size_bytes
        return doomed
