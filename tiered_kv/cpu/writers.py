"""Who writes which rows: a number for each writer, which stands in `RowTable.ref_cnt` while the writer writes the row.

`PrimaryRows` owns it, on the scheduler's thread. What must stay true: a number belongs to one writer as long as it
writes a row. So to compare numbers is to compare writers, and a writer costs no entry for each row.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Final

from tiered_kv.base import OffloadKey

PROMOTION: Final = "\0promotion"
"""The writer of a block that is loaded from a secondary tier; no request has this id."""
PROMOTED: Final = -2
"""The number of `PROMOTION`. Requests have smaller ones."""


class Writers:
    """The requests that write rows now, by their id."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._rows: dict[int, int] = {}  # how many rows each number writes
        self._names: dict[int, str] = {}
        self._free_numbers = itertools.count(PROMOTED - 1, -1)

    def number_of(self, writer: str) -> int:
        """Return the number of a writer; 0 if it writes no row."""
        return PROMOTED if writer is PROMOTION else self._numbers.get(writer, 0)

    def begin(self, writer: str, rows: int) -> int:
        """Note that a request writes so many more rows, and return its number."""
        number = self._numbers.get(writer)
        if number is None:
            number = self._numbers[writer] = next(self._free_numbers)
            self._names[number] = writer
        self._rows[number] = self._rows.get(number, 0) + rows
        return number

    def end(self, number: int, rows: int) -> int:
        """Note that a request has ended so many of its rows; return how many are left. The last frees its number."""
        left = self._rows[number] - rows
        if left:
            self._rows[number] = left
        else:
            del self._rows[number], self._numbers[self._names.pop(number)]
        return left


def are_same(keys: Collection[OffloadKey], allocated: Sequence[OffloadKey]) -> bool:
    """Return whether an engine names just the allocated keys: a list of them, or a set, as vLLM."""
    if isinstance(keys, set):
        return len(keys) == len(allocated) and keys.issuperset(allocated)
    return keys == allocated
