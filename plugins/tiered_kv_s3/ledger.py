"""How much of the capacity is taken: by what the last listing found, what was stored since, and what is on its way."""

from __future__ import annotations

import threading
import time

SWEEP_ABOVE = 0.9
"""Share of the capacity above which the oldest blocks are deleted, so that stores find room."""
SWEEP_DOWN_TO = 0.8
"""Share of the capacity that is left then."""


class Ledger:
    """Bytes of one namespace in the bucket. Any thread may call.

    What was stored while a listing was made is counted twice, until the next one: the capacity holds rather than
    being used to the last byte. What other processes store is seen by the next listing.

    Args:
        capacity_bytes: The limit; None for none.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()  # guards the rest
        self._listed_bytes: int | None = None
        self._stored_bytes = 0  # since the last listing began
        self._stored_before_bytes = 0  # what `_stored_bytes` was when the listing began that is being made
        self._travelling_bytes = 0

    @property
    def used_bytes(self) -> int:
        return (self._listed_bytes or 0) + self._stored_bytes + self._travelling_bytes

    @property
    def is_listed(self) -> bool:
        return self._listed_bytes is not None

    @property
    def wants_sweep(self) -> bool:
        return self._capacity_bytes is not None and self.used_bytes > self._capacity_bytes * SWEEP_ABOVE

    @property
    def surplus_bytes(self) -> int:
        """How much has to go, so that stores find room for a while."""
        if not self.wants_sweep:
            return 0
        assert self._capacity_bytes is not None
        return self.used_bytes - int(self._capacity_bytes * SWEEP_DOWN_TO)

    def reserve(self, size_bytes: int, deadline: float) -> bool:
        """Take room for an object; return whether there is. Waits for the first listing, which tells."""
        with self._changed:
            if self._capacity_bytes is not None:
                wait_s = max(0.0, deadline - time.monotonic())
                if not self._changed.wait_for(lambda: self.is_listed, wait_s):
                    return False
                if self.used_bytes + size_bytes > self._capacity_bytes:
                    return False
            self._travelling_bytes += size_bytes
            return True

    def settle(self, size_bytes: int, *, is_stored: bool) -> None:
        """Note how the store ended that had reserved `size_bytes`."""
        with self._changed:
            self._travelling_bytes -= size_bytes
            if is_stored:
                self._stored_bytes += size_bytes

    def begin_listing(self) -> None:
        """Note that what is stored from now on may be missing from the listing that begins."""
        with self._changed:
            self._stored_before_bytes = self._stored_bytes

    def end_listing(self, listed_bytes: int) -> None:
        """Count with what a whole listing found."""
        with self._changed:
            self._listed_bytes = listed_bytes
            self._stored_bytes -= self._stored_before_bytes
            self._changed.notify_all()

    def remove(self, size_bytes: int) -> None:
        """Note that listed objects of so many bytes are gone."""
        with self._changed:
            self._listed_bytes = max(0, (self._listed_bytes or 0) - size_bytes)
