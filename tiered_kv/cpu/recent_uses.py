"""The rows that requests used lately: what a prefetch may not evict.

`PrimaryRows` notes each use while there are prefetch orders, on the scheduler's thread, with one call for each job.
What must stay true: memory is bounded, and an answer names every row that was used since, or says that it cannot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

KEPT_ROWS_MAX: Final = 2048
"""Rows that are remembered. A prefetch that was asked for before them evicts nothing."""


class RecentUses:
    """The last uses, in the order in which they were noted. Owned by the scheduler's thread."""

    def __init__(self) -> None:
        self.number = 0
        """Rows that were noted, in all: stands for the present time."""
        self._log: deque[Sequence[int]] = deque()
        self._kept = 0

    def note(self, rows: Sequence[int]) -> None:
        """Note that a request uses rows; the list must not change any more."""
        self._log.append(rows)
        self.number += len(rows)
        self._kept += len(rows)
        while self._kept > KEPT_ROWS_MAX:
            self._kept -= len(self._log.popleft())

    def since(self, number: int) -> list[int] | None:
        """Return the rows that were used since `number` stood for the present time; None if that is not known."""
        left = self.number - number
        if left > self._kept:
            return None
        found: list[int] = []
        for rows in reversed(self._log):
            if left <= 0:
                break
            found += rows
            left -= len(rows)
        return found
