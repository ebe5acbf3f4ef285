"""What the history has taken from its queue: what became of blocks, why requests missed them, and the counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import TICKS_PER_S, Entries, Fate, Fates, FateTable, Mask, fate_of, hashes
from tiered_kv.observe.ghosts import Ghosts

CPU: Final = 0
"""The primary tier's number; the secondary tiers follow, in the order they are searched."""
UNFINISHED_BYTES_MAX: Final = 16 << 20
"""What is remembered of requests that have not ended, `8 + number of tiers` bytes a block. Beyond it the request that
asked first is forgotten, and its blocks are counted as not explained."""
REQUESTS_KEPT: Final = 1024
"""Ended requests that can be asked about."""
REQUEST_ID_CHARACTERS_MAX: Final = 256
"""What is kept of an id, which the engine's clients may choose."""
_PARTS_MAX: Final = 16
_PART_BYTES: Final = 256
"""What a part takes beyond its rows."""
_LONG_AGO: Final = -(1 << 40)
_NOT_STORED: Final = frozenset(
    {Fate.ADMISSION, Fate.BUDGET, Fate.NO_SPACE, Fate.BREAKER, Fate.DISABLED, Fate.TIMEOUT, Fate.FAILED}
)

Because = bytes
"""The fate that holds for all keys of a batch, for each tier; 0 where the table says why."""
Troubles = Mapping[OffloadKey, Mapping[int, str]]
"""Why a tier that had a block did not bring it, by key and the tier's number."""
Rows = np.ndarray[Any, np.dtype[np.void]]
"""For each of some keys its hash, and a fate for each tier; where they are loaded, `fates[0]` is the tier's number."""
Parts = tuple[Rows, ...]
Matrix = np.ndarray[Any, np.dtype[np.int64]]
"""Counts by tier and fate."""


@dataclass(slots=True, eq=False)
class RequestLog:
    """What a request asked for; filled by the ledger only, in parts that may repeat a key.

    Attributes:
        began_s: When it asked first, in seconds of the history's clock.
        missed: Keys that it was told not to have.
        promoted: Keys that a secondary tier has; only the fates of the tiers above count.
        loaded: Keys that it loaded.
        first_missed: The first keys of the first parts of `missed`.
        rows, size_bytes: Of all parts.
    """

    req_id: str
    began_s: float
    missed: Parts = ()
    promoted: Parts = ()
    loaded: Parts = ()
    first_missed: tuple[OffloadKey, ...] = ()
    rows: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What an ended request asked for.

    Attributes:
        ended_s: When it ended, in seconds of the history's clock.
        hits: Blocks that it loaded, by the tier that had them.
        misses: Blocks that it did not get, by tier and reason.
        missed_blocks: Blocks that it did not get from any tier.
        first_missed: The first of these.
        first_because: Why no tier had that block, by tier.
    """

    req_id: str
    ended_s: float
    hits: Mapping[str, int]
    misses: Mapping[str, Mapping[str, int]]
    missed_blocks: int
    first_missed: OffloadKey | None
    first_because: Mapping[str, str]


class Ledger:
    """The table of fates, and the outcomes of requests.

    The caller serializes all calls, and gives those that take keys and a time at most `CHUNK_KEYS_MAX` keys.

    Args:
        entries: Of the table, 8 bytes each.
        names: The names of all tiers, the primary one first.
        ttl_s: For each, how long it keeps a block; None where it does not expire.
        blocks: For each, its capacity; None where it has none that is known.
        start_s: When time begins, in seconds of the history's clock.
    """

    def __init__(
        self,
        entries: int,
        names: Sequence[str],
        ttl_s: Sequence[float | None],
        blocks: Sequence[int | None],
        start_s: float,
    ) -> None:
        self.table = FateTable(entries)
        self.ended: deque[EndedRequest] = deque(maxlen=REQUESTS_KEPT)
        """The last requests that have ended, the oldest first."""
        self.forgotten_keys = 0
        """Keys of requests that were forgotten before they ended."""
        self._ghosts = [Ghosts(size) if size else None for size in blocks]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._ttl_ticks = [None if ttl is None else int(ttl * TICKS_PER_S) for ttl in ttl_s]
        self._start_s = start_s
        self._least_tick = 0
        self._reset_ticks = [-1] * len(names)
        self._gave_up_ticks = [_LONG_AGO] * len(names)
        self._hits = np.zeros(len(names), np.int64)
        self._misses: Matrix = np.zeros((len(names), len(Fate)), np.int64)
        self._no_rows: Rows = np.empty(0, [("digest", np.uint64), ("fates", np.uint8, (len(names),))])
        self._unfinished: dict[RequestLog, None] = {}
        self._unfinished_bytes = 0

    # Reading.

    def counted(self) -> list[dict[str, dict[str, int]]]:
        """Return for each tier `blocks_total` by result, `misses_total` by reason and `ghost_hits_total` by size."""
        counted: list[dict[str, dict[str, int]]] = []
        for hits, misses, ghosts in zip(self._hits.tolist(), self._misses, self._ghosts, strict=True):
            results = {"hit": hits, "miss": int(misses.sum())}
            shown = {result: count for result, count in results.items() if count}
            named = {"blocks_total": shown, "misses_total": _by_label(misses)}
            if ghosts is not None:
                named["ghost_hits_total"] = ghosts.counted()
            counted.append({name: counts for name, counts in named.items() if counts})
        return counted

    def fates(self, keys: Sequence[OffloadKey], now_s: float) -> list[list[tuple[Fate, float]]]:
        """Return for each key what became of it in each tier, and how many seconds ago."""
        digests = hashes(keys)
        columns = [self._fates_in(tier, digests, self._tick(now_s)) for tier in self._numbers.values()]
        return [list(row) for row in zip(*columns, strict=True)]

    def _fates_in(self, tier: int, digests: Entries, tick: int) -> list[tuple[Fate, float]]:
        fates, ticks = self.table.read(digests, tier)
        times = ticks.astype(np.int64)
        fates[(fates == Fate.STORED) & (times <= self._reset_ticks[tier])] = Fate.RESET
        ages = np.maximum(tick - times, 0) / TICKS_PER_S
        return [(Fate(fate), age) for fate, age in zip(fates.tolist(), ages.tolist(), strict=True)]

    # What became of blocks.

    def note(self, keys: Sequence[OffloadKey], now_s: float, tier: int, fate: Fate) -> None:
        """Note what became of blocks in a tier."""
        # A store that was not made says nothing of a block that is there. All else is newer than what was noted.
        keeps = self._reset_ticks[tier] if fate in _NOT_STORED else None
        self.table.write(hashes(keys), tier, fate, self._tick(now_s), keeps_stored_after=keeps)

    def give_up(self, _: Sequence[OffloadKey], now_s: float, tier: int) -> None:
        """Note that a tier gave up a lookup."""
        self._gave_up_ticks[tier] = self._tick(now_s)

    def reset(self, keys: Sequence[OffloadKey], now_s: float, tier: int) -> None:
        """Note that a tier has forgotten all of its blocks: `keys`, and those noted as stored there."""
        tick = self._reset_ticks[tier] = self._tick(now_s)
        self.table.write(hashes(keys), tier, Fate.RESET, tick)
        self._least_tick = tick + 1
        ghosts = self._ghosts[tier]
        if ghosts is not None:
            ghosts.reset()

    def store(self, keys: Sequence[OffloadKey], _: float) -> None:
        """Note blocks that the engine has computed and stored."""
        self._use(hashes(keys))

    def _use(self, digests: Entries) -> None:
        for ghosts in self._ghosts:
            if ghosts is not None:
                ghosts.use(digests)

    def _tick(self, now_s: float) -> int:
        """Return the time of an entry. After a reset time goes on with the next tick, so that it separates entries."""
        return max(int((now_s - self._start_s) * TICKS_PER_S), self._least_tick)

    # What requests asked for.

    def miss(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: Because, troubles: Troubles
    ) -> None:
        """Note why nobody has `keys`."""
        asked: bool | Mask = True
        if troubles:  # not all tiers were asked for a key with troubles
            asked = np.fromiter((key not in troubles for key in keys), np.bool_, len(keys))
        log.first_missed = (*log.first_missed, keys[0])[:_PARTS_MAX]
        log.missed = self._kept(log, log.missed, self._why(keys, now_s, log, because, asked))

    def promote(self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: Because) -> None:
        """Note why the tiers above the one that has `keys` do not."""
        log.promoted = self._kept(log, log.promoted, self._why(keys, now_s, log, because, False))

    def load(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, sources: Mapping[OffloadKey, str]
    ) -> None:
        """Note which tiers brought the blocks that a request loads: those of `sources`, the primary one the others."""
        rows = np.zeros(len(keys), self._no_rows.dtype)
        rows["digest"] = digests = hashes(keys)
        self._use(digests)
        if sources:
            rows["fates"][:, 0] = [self._numbers.get(sources.get(key, ""), CPU) for key in keys]
        log.loaded = self._kept(log, log.loaded, rows)

    def end(self, _: Sequence[OffloadKey], now_s: float, log: RequestLog, troubles: Troubles) -> None:
        """Count a request's blocks. A block that it loaded is a hit, whatever it was told before."""
        loaded, missed = self._distinct(log.loaded), self._distinct(log.missed)
        known = self._distinct(log.promoted + log.missed) if log.promoted else missed
        self._forget(log)
        troubled = list(troubles)
        for rows in (known, missed):  # perhaps the same
            for key, row in zip(troubled, _places(rows, troubled), strict=True):
                if row is not None:
                    _trouble(rows["fates"][row], troubles[key])
        misses = np.zeros_like(self._misses)
        hits = np.bincount(loaded["fates"][:, 0], minlength=len(self._numbers))
        for tier in np.flatnonzero(hits[1:]) + 1:
            above = loaded["digest"][loaded["fates"][:, 0] == tier]
            _count(misses, known["fates"][np.isin(known["digest"], above), :tier])
        if len(loaded):
            missed = missed[~np.isin(missed["digest"], loaded["digest"])]
        _count(misses, missed["fates"])
        self._hits += hits
        self._misses += misses
        if not len(missed) and not len(loaded):
            return
        places = _places(missed, log.first_missed)
        found = ((key, row) for key, row in zip(log.first_missed, places, strict=True) if row is not None)
        first, row = next(found, (None, None))
        because = [] if row is None else missed["fates"][row].tolist()
        reasons = {name: _by_label(of_tier) for name, of_tier in zip(self._numbers, misses, strict=True)}
        self.ended.append(
            EndedRequest(
                log.req_id[:REQUEST_ID_CHARACTERS_MAX],
                now_s,
                {name: count for name, count in zip(self._numbers, hits.tolist(), strict=True) if count},
                {name: labelled for name, labelled in reasons.items() if labelled},
                len(missed),
                first,
                {name: Fate(fate).label for name, fate in zip(self._numbers, because, strict=False) if fate},
            )
        )

    def _kept(self, log: RequestLog, parts: Parts, rows: Rows) -> Parts:
        """Return the parts with `rows` as a further one; forget the oldest requests where all take too much."""
        self._unfinished[log] = None
        kept = (*parts, rows) if len(parts) < _PARTS_MAX else (self._distinct((*parts, rows)),)
        log.rows += sum(map(len, kept)) - sum(map(len, parts))
        added_bytes = sum(part.nbytes + _PART_BYTES for part in kept) - sum(part.nbytes + _PART_BYTES for part in parts)
        log.size_bytes += added_bytes
        self._unfinished_bytes += added_bytes
        while self._unfinished_bytes > UNFINISHED_BYTES_MAX:
            oldest = next(iter(self._unfinished))
            self.forgotten_keys += oldest.rows
            self._forget(oldest)
        return kept if log.rows else ()

    def _forget(self, log: RequestLog) -> None:
        self._unfinished.pop(log, None)
        self._unfinished_bytes -= log.size_bytes
        log.missed = log.promoted = log.loaded = ()
        log.rows = log.size_bytes = 0

    def _distinct(self, parts: Sequence[Rows]) -> Rows:
        """Return the first row of each key, in the order of their hashes."""
        rows = np.concatenate([self._no_rows, *parts])
        return rows[np.unique(rows["digest"], return_index=True)[1]]

    def _why(
        self, keys: Sequence[OffloadKey], now_s: float, log: RequestLog, because: Because, asked: bool | Mask
    ) -> Rows:
        """Return why each tier does not have some keys, for which the tiers were `asked` or not.

        A tier that had stored a key, was asked, and answers that it does not have it, has lost it: that is noted too.
        """
        tick, began_tick = self._tick(now_s), int((log.began_s - self._start_s) * TICKS_PER_S)
        rows = np.empty(len(keys), self._no_rows.dtype)
        rows["digest"] = digests = hashes(keys)
        for tier in self._numbers.values():
            rows["fates"][:, tier] = (because and because[tier]) or self._why_not_in(
                tier, digests, tick, began_tick, asked
            )
        return rows

    def _why_not_in(self, tier: int, digests: Entries, tick: int, began_tick: int, asked: bool | Mask) -> Fates:
        fates, ticks = self.table.read(digests, tier)
        if self._gave_up_ticks[tier] >= began_tick:
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


def _count(misses: Matrix, fates: Fates) -> None:
    """Count the fates of some keys, a row for each key, in the tiers that they are of."""
    for tier, of_tier in enumerate(fates.T):
        misses[tier] += np.bincount(of_tier, minlength=len(Fate))
    misses[:, Fate.UNKNOWN] = 0  # of tiers below one that refused a block: they were not asked


def _by_label(misses: Matrix) -> dict[str, int]:
    return {Fate(fate).label: count for fate, count in enumerate(misses.tolist()) if count}


def _places(rows: Rows, keys: Sequence[OffloadKey]) -> list[int | None]:
    """Return the row of each key among `_distinct` ones; None where it has none."""
    digests, sought = rows["digest"], hashes(keys)
    places = np.searchsorted(digests, sought)
    found = np.append(digests, np.uint64(0))[places] == sought
    return [place if is_there else None for place, is_there in zip(places.tolist(), found.tolist(), strict=True)]


def _trouble(fates: Fates, trouble: Mapping[int, str]) -> None:
    """Put into a key's fates those of tiers that had it; a tier below one that refused it was not asked."""
    for tier, reason in sorted(trouble.items()):
        fates[tier] = Fate.REFUSED if reason == "refused" else fate_of(reason)
        if reason == "refused":
            fates[tier + 1 :] = Fate.UNKNOWN
            return
