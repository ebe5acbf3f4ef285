"""What the history has taken from its queue: what became of blocks, why requests missed them, and the counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import Fate, fate_of
from tiered_kv.observe.table import CHUNK_KEYS_MAX, TICKS_PER_S, Entries, Fates, FateTable, Mask, hashes

CPU: Final = 0
"""The primary tier's number; the secondary tiers follow, in the order they are searched."""
REQUEST_KEYS_MAX: Final = 1 << 16
"""Missed keys of one request, and promoted and loaded ones; further ones are counted as not noted."""
REQUESTS_KEPT: Final = 1024
REQUEST_ID_CHARACTERS_MAX: Final = 256
"""What is kept of an id, which the engine's clients may choose."""
"""Ended requests that can be asked about."""
_LONG_AGO: Final = -(1 << 40)
_NOT_STORED: Final = frozenset(
    {Fate.ADMISSION, Fate.BUDGET, Fate.NO_SPACE, Fate.BREAKER, Fate.DISABLED, Fate.TIMEOUT, Fate.FAILED}
)

Because = bytes
"""The fate that holds for all keys of a batch, for each tier; 0 where the table says why."""
Troubles = Mapping[OffloadKey, Mapping[int, str]]
"""Why a tier that had a block did not bring it, by key and the tier's number."""


@dataclass(slots=True, eq=False)
class RequestLog:
    """What a request asked for; filled by the ledger only.

    Attributes:
        req_id: The request.
        began_s: When it asked first, in seconds of the history's clock.
        missed: A fate for each tier, as bytes, by the keys that it was told not to have.
        promoted: The same of keys that a secondary tier has; only the fates of the tiers above count.
        loaded: The number of the tier that brought each block that it loaded.
    """

    req_id: str
    began_s: float
    missed: dict[OffloadKey, bytes] = field(default_factory=dict)
    promoted: dict[OffloadKey, bytes] = field(default_factory=dict)
    loaded: dict[OffloadKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What an ended request asked for.

    Attributes:
        req_id: The request.
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

    The methods that return an iterator work in pieces of at most `CHUNK_KEYS_MAX` keys, and yield how many each had.
    The caller serializes the pieces and all other calls.

    Args:
        entries: Of the table, 8 bytes each.
        names: The names of all tiers, the primary one first.
        ttl_s: For each, how long it keeps a block; None where it does not expire.
        start_s: When time begins, in seconds of the history's clock.
    """

    def __init__(self, entries: int, names: Sequence[str], ttl_s: Sequence[float | None], start_s: float) -> None:
        self.names = tuple(names)
        self.table = FateTable(entries)
        self.ended: deque[EndedRequest] = deque(maxlen=REQUESTS_KEPT)
        """The last requests that have ended, the oldest first."""
        self.overlong_keys = 0
        """Keys of requests that had more than `REQUEST_KEYS_MAX`."""
        self._ttl_ticks = [None if ttl is None else int(ttl * TICKS_PER_S) for ttl in ttl_s]
        self._start_s = start_s
        self._least_tick = 0
        self._reset_ticks = [-1] * len(names)
        self._gave_up_ticks = [_LONG_AGO] * len(names)
        self._hits = [0] * len(names)
        self._misses = [Counter[int]() for _ in names]

    # Reading.

    def counted(self) -> list[dict[str, dict[str, int]]]:
        """Return `blocks_total` by result and `misses_total` by reason, for each tier, as far as there are any."""
        counted: list[dict[str, dict[str, int]]] = []
        for hits, misses in zip(self._hits, self._misses, strict=True):
            results = {"hit": hits, "miss": sum(misses.values())}
            shown = {result: count for result, count in results.items() if count}
            reasons = {Fate(fate).label: count for fate, count in sorted(misses.items())}
            named = {"blocks_total": shown, "misses_total": reasons}
            counted.append({name: counts for name, counts in named.items() if counts})
        return counted

    def fates(self, keys: Sequence[OffloadKey], now_s: float) -> list[list[tuple[Fate, float]]]:
        """Return for each key what became of it in each tier, and how many seconds ago."""
        found: list[list[tuple[Fate, float]]] = []
        for chunk in chunks(keys):
            columns = [self._fates_in(tier, hashes(chunk), now_s) for tier in range(len(self.names))]
            found += [list(row) for row in zip(*columns, strict=True)]
        return found

    def _fates_in(self, tier: int, digests: Entries, now_s: float) -> list[tuple[Fate, float]]:
        fates, ticks = self.table.read(digests, tier)
        times = ticks.astype(np.int64)
        fates[(fates == Fate.STORED) & (times <= self._reset_ticks[tier])] = Fate.RESET
        ages = np.maximum(self._tick(now_s) - times, 0) / TICKS_PER_S
        return [(Fate(fate), age) for fate, age in zip(fates.tolist(), ages.tolist(), strict=True)]

    # What became of blocks.

    def note(self, tier: int, fate: Fate, keys: Sequence[OffloadKey], now_s: float) -> Iterator[int]:
        """Note what became of blocks in a tier."""
        # A store that was not made says nothing of a block that is there. All else is newer than what was noted.
        keeps = self._reset_ticks[tier] if fate in _NOT_STORED else None
        for chunk in chunks(keys):
            self.table.note(chunk, tier, fate, self._tick(now_s), keeps_stored_after=keeps)
            yield len(chunk)

    def give_up(self, tier: int, now_s: float) -> Iterator[int]:
        """Note that a tier gave up a lookup."""
        self._gave_up_ticks[tier] = self._tick(now_s)
        return iter(())

    def reset(self, tier: int, keys: Sequence[OffloadKey], now_s: float) -> Iterator[int]:
        """Note that a tier has forgotten all of its blocks: `keys`, and those noted as stored there."""
        self._reset_ticks[tier] = self._tick(now_s)
        for chunk in chunks(keys):
            self.table.note(chunk, tier, Fate.RESET, self._reset_ticks[tier])
            yield len(chunk)
        self._least_tick = self._reset_ticks[tier] + 1

    def _tick(self, now_s: float) -> int:
        """Return the time of an entry. After a reset time goes on with the next tick, so that it separates entries."""
        return max(int((now_s - self._start_s) * TICKS_PER_S), self._least_tick)

    # What requests asked for.

    def miss(
        self, log: RequestLog, because: Because, keys: Sequence[OffloadKey], troubles: Troubles | None, now_s: float
    ) -> Iterator[int]:
        """Note why nobody has `keys`; where `troubles` is None, why the tiers above the one that has them do not."""
        noted = log.promoted if troubles is None else log.missed
        for chunk in chunks(keys):
            new = [key for key in chunk if key not in noted] if noted else chunk
            if len(noted) + len(new) > REQUEST_KEYS_MAX:
                self.overlong_keys += len(new)
            elif new:
                noted |= self._why(log, new, because, troubles, now_s)
            yield len(chunk)

    def load(
        self, log: RequestLog, keys: Sequence[OffloadKey], sources: Mapping[OffloadKey, str], now_s: float
    ) -> Iterator[int]:
        """Note which tiers brought the blocks that a request loads: those of `sources`, the primary one the others."""
        for chunk in chunks(keys):
            new = [key for key in chunk if key not in log.loaded] if log.loaded else chunk
            if len(log.loaded) + len(new) > REQUEST_KEYS_MAX:
                self.overlong_keys += len(new)
            else:
                log.loaded |= dict.fromkeys(new, CPU)
                for key in new if sources else ():
                    if key in sources:
                        log.loaded[key] = self.names.index(sources[key])
            yield len(chunk)

    def end(self, log: RequestLog, troubles: Troubles, now_s: float) -> Iterator[int]:
        """Count a request's blocks. A block that it loaded is a hit, whatever it was told before."""
        patterns = Counter[bytes]()
        """How often the fates of all tiers above the hit, or of all tiers that were asked, were the same."""
        hits = Counter(log.loaded.values())
        loaded = iter(log.loaded.items() if hits.keys() - {CPU} else ())
        while brought := list(islice(loaded, CHUNK_KEYS_MAX)):
            why = ((log.promoted.get(key) or log.missed.get(key, b""), tier) for key, tier in brought if tier)
            patterns.update(fates[:tier] for fates, tier in why)
            yield len(brought)
        first: tuple[OffloadKey, bytes] | None = None
        missed_blocks = 0
        missed = iter(log.missed.items())
        while pairs := list(islice(missed, CHUNK_KEYS_MAX)):
            final = [pair for pair in pairs if pair[0] not in log.loaded]
            if troubles:
                final = [(key, _troubled(why, troubles.get(key))) for key, why in final]
            if final and first is None:
                first = final[0]
            missed_blocks += len(final)
            patterns.update([why for _, why in final])
            yield len(pairs)
        if missed_blocks or hits:
            misses = self._count(patterns, hits)
            brought_by = {self.names[tier]: count for tier, count in hits.items()}
            key, fates = (None, b"") if first is None else first
            because = {name: Fate(fate).label for name, fate in zip(self.names, fates, strict=False)}
            self.ended.append(
                EndedRequest(
                    log.req_id[:REQUEST_ID_CHARACTERS_MAX], now_s, brought_by, misses, missed_blocks, key, because
                )
            )

    def _count(self, patterns: Counter[bytes], hits: Counter[int]) -> dict[str, dict[str, int]]:
        """Count the outcomes of a request; return its misses by tier and reason."""
        misses = [Counter[int]() for _ in self.names]
        for pattern, count in patterns.items():
            for tier, fate in enumerate(pattern):
                misses[tier][fate] += count
        for tier, of_tier in enumerate(misses):
            self._misses[tier].update(of_tier)
            self._hits[tier] += hits[tier]
        return {
            name: {Fate(fate).label: count for fate, count in of_tier.items()}
            for name, of_tier in zip(self.names, misses, strict=True)
            if of_tier
        }

    def _why(
        self, log: RequestLog, keys: Sequence[OffloadKey], because: Because, troubles: Troubles | None, now_s: float
    ) -> dict[OffloadKey, bytes]:
        """Return for each key why each tier does not have it, as bytes.

        A tier that had stored a key, and answers that it does not have it, has lost it: that is noted too. Not all
        tiers were asked where `troubles` is None, nor for a key with troubles.
        """
        tick, began_tick = self._tick(now_s), int((log.began_s - self._start_s) * TICKS_PER_S)
        digests = hashes(keys)
        asked: bool | Mask = troubles is not None
        if troubles:
            asked = np.fromiter((key not in troubles for key in keys), np.bool_, len(keys))
        why: list[int | Fates] = [
            (because and because[tier]) or self._why_not_in(tier, digests, tick, began_tick, asked)
            for tier in range(len(self.names))
        ]
        uniform = [fate for fate in why if isinstance(fate, int)]
        if len(uniform) == len(why):  # the usual case, and much cheaper
            return dict.fromkeys(keys, bytes(uniform))
        columns = np.empty((len(keys), len(why)), np.uint8)
        for tier, fates in enumerate(why):
            columns[:, tier] = fates
        each = columns.view(f"S{len(why)}").ravel().tolist()  # no byte is 0, and numpy strips only these
        return dict(zip(keys, each, strict=True))

    def _why_not_in(self, tier: int, digests: Entries, tick: int, began_tick: int, asked: bool | Mask) -> int | Fates:
        """Return why a tier does not have each of some keys; one fate where it is the same for all."""
        fates, ticks = self.table.read(digests, tier)
        has_given_up = self._gave_up_ticks[tier] >= began_tick
        if not fates.any():
            return int(Fate.TIMEOUT if has_given_up else Fate.ABSENT)
        if has_given_up:
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


def chunks(keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
    """Yield `keys` in pieces of at most `CHUNK_KEYS_MAX`."""
    if len(keys) <= CHUNK_KEYS_MAX:
        if keys:
            yield keys
        return
    for first in range(0, len(keys), CHUNK_KEYS_MAX):
        yield keys[first : first + CHUNK_KEYS_MAX]


def _troubled(why: bytes, trouble: Mapping[int, str] | None) -> bytes:
    """Return the fates of a key with those of tiers that had it; a tier below one that refused it was not asked."""
    if not trouble:
        return why
    fates = bytearray(why)
    for tier, reason in sorted(trouble.items()):
        fates[tier] = Fate.REFUSED if reason == "refused" else fate_of(reason)
        if reason == "refused":
            return bytes(fates[: tier + 1])
    return bytes(fates)
