"""Keeping the capacity and the age of a namespace's blocks: what may be stored, and what has to be deleted."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.grants import Grants
from tiered_kv_s3.ledger import Ledger
from tiered_kv_s3.listing import Listed, Listing
from tiered_kv_s3.presence import Presence

LISTING_S_MAX = 600.0
"""How long the listing of one sweep may take."""
DELETING_S_MAX = 60.0
"""And its deleting."""
SWEPT_MAX = 10_000
"""Blocks that one sweep deletes at most; it holds as many names in memory."""

_Doomed = list[tuple[float, str, int]]  # age, name, size


class Sweeper:
    """Keeps a namespace's capacity, and the age of its blocks. One thread, the caretaker's.

    Blocks of every epoch are counted and deleted: nothing else removes those that a reset made invalid. Foreign
    objects among them are counted too, and never deleted.

    Args:
        listing: Lists and deletes.
        prefix: What the names of all blocks begin with.
        is_block: Tells by its name whether an object is a block.
        ledger: What is counted.
        grants: Where this process and the others say what they will store; None where there is no capacity.
        presence: Told of what was deleted.
        ttl_s: How old a block may be; None for any age.
        counters: Where deletions are counted.
    """

    def __init__(
        self,
        listing: Listing,
        prefix: str,
        is_block: Callable[[str], bool],
        ledger: Ledger,
        grants: Grants | None,
        presence: Presence,
        ttl_s: float | None,
        counters: Counters,
    ) -> None:
        self._listing = listing
        self._prefix = prefix
        self._is_block = is_block
        self._ledger = ledger
        self._grants = grants
        self._presence = presence
        self._ttl_s = ttl_s
        self._counters = counters

    def sweep(self, is_stopping: Callable[[], bool]) -> bool:
        """Make one round: announce, list, delete what has to go.

        Returns:
            Whether the next has to follow soon: more has to go, or this one took longer than the grant held.

        Raises:
            TierUnavailableError: The server does not write, list or delete.
        """
        began_s = time.monotonic()
        try:
            return self._round(began_s + LISTING_S_MAX, is_stopping)
        finally:
            if self._grants:
                self._grants.allow_for(time.monotonic() - began_s)

    def _round(self, deadline: float, is_stopping: Callable[[], bool]) -> bool:
        announced_bytes = self._ledger.begin_round()
        valid_until_s = self._grants.announce(announced_bytes) if self._grants else 0.0
        others = self._grants.of_others(deadline) if self._grants else None  # before the blocks: see `Ledger`
        listed_bytes = 0
        oldest: _Doomed = []  # a heap, the youngest on top
        for page in self._listing.pages(self._prefix, deadline):
            if is_stopping():
                return False
            for entry in page:
                listed_bytes += entry.size_bytes
                if self._is_block(entry.name):
                    _keep_if_old(oldest, entry)
        others_bytes, owners = (others.total_bytes, others.owners) if others else (0, 0)
        self._ledger.end_listing(listed_bytes, others_bytes, owners, valid_until_s)
        doomed = self._doomed(sorted(oldest, reverse=True))
        if doomed:
            self._delete(doomed)
        if self._grants:
            taken_bytes = self._ledger.end_round()
            if taken_bytes < announced_bytes:
                self._grants.announce(taken_bytes)
            if time.monotonic() >= valid_until_s:
                return True
        return len(doomed) == SWEPT_MAX

    def _doomed(self, oldest_first: _Doomed) -> _Doomed:
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

    def _delete(self, doomed: _Doomed) -> None:
        deleted = self._listing.delete([name for _, name, _ in doomed], time.monotonic() + DELETING_S_MAX)
        self._counters.add("deleted_blocks", deleted)
        if deleted < len(doomed):  # which of them is not worth asking: the next listing tells
            raise TierUnavailableError(f"{len(doomed) - deleted} blocks could not be deleted", operation="delete")
        self._ledger.remove(sum(size_bytes for _, _, size_bytes in doomed))
        now_s = time.monotonic()
        for _, name, _ in doomed:
            self._presence.note(name, False, now_s)


def _keep_if_old(oldest: _Doomed, entry: Listed) -> None:
    """Remember the block if it is among the oldest `SWEPT_MAX`."""
    item = (entry.age_s, entry.name, entry.size_bytes)
    if len(oldest) < SWEPT_MAX:
        heapq.heappush(oldest, item)
    elif item > oldest[0]:
        heapq.heapreplace(oldest, item)
