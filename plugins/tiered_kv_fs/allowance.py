"""The bytes that this process may still fill without asking the others."""

from __future__ import annotations

import threading


class Allowance:
    """What is left of the grants, and what is in flight. Any thread may call; the lock is held for a few additions."""

    def __init__(self) -> None:
        self._free_bytes = 0
        self._in_flight_bytes = 0
        self._lock = threading.Lock()  # guards both

    @property
    def free_bytes(self) -> int:
        """What may be taken now."""
        return self._free_bytes

    @property
    def outstanding_bytes(self) -> int:
        """What may be taken, and what has been taken and not settled."""
        with self._lock:
            return self._free_bytes + self._in_flight_bytes

    @property
    def in_flight_bytes(self) -> int:
        """What has been taken and not settled: somebody may be writing."""
        with self._lock:
            return self._in_flight_bytes

    def has(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` may be taken now."""
        return self._free_bytes >= size_bytes

    def take(self, size_bytes: int) -> bool:
        """Take bytes for a store, if they are there. Pair it with `settle`."""
        with self._lock:
            if self._free_bytes < size_bytes:
                return False
            self._free_bytes -= size_bytes
            self._in_flight_bytes += size_bytes
            return True

    def settle(self, taken_bytes: int, used_bytes: int) -> None:
        """End a store that took `taken_bytes` and filled `used_bytes` of them."""
        with self._lock:
            self._in_flight_bytes -= taken_bytes
            self._free_bytes += taken_bytes - used_bytes

    def add(self, size_bytes: int) -> None:
        """Add a grant."""
        with self._lock:
            self._free_bytes += size_bytes

    def take_all(self) -> int:
        """Take what is free, to give it back to the ledger or to forget it."""
        with self._lock:
            size_bytes, self._free_bytes = self._free_bytes, 0
            return size_bytes
