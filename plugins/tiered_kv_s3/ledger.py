"""How much of the capacity this process may still fill.

All processes that share a namespace keep its capacity together, with nothing but the bucket between them. Each says in
the name of a small object how much it may yet add: its *grant* (`grants.py`). A round goes

    1. announce a grant            2. list the grants of all            3. list the blocks

and allows no more of the grant than `capacity - blocks - grants of the others`. Of two that announce at the same time
the one that lists later sees both, so blocks and grants together never exceed the capacity. That needs listings
that show what was written before they began, as S3's do.

What is stored after a listing began may be in it or not, and is charged to the grant: counted twice at worst.
"""

from __future__ import annotations

import math
import threading
import time
from enum import Enum, auto

SPARE_PARTS = 5
"""One part in so many of the capacity is kept free of blocks, for the grants of all."""


class Stored(Enum):
    """Whether a store has taken room."""

    YES = auto()
    NO = auto()
    PERHAPS = auto()
    """It failed, but the server may carry it out all the same, even later."""


class Ledger:
    """Bytes of one namespace in the bucket. Any thread may call.

    Args:
        capacity_bytes: The limit; None for none.
        record_bytes: What one block takes, at most.
    """

    def __init__(self, capacity_bytes: int | None, record_bytes: int) -> None:
        self.found_room = True
        """Whether the last round has left room for one more block."""
        self._capacity_bytes = capacity_bytes
        self._record_bytes = record_bytes
        self._changed = threading.Condition()  # guards the rest
        self._listed_bytes: int | None = None
        self._others_bytes = 0
        self._others = 0
        self._granted_bytes = 0
        self._announced_bytes = 0
        self._valid_until_s = math.inf if capacity_bytes is None else -math.inf
        # All that counts against the grant:
        self._travelling_bytes = 0
        self._stored_bytes = 0  # since the last round began
        self._doubtful_bytes = 0  # failed in doubt since the last round began
        self._doubtful_before_bytes = 0  # and in the round before
        self._failures = 0
        self._has_refused = False
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """What blocks take, as far as this process knows."""
        return (self._listed_bytes or 0) + self._charged_bytes

    @property
    def valid_until_s(self) -> float:
        """When the others will take the grant for lost, in seconds of `time.monotonic()`; stores end before."""
        return self._valid_until_s

    @property
    def wants_round(self) -> bool:
        """Whether the grant is nearly spent, or was too small for a store."""
        if self._capacity_bytes is None:
            return False
        return self._has_refused or 2 * self._charged_bytes > self._granted_bytes

    @property
    def surplus_bytes(self) -> int:
        """What has to be deleted, so that there is room for this process's share of the grants."""
        if self._capacity_bytes is None or self._listed_bytes is None:
            return 0
        return self._share_bytes - self._room_bytes

    def reserve(self, size_bytes: int, deadline: float) -> bool:
        """Take room for an object; return whether there is. Waits for the end of the first round, which tells."""
        with self._changed:
            if self._capacity_bytes is not None:
                failures = self._failures
                wait_s = max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._listed_bytes is not None or self._failures != failures, wait_s)
                if self._listed_bytes is None or time.monotonic() >= self._valid_until_s:
                    return False
                if self._charged_bytes + size_bytes > self._granted_bytes:
                    self._has_refused = True
                    return False
            self._travelling_bytes += size_bytes
            return True

    def settle(self, size_bytes: int, stored: Stored) -> None:
        """Note how the store ended that had reserved `size_bytes`."""
        with self._changed:
            self._travelling_bytes -= size_bytes
            if stored is Stored.YES:
                self._stored_bytes += size_bytes
            elif stored is Stored.PERHAPS:
                self._doubtful_bytes += size_bytes

    def begin_round(self) -> int:
        """Return the grant to announce. What has been stored until now will be in the listing."""
        with self._changed:
            left_bytes = max(0, self._granted_bytes - self._charged_bytes)
            self._has_refused = False
            self._stored_bytes = 0
            self._doubtful_before_bytes, self._doubtful_bytes = self._doubtful_bytes, 0
            self._announced_bytes = self._charged_bytes + max(left_bytes, self._target_bytes)
            self._granted_bytes = self._charged_bytes + min(left_bytes, self._target_bytes)
            return self._announced_bytes

    def end_listing(self, listed_bytes: int, others_bytes: int, others: int, valid_until_s: float) -> None:
        """Take of the announced grant what the listings leave.

        Args:
            listed_bytes: What all blocks take.
            others_bytes: The grants of the others.
            others: How many others there are.
            valid_until_s: How long the grant holds, in seconds of `time.monotonic()`.
        """
        with self._changed:
            self._listed_bytes = listed_bytes
            self._others_bytes = others_bytes
            self._others = others
            if self._capacity_bytes is not None and not self._is_closed:
                self._valid_until_s = valid_until_s
                self._grant()
            self._changed.notify_all()

    def remove(self, size_bytes: int) -> None:
        """Note that listed objects of so many bytes are gone."""
        with self._changed:
            self._listed_bytes = max(0, (self._listed_bytes or 0) - size_bytes)
            self._grant()

    def end_round(self) -> int:
        """Return the grant that is to be announced from now on, as others wait for what is not taken."""
        with self._changed:
            self.found_room = self._charged_bytes + self._record_bytes <= self._granted_bytes
            return min(self._announced_bytes, max(self._granted_bytes, self._charged_bytes))

    def fail_round(self) -> None:
        """Note that a round has failed: stores that wait for the first one fail now."""
        with self._changed:
            self._failures += 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Let nothing be reserved any more; return whether no store is on its way, or may be."""
        with self._changed:
            self._valid_until_s = -math.inf
            self._is_closed = True
            return not (self._travelling_bytes + self._doubtful_bytes + self._doubtful_before_bytes)

    # Under the lock.

    @property
    def _charged_bytes(self) -> int:
        return self._travelling_bytes + self._stored_bytes + self._doubtful_bytes + self._doubtful_before_bytes

    @property
    def _room_bytes(self) -> int:
        """What all that is known leaves for this process."""
        return (self._capacity_bytes or 0) - (self._listed_bytes or 0) - self._others_bytes

    @property
    def _share_bytes(self) -> int:
        return max(self._record_bytes, (self._capacity_bytes or 0) // SPARE_PARTS // (self._others + 1))

    @property
    def _target_bytes(self) -> int:
        """The grant to ask for: more than the share only where there is plenty, for those who may come."""
        if self._listed_bytes is None:
            return self._share_bytes
        return max(self._share_bytes, self._room_bytes // 2 // (self._others + 1))

    def _grant(self) -> None:
        self._granted_bytes = min(self._announced_bytes, self._room_bytes)
