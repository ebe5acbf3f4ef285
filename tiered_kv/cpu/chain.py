"""The chain of a request in an eviction order: which of its blocks comes before which, head of the prefix first.

The manager makes one for each request (`RequestState.chain`), and the policies order the rows by it. All run on the
scheduler's thread. What must stay true: a row has the position that its block has in the request that used it last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import lt
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.row_table import RowTable
from tiered_kv.hints import Hints

_GROUP_BITS = 8
"""Low bits of a position that the engine gives: the last byte of the key, which is of its group's index."""
_SHARED_MAX = 1 << 16
"""How many positions are kept as objects that rows share, counted ones and given ones each: 32 B a row less."""
_uses = itertools.count(1)
_counted_positions: list[int] = []
_given_positions: dict[int, int] = {}


def _counted(first: int, end: int) -> Sequence[int]:
    """Return the positions from `first` to before `end`."""
    if end > _SHARED_MAX:
        return range(first, end)
    if end > len(_counted_positions):
        _counted_positions.extend(range(len(_counted_positions), end))
    return _counted_positions[first:end]


def _shared(positions: Iterable[int]) -> Iterable[int]:
    """Return equal positions, as objects that were returned before."""
    keep = _given_positions.setdefault if len(_given_positions) < _SHARED_MAX else _given_positions.get
    return [keep(position, position) for position in positions]


class RequestChain:
    """A request in an eviction order, with the position of each block that it has used: its place in the prefix.

    Positions rise from the head to the tail. They are counted in the order of the calls, or come from the engine.
    `RowTable.chain` and `RowTable.position` keep them for each row. A request of a long time ago still has its chain
    while a row is in it. So a chain that is finished keeps no collection.

    Attributes:
        hints: The request's hints.
        last_use: When the request last used or allocated blocks, as a number that rises; set by `refresh`.
        guests: With fair shares, the chains that stand for the request among the blocks of other tenants; else None.
        note: The policy's own data of the request.
        position_of: `ReqContext`'s method: returns the token at which a block of the request ends, or None. The
            attribute is None if the engine gives no positions.
        spares_own: Whether none of the request's blocks is evicted to make room for its own later blocks.
        step: The distance between the positions of neighbouring blocks: 1, or larger if the engine gives positions.
    """

    __slots__ = (
        "_extended",
        "_next_position",
        "_ordered",
        "_positions",
        "guests",
        "hints",
        "last_use",
        "note",
        "position_of",
        "spares_own",
        "step",
    )

    def __init__(self) -> None:
        self.hints: Hints | None = None
        self.guests: dict[Any, RequestChain] | None = None  # Any: `PolicyTenant`, whose file imports this one
        self.last_use = 0
        self.note: Any = None  # Any: the policy's own type
        self.position_of: Callable[[OffloadKey], int | None] | None = None
        self.spares_own = False
        self.step = 1
        self._next_position = 0
        self._ordered: tuple[Sequence[int], list[int]] | None = None  # the last list of `in_order`, positions
        self._positions: dict[OffloadKey, int] | None = None
        self._extended: list[tuple[list[OffloadKey], int]] | None = None
        """Lists of keys, each with its first key's position. `take` adds them to `_positions`: few requests need it."""

    def refresh(self) -> None:
        """Note that the request uses blocks now."""
        self.last_use = next(_uses)

    def in_order(self, rows: list[int], table: RowTable) -> list[int]:
        """Return `rows` in the order of the request's prefix, over all KV cache groups, if the engine gives it."""
        if self.position_of is None or len(rows) < 2 or (positions := self._given_positions(rows, table)) is None:
            return rows
        ordered = sorted(positions)
        if ordered != positions:
            rows = [rows[index] for index in sorted(range(len(rows)), key=positions.__getitem__)]
        self._ordered = rows, ordered
        return rows

    def extend(self, rows: Sequence[int], table: RowTable) -> None:
        """Append `rows` to the request's blocks, or set the positions that the engine gives.

        No eviction order may contain the rows now.
        """
        if self.position_of is not None and self._place(rows, table):
            return
        key_of, first = table.key, self._next_position
        keys = [key_of[rows[0]]] if len(rows) == 1 else [key_of[row] for row in rows]
        extended = self._extended
        if extended is None:
            extended = self._extended = []
        if extended and first == extended[-1][1] + len(extended[-1][0]):
            extended[-1][0].extend(keys)
        else:
            extended.append((keys, first))
        self._next_position = first + len(rows)
        if len(rows) == 1 and first < len(_counted_positions):  # a promoted block: its hot path
            table.chain[rows[0]], table.position[rows[0]] = self, _counted_positions[first]
            return
        self._set(rows, _counted(first, self._next_position), table)

    def take(self, rows: Sequence[int], table: RowTable) -> None:
        """Move `rows`, in the order of the prefix, to this chain. No eviction order may contain them now.

        Blocks that return from another request's chain get their former positions.
        """
        if self.position_of is not None and self._place(rows, table):
            return
        if self._extended:
            known = self._positions = self._positions or {}
            for keys, first in self._extended:
                known.update(zip(keys, itertools.count(first)))
            self._extended.clear()
        if self._positions:
            get, key = self._positions.get, table.key
            positions = [get(key[row], -1) for row in rows]
            if positions and positions[0] >= 0 and all(map(lt, positions, positions[1:])):
                self._set(rows, positions, table)
                return
        self.extend(rows, table)

    def finish(self) -> None:
        """Forget the positions: the request has ended and uses no block again."""
        self._positions = self._extended = self._ordered = self.position_of = None
        if self.guests:
            for guest in self.guests.values():
                guest.finish()
            self.guests = None

    def _set(self, rows: Sequence[int], positions: Iterable[int], table: RowTable) -> None:
        chain_of, position_of = table.chain, table.position
        if len(rows) == 1:  # a promoted block: its hot path
            chain_of[rows[0]] = self
            (position_of[rows[0]],) = positions
            return
        for row, position in zip(rows, positions, strict=True):
            chain_of[row] = self
            position_of[row] = position

    def _place(self, rows: Sequence[int], table: RowTable) -> bool:
        """Set the positions that the engine gives; return False if it gives none."""
        before = self._next_position >> _GROUP_BITS
        ordered, self._ordered = self._ordered, None
        is_known = ordered is not None and ordered[0] is rows and len(ordered[1]) == len(rows)
        given = ordered[1] if ordered is not None and is_known else self._given_positions(rows, table)
        if given is None:
            return False
        self._set(rows, _shared(given), table)
        for position in given:
            tokens = (position >> _GROUP_BITS) - before
            if tokens > 0 and (self.step == 1 or tokens << _GROUP_BITS < self.step):
                self.step = tokens << _GROUP_BITS
            before += tokens
        return True

    def _given_positions(self, rows: Sequence[int], table: RowTable) -> list[int] | None:
        """Return the positions that the engine gives; None if it gives none for the first block.

        Hot path: runs for each block that is stored, loaded or promoted.
        """
        position_of, following = self.position_of, self._next_position
        if position_of is None:
            return None
        given: list[int] = []
        keys = [table.key[row] for row in rows] if len(rows) != 1 else [table.key[rows[0]]]
        if len(keys) > 1 and position_of(keys[0]) is not None:
            ends = [end for end in map(position_of, keys) if end is not None]
            if len(ends) == len(keys):  # as always with most engines
                given = [(end << _GROUP_BITS) + key[-1] for end, key in zip(ends, keys, strict=True)]
                self._next_position = max(following, max(given) + 1)
                return given
        for key in keys:
            end_token = position_of(key)
            if end_token is not None:
                # Blocks of several groups that end at one token get the same order among themselves in each request.
                position = (end_token << _GROUP_BITS) + key[-1]
            elif given:
                position = following
            else:
                return None
            if position >= following:
                following = position + 1
            given.append(position)
        self._next_position = following
        return given


class OldChain(RequestChain):
    """The chain of blocks that a warm start or a prefetch loads, and no request has used: older than every request.

    Args:
        age: Of two such chains, the one with the larger age is the older one; from 1.
    """

    __slots__ = ()

    def __init__(self, age: int) -> None:
        super().__init__()
        self.last_use = -age

    def refresh(self) -> None:
        """Stay as old: a load of such a block is no use."""
