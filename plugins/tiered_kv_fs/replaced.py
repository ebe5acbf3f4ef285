"""What this process took away to put blocks in its place, until the ledger is told."""

from __future__ import annotations

import threading

from tiered_kv_fs.ledger import LedgerState


class Replaced:
    """Bytes of files that were taken away by storing, and that the ledger's total still holds.

    A count that runs meanwhile may have missed such a file: then it is in no total any more. So bytes are told only if
    the ledger's word for the last count (`LedgerState.count`) is the one that was there before the file was taken away.
    Otherwise they are dropped: they are counted, at most until the next count. The same where there is no word. A count
    that has begun before and ends after they are told writes a total of its own.

    Any thread may call; the lock is held for a few steps.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._count = ""
        self._size_bytes = 0

    @property
    def count(self) -> str:
        """The ledger's word when it was looked at last; ask before files are taken away, for `add`."""
        return self._count

    def add(self, size_bytes: int, count: str) -> None:
        """Note bytes that were taken away while, or after, `count` was the word."""
        with self._lock:
            if count and count == self._count:
                self._size_bytes += size_bytes

    def tell(self, state: LedgerState, namespace: str) -> None:
        """Take what was noted off the totals. The ledger's lock is held."""
        with self._lock:
            size_bytes, self._size_bytes = self._size_bytes, 0
            is_same, self._count = state.count == self._count, state.count
        if is_same:
            state.take_off(size_bytes, namespace)
