"""The ledger of the history: the fates of blocks, the reasons of misses, and the counts.

`recorder.BlockHistory` makes it, and calls it under its lock, on the history's thread or on a reader's. What must stay
true: memory is bounded, and a missed block counts under at most one reason in each tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiered_kv.base import OffloadKey, group_of
from tiered_kv.metrics.history.fates import TICKS_PER_S, Fates, FateTable, Hashes, Mask, hashes, of_largest_group
from tiered_kv.metrics.history.ghosts import Ghosts
from tiered_kv.metrics.history.names import KeyNames
from tiered_kv.reasons import Fate, Reason

CPU: Final = 0
"""The primary tier's number; the secondary tiers follow, in the order of the search."""
UNFINISHED_BYTES_MAX: Final = 16 << 20
"""Memory for requests that have not ended, `12 + number of tiers` bytes a block. Beyond it the request that asked first
is forgotten, and its blocks are counted as not explained."""
REQUESTS_KEPT: Final = 1024
"""Ended requests that can be asked about."""
REQUEST_ID_CHARACTERS_MAX: Final = 256
"""A longer id is cut: the engine's clients may choose it."""
_PARTS_MAX: Final = 16
"""Limit of the parts in one list of a request. A list with more parts is joined."""
_PART_BYTES: Final = 256
"""Memory of a part besides its rows."""
_LONG_AGO: Final = -(1 << 40)
_NOT_STORED: Final = frozenset(
    {Fate.ADMISSION, Fate.BUDGET, Fate.NO_SPACE, Fate.BREAKER, Fate.DISABLED, Fate.TIMEOUT, Fate.FAILED}
)

BatchFates = bytes
"""One byte for each tier: the fate of all keys of a batch, or 0 if each key has its own fate."""
Failures = Mapping[OffloadKey, Mapping[int, Reason]]
"""Why a tier that had a block did not deliver it, by key and the tier's number."""
Rows = NDArray[np.void]
"""For each key its hash, its group, and a fate for each tier. For loaded keys, `fates[0]` is the number of the tier."""
Matrix = NDArray[np.int64]
"""Counts by tier and fate."""


@dataclass(slots=True, eq=False)
class RequestLog:
    """A request that asks for blocks; `began_s` is when it asked first, in seconds of the history's clock.

    All fields but the first two belong to the manager's thread.
    """

    req_id: str
    began_s: float
    because: BatchFates = b""
    """Why tiers are not asked for it, one byte for each tier; b"" if all are asked."""
    found: list[OffloadKey] = field(default_factory=list)
    """Keys whose promotions the request began to wait for since the last `BlockHistory.append_gathered`."""
    failures: dict[OffloadKey, dict[int, Reason]] = field(default_factory=dict)
    """Why a tier that had a block did not deliver it, by key and the tier's number."""
    misses_hash: int | None = None
    """The hash of the misses that were noted last; None before the first misses, and 0 for the first."""
    waited_s: float = 0.0
    """Seconds that it waited, in all; set before its end is noted, and not changed after it."""

    def failed(self, key: OffloadKey, tier: int, reason: Reason) -> None:
        """Note why a tier that had a block did not deliver it."""
        self.failures.setdefault(key, {})[tier] = reason


@dataclass(slots=True)
class _Asked:
    """The blocks of a request that has not ended, in parts that may repeat a key."""

    missed: list[Rows] = field(default_factory=list)  # no tier has them
    promoted: list[Rows] = field(default_factory=list)  # a tier has them: only the fates of the tiers above count
    loaded: list[Rows] = field(default_factory=list)
    first_missed: list[OffloadKey] = field(default_factory=list)  # the first keys of the first parts of `missed`
    size_bytes: int = 0  # the sum over all parts


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The outcome of a request."""

    req_id: str
    ended_s: float
    """When the request ended, by the history's clock."""
    hits: Mapping[str, int]  # loaded blocks, by the tier that had them
    misses: Mapping[str, Mapping[str, int]]  # blocks that did not come, by tier and reason
    missed_blocks: int  # blocks that no tier brought
    missed_groups: Mapping[int, int]  # the same, by KV cache group
    first_missed: OffloadKey | None
    first_because: Mapping[str, str]  # why each tier did not have that block
    token_hits: Mapping[str, int]
    """As `hits`, in the KV cache group with the most loaded blocks only: an engine loads a token in each group."""
    waited_s: float  # seconds that it waited, in all, for tiers to answer and for blocks to come


class Ledger:
    """The table of fates, and the outcomes of requests.

    `BlockHistory` describes the arguments, and the methods that take keys and a time. A call gets at most
    `CHUNK_KEYS_MAX` keys. The caller serializes all calls. Times are seconds of the history's clock, and `start_s` is
    tick 0.
    """

    def __init__(
        self,
        entries: int,
        names: Sequence[str],
        ttl_s: Sequence[float | None],
        blocks: Sequence[int | None],
        start_s: float,
        on_ended: Callable[[EndedRequest], None] | None = None,
        keys: KeyNames | None = None,
    ) -> None:
        self.keys = keys
        self._on_ended = on_ended
        self.table = FateTable(entries)
        self.ended: deque[EndedRequest] = deque(maxlen=REQUESTS_KEPT)
        """The last ended requests, the oldest first."""
        self.forgotten_keys = 0
        """Keys of requests that were forgotten before they ended."""
        self._ghosts = [Ghosts(size) if size else None for size in blocks]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._ttl_ticks = [None if ttl is None else int(ttl * TICKS_PER_S) for ttl in ttl_s]
        self._start_s = start_s
        self._least_tick = 0  # no entry gets an earlier one
        self._reset_ticks = [-1] * len(names)
        """The tick of each tier's last reset."""
        self._timeout_ticks = [_LONG_AGO] * len(names)
        """The tick of the last lookup that timed out in each tier."""
        self._hits = np.zeros(len(names), np.int64)
        self._misses: Matrix = np.zeros((len(names), len(Fate)), np.int64)
        self._no_rows: Rows = np.empty(
            0, [("digest", np.uint64), ("group", np.uint32), ("fates", np.uint8, (len(names),))]
        )
        self._unfinished: dict[RequestLog, _Asked] = {}
        """Requests that have not ended, in the order of their first batches."""
        self._unfinished_bytes = 0

    # Reading.

    def snapshot(self) -> list[dict[str, dict[str, int]]]:
        tiers: list[dict[str, dict[str, int]]] = []
        for hits, misses, ghosts in zip(self._hits.tolist(), self._misses, self._ghosts, strict=True):
            results = {"hit": hits, "miss": int(misses.sum())}
            counts: dict[str, dict[str, int]] = {
                "blocks_total": {result: count for result, count in results.items() if count},
                "misses_total": _by_label(misses),
            }
            if ghosts is not None:
                counts["ghost_hits_total"] = ghosts.snapshot()
            tiers.append(counts)
        return tiers

    def fates(self, keys: Sequence[OffloadKey], now_s: float) -> list[list[tuple[Fate, float]]]:
        digests = hashes(keys)
        columns = [self._fates_in(tier, digests, self._tick(now_s)) for tier in self._numbers.values()]
        return [list(row) for row in zip(*columns, strict=True)]

    def _fates_in(self, tier: int, digests: Hashes, tick: int) -> list[tuple[Fate, float]]:
        fates, ticks = self.table.read(digests, tier)
        times = ticks.astype(np.int64)
        fates[(fates == Fate.STORED) & (times <= self._reset_ticks[tier])] = Fate.RESET
        ages = np.maximum(tick - times, 0) / TICKS_PER_S
        return [(Fate(fate), age) for fate, age in zip(fates.tolist(), ages.tolist(), strict=True)]

    # The fates of blocks.

    def note(self, keys: Sequence[OffloadKey], now_s: float, tier: int, fate: Fate) -> None:
        if self.keys is not None and fate is Fate.STORED:
            self.keys.note(keys)
        # A skipped store says nothing about a block that is stored already. All else is newer than the table's entry.
        keeps = self._reset_ticks[tier] if fate in _NOT_STORED else None
        self.table.write(hashes(keys), tier, fate, self._tick(now_s), keeps_stored_after=keeps)

    def lookup_timeout(self, _: Sequence[OffloadKey], now_s: float, tier: int) -> None:
        self._timeout_ticks[tier] = self._tick(now_s)

    def reset(self, keys: Sequence[OffloadKey], now_s: float, tier: int) -> None:
        tick = self._reset_ticks[tier] = self._tick(now_s)
        self.table.write(hashes(keys), tier, Fate.RESET, tick)
        self._least_tick = tick + 1
        ghosts = self._ghosts[tier]
        if ghosts is not None:
            ghosts.reset()

    def store(self, keys: Sequence[OffloadKey], _: float) -> None:
        if self.keys is not None:
            self.keys.note(keys)
        self._use(hashes(keys))

    def _use(self, digests: Hashes) -> None:
        for ghosts in self._ghosts:
            if ghosts is not None:
                ghosts.use(digests)

    def _tick(self, now_s: float) -> int:
        """Return the tick of an entry. The first entry after a reset has a later tick than all entries before it."""
        return max(int((now_s - self._start_s) * TICKS_PER_S), self._least_tick)

    # The questions of requests.

    def miss(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: BatchFates, failures: Failures
    ) -> None:
        asked: bool | Mask = True
        if failures:  # a key with failures was not asked for in all tiers
            asked = np.fromiter((key not in failures for key in keys), np.bool_, len(keys))
        request = self._asked(log)
        if len(request.first_missed) < _PARTS_MAX:
            request.first_missed.append(keys[0])
        self._keep(request, request.missed, self._why(keys, now_s, log, because, asked))

    def promote(self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: BatchFates) -> None:
        request = self._asked(log)
        self._keep(request, request.promoted, self._why(keys, now_s, log, because, False))

    def load(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, sources: Mapping[OffloadKey, str]
    ) -> None:
        if self.keys is not None:
            self.keys.note(keys)
        rows = np.zeros(len(keys), self._no_rows.dtype)
        rows["digest"] = digests = hashes(keys)
        rows["group"] = np.frombuffer(b"".join(map(group_of, keys)), ">u4")
        self._use(digests)
        if sources:
            rows["fates"][:, 0] = [self._numbers.get(sources.get(key, ""), CPU) for key in keys]
        request = self._asked(log)
        self._keep(request, request.loaded, rows)

    def end(self, _: Sequence[OffloadKey], now_s: float, log: RequestLog, failures: Failures) -> None:
        """Count a request's blocks. A loaded block is a hit, even if it was missed before."""
        request = self._asked(log)
        self._forget(log)
        loaded, missed = self._distinct(request.loaded), self._distinct(request.missed)
        if not len(missed) and not len(loaded):
            return
        misses = np.zeros_like(self._misses)
        hits = np.bincount(loaded["fates"][:, 0], minlength=len(self._numbers))
        self._hits += hits
        if not request.promoted and not len(missed):  # most requests that load
            self._keep_outcome(log, now_s, request, loaded, misses, missed)
            return
        known = self._distinct(request.promoted + request.missed) if request.promoted else missed
        failed = list(failures)
        for rows in (known, missed):  # they may be one array
            for key, row in zip(failed, _places(rows, failed), strict=True):
                if row is not None:
                    _add_failures(rows["fates"][row], failures[key])
        for tier in np.flatnonzero(hits[1:]) + 1:
            above = loaded["digest"][loaded["fates"][:, 0] == tier]
            _count(misses, known["fates"][np.isin(known["digest"], above), :tier])
        missed = missed[~np.isin(missed["digest"], loaded["digest"])]
        _count(misses, missed["fates"])
        self._misses += misses
        self._keep_outcome(log, now_s, request, loaded, misses, missed)

    def _keep_outcome(
        self, log: RequestLog, now_s: float, request: _Asked, loaded: Rows, misses: Matrix, missed: Rows
    ) -> None:
        first, row, groups = None, None, {}
        if len(missed):
            found = zip(request.first_missed, _places(missed, request.first_missed), strict=True)
            first, row = next((each for each in found if each[1] is not None), (None, None))
            numbers, counts = np.unique(missed["group"], return_counts=True)
            groups = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        because = [] if row is None else missed["fates"][row].tolist()
        reasons = {name: _by_label(of_tier) for name, of_tier in zip(self._numbers, misses, strict=True)}
        ended = EndedRequest(
            log.req_id[:REQUEST_ID_CHARACTERS_MAX],
            now_s,
            self._by_tier(loaded),
            {name: labelled for name, labelled in reasons.items() if labelled},
            len(missed),
            groups,
            first,
            {name: Fate(fate).label for name, fate in zip(self._numbers, because, strict=False) if fate},
            self._by_tier(of_largest_group(loaded)),
            log.waited_s,
        )
        self.ended.append(ended)
        if self._on_ended is not None:
            self._on_ended(ended)

    def _by_tier(self, loaded: Rows) -> dict[str, int]:
        hits: list[int] = np.bincount(loaded["fates"][:, 0], minlength=len(self._numbers)).tolist()
        return {name: count for name, count in zip(self._numbers, hits, strict=True) if count}

    def _asked(self, log: RequestLog) -> _Asked:
        request = self._unfinished.get(log)
        if request is None:
            request = self._unfinished[log] = _Asked()
        return request

    def _keep(self, request: _Asked, parts: list[Rows], rows: Rows) -> None:
        """Add `rows` to one of the request's lists; forget the oldest requests while all together take too much."""
        before_bytes = _size_bytes(parts)
        parts.append(rows)
        if len(parts) > _PARTS_MAX:
            parts[:] = [self._distinct(parts)]
        added_bytes = _size_bytes(parts) - before_bytes
        request.size_bytes += added_bytes
        self._unfinished_bytes += added_bytes
        while self._unfinished_bytes > UNFINISHED_BYTES_MAX:
            oldest = self._forget(next(iter(self._unfinished)))
            self.forgotten_keys += sum(map(len, oldest.missed + oldest.promoted + oldest.loaded))

    def _forget(self, log: RequestLog) -> _Asked:
        request = self._unfinished.pop(log)
        self._unfinished_bytes -= request.size_bytes
        return request

    def _distinct(self, parts: Sequence[Rows]) -> Rows:
        """Return the first row of each key, in the order of the keys' hashes."""
        if not parts:
            return self._no_rows
        rows = np.concatenate(parts)
        return rows[np.unique(rows["digest"], return_index=True)[1]]

    def _why(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: BatchFates, asked: bool | Mask
    ) -> Rows:
        """Return rows that say why each tier does not have the keys.

        A tier has lost a key that it had stored, if it was `asked` and does not have it: the table gets this fate too.
        """
        tick, began_tick = self._tick(now_s), int((log.began_s - self._start_s) * TICKS_PER_S)
        rows = np.empty(len(keys), self._no_rows.dtype)
        rows["digest"] = digests = hashes(keys)
        rows["group"] = np.frombuffer(b"".join(map(group_of, keys)), ">u4")
        for tier in self._numbers.values():
            rows["fates"][:, tier] = (because and because[tier]) or self._why_not_in(
                tier, digests, tick, began_tick, asked
            )
        return rows

    def _why_not_in(self, tier: int, digests: Hashes, tick: int, began_tick: int, asked: bool | Mask) -> Fates:
        fates, ticks = self.table.read(digests, tier)
        if self._timeout_ticks[tier] >= began_tick:
            fates[fates <= Fate.STORED] = Fate.TIMEOUT
            return fates
        gone = fates == Fate.STORED
        if gone.any():
            times = ticks.astype(np.int64)
            fates[gone] = Fate.EVICTED
            ttl = self._ttl_ticks[tier]
            if ttl is not None:
                fates[gone & (times + ttl <= tick + 1)] = Fate.EXPIRED
            fates[gone & (times <= self._reset_ticks[tier])] = Fate.RESET
            for fate in (Fate.EVICTED, Fate.EXPIRED):
                lost = gone & asked & (fates == fate)
                if lost.any():
                    self.table.write(digests[lost], tier, fate, tick)
        fates[fates == Fate.UNKNOWN] = Fate.ABSENT
        return fates


def _size_bytes(parts: Sequence[Rows]) -> int:
    return sum(part.nbytes + _PART_BYTES for part in parts)


def _count(misses: Matrix, fates: Fates) -> None:
    """Add fates, a row for each key and a column for each of the first tiers, to the counts."""
    for tier, of_tier in enumerate(fates.T):
        misses[tier] += np.bincount(of_tier, minlength=len(Fate))
    misses[:, Fate.UNKNOWN] = 0  # tiers below one that refused a block were not asked


def _by_label(misses: Matrix) -> dict[str, int]:
    return {Fate(fate).label: count for fate, count in enumerate(misses.tolist()) if count}


def _places(rows: Rows, keys: Sequence[OffloadKey]) -> list[int | None]:
    """Return the index of each key's row among distinct ones; None for a key without one."""
    digests, wanted = rows["digest"], hashes(keys)
    places = np.searchsorted(digests, wanted)
    found = np.append(digests, np.uint64(0))[places] == wanted
    return [place if is_found else None for place, is_found in zip(places.tolist(), found.tolist(), strict=True)]


def _add_failures(fates: Fates, failures: Mapping[int, Reason]) -> None:
    """Set the fates of a key in tiers that had it. Tiers below one that refused it were not asked."""
    for tier, reason in sorted(failures.items()):
        fates[tier] = reason.fate
        if reason is Reason.REFUSED:
            fates[tier + 1 :] = Fate.UNKNOWN
            return
