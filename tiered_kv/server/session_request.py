"""A request of an engine, as its host's server knows it, and the index that finds its rows.

`Session` owns it, on the server's thread. A block of the request is found only while its row has the noted generation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import truth
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.hints import HINTS_KEY, Hints
from tiered_kv.server import protocol

RING_ROWS: Final = 2
"""Places of the ring for each row: prefixes that share a head note its rows several times."""
RUN_MIN: Final = 16
"""A search ends if it finds fewer rows in succession: then a look at each key is as fast."""


@dataclass(slots=True, eq=False)
class SessionRequest:
    """A request of an engine."""

    number: int
    context: ReqContext
    epoch: int
    """The namespace's epoch when the request began, as the engine knew it."""
    is_known: bool = False
    """Whether the manager knows it."""
    codes: array[int] = field(default_factory=lambda: array("I"))
    """The row of each key, or a code of the protocol: `MISSING` or `WAITING`."""
    unsplit: list[tuple[bytes, int]] = field(default_factory=list)
    """The last keys and their number, message by message. If all blocks are found, the keys are never split."""
    _keys: list[OffloadKey] = field(default_factory=list)
    """Keys that were split; `keys` splits and appends all other keys."""
    answered: int = 0
    """Keys before this one have their final codes."""
    leased: dict[int, None] = field(default_factory=dict)
    """The leased rows of the request, as an ordered set."""
    is_ahead: bool = False
    """Whether the request waits in the engine's queue."""
    is_prefix: bool = False
    """Whether blocks behind a missing one are of no use."""
    lacks_leases: bool = False
    """Whether its keys are a prefix, and its session had no lease left for a ready block."""
    has_hole: bool = False
    """Whether its keys are a prefix, and a block of it is missing."""
    prefetched: int = 0
    """Keys before this one are ready, or were given to the manager's prefetch."""
    told: array[int] = field(default_factory=lambda: array("I"))
    """The codes that were last sent, from `answered` on, if they were not all final."""
    promoting: int = 0
    """How many of its blocks were being promoted when it was last looked up."""
    unanswered: int = 0
    """How many of its keys had no final code then, except for blocks that wait only for earlier ones."""
    asked_to: int = 0
    """The place of the key with which the next look-up begins, if one look-up cannot ask for all."""

    @property
    def keys(self) -> list[OffloadKey]:
        for packed, count in self.unsplit:
            self._keys += protocol.split_keys(packed, count)
        self.unsplit.clear()
        return self._keys

    def end_prefix(self, missing: int) -> None:
        """Note that a block of a prefix is missing: blocks behind it, and blocks that are named later, do not come."""
        self.has_hole = True
        for index in range(missing, len(self.codes)):
            if self.codes[index] == protocol.WAITING:
                self.codes[index] = protocol.MISSING

    def cut(self, index: int) -> None:
        """Note that a block is missing, and with it all blocks behind it."""
        self.codes[index:] = protocol.codes_of(protocol.MISSING, len(self.codes) - index)

    def take_head(
        self, asked: Sequence[int], answers: Sequence[bool | None], room: int, rows: PrimaryRows
    ) -> tuple[list[int], int]:
        """Note the rows of the ready blocks at the head of a prefix, at most `room`. The caller leases these rows.

        No row behind a block that is not ready is leased. So a request withholds no row that others need to go on.

        Args:
            asked: Places of the keys without a final code.
            answers: Whether the block at each of these places is ready (True), missing (False), or may come.

        Returns:
            These rows, and how many other blocks are ready and wait only for earlier ones.
        """
        if False in answers:
            self.end_prefix(asked[answers.index(False)])
        ready = sum(1 for _ in takewhile(truth, answers))
        self.lacks_leases = ready > room
        keys = [self.keys[place] for place in asked[: min(ready, room)]]
        found = rows.ready(keys)
        for place, row in zip(asked, found, strict=False):
            self.codes[place] = row
        return found, 0 if self.lacks_leases else answers.count(True) - ready

    def unsplit_from(self, first: int) -> list[tuple[bytes, int]]:
        """Return the messages with the keys from `first` on; none if these have been split."""
        at = len(self._keys)
        for index, (_, count) in enumerate(self.unsplit):
            if at == first:
                return self.unsplit[index:]
            at += count
        return []


def params_of(hints: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return the parameters of a request: its hints, and none of the other entries that a client may have written.

    Invalid hints stay invalid, so that they are counted.
    """
    try:
        return {HINTS_KEY: Hints.parse(hints).given() or {}}
    except (ValueError, TypeError, AttributeError):
        return {HINTS_KEY: {"": None}}


class RowIndex:
    """Remembers prefixes as they were last seen, one behind the other in a ring. Owned by the server's thread.

    To find 512 keys in a dictionary that has left the processor's cache takes 0.2 ms, and an engine's step waits. Here
    the row of the first key leads to a place in the ring. That its prefix stands there is a guess. A note counts only
    for its own key, and while its row has the noted generation: a row that is freed gets another one.

    Args:
        row_of: Returns the row of a ready block.
        generations: The generation of each row.
    """

    def __init__(self, row_of: Callable[[OffloadKey], int | None], generations: memoryview) -> None:
        self._row_of = row_of
        self._generations = generations
        self._size = RING_ROWS * len(generations)
        self._places = np.zeros(len(generations), np.uint32)
        """The place at which the ring last noted each row. The next three fields are the ring."""
        self._keys: np.ndarray[Any, np.dtype[np.void]] = np.zeros(0, np.void(0).dtype)
        self._rows = np.zeros(self._size, np.uint32)
        self._noted = np.full(self._size, 0xFFFFFFFF, np.uint32)  # no row has that at first
        self._end = 0

    def note(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Note that ready blocks are in these rows, in the order of a prefix."""
        if not len(self._keys):
            self._keys = np.zeros(self._size, f"V{len(keys[0])}")
        packed = b"".join(keys)
        if set(map(len, keys)) != {self._keys.itemsize}:  # engines of a namespace have keys of one length
            return
        for at in range(0, len(rows), self._size):
            part = np.array(rows[at : at + self._size], np.uint32)
            first = self._end if self._end + len(part) <= self._size else 0
            self._end = end = first + len(part)
            self._keys[first:end] = np.frombuffer(packed, self._keys.dtype, len(part), at * self._keys.itemsize)
            self._rows[first:end] = part
            self._noted[first:end] = self._current().take(part)
            self._places[part] = np.arange(first, end, dtype=np.uint32)

    def find_all(self, parts: Iterable[tuple[bytes, int]]) -> array[int]:
        """Return the rows of ready blocks: of all keys, or of the first ones.

        Args:
            parts: For each message its keys, packed, of one length; and their number.
        """
        found = array("I")
        for packed, count in parts:
            wanted = len(found) + count
            self._find(packed, count, found)
            if len(found) < wanted:
                break
        return found

    def _find(self, packed: bytes, count: int, found: array[int]) -> None:
        """Append the rows of a message's keys."""
        size = self._keys.itemsize
        while len(packed) == count * size > 0:
            row = self._row_of(OffloadKey(packed[:size]))
            if row is None:
                break
            place = int(self._places[row])
            keys, rows = self._keys[place : place + count], self._rows[place : place + count]
            is_same = self._noted[place : place + count] == self._current().take(rows)
            if keys.tobytes() != packed:
                is_same &= keys == np.frombuffer(packed, keys.dtype, len(keys))
            same = len(rows) if is_same.all() else int(is_same.argmin())
            found.frombytes(rows[:same].tobytes())
            packed, count = packed[same * size :], count - same
            if same < RUN_MIN:
                break

    def _current(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(self._generations, np.uint32)  # the array is not kept: it would keep the memory mapped
