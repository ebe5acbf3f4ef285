"""A bounded, lossy memory of what became of blocks, and of why requests missed them.

The scheduler's thread appends batches to a queue. A thread of the history, or whoever reads, takes them from it:

    manager:  note(tier, fate, keys) · missed(log, because, keys) · loaded(log, keys, sources) · ended(log, reasons)
    history:  STORED, EVICTED, ... into the table · why each key was missed, by the table as it then is · counts

The order matters: a block that a request misses is computed and stored again, and that must not hide why it was missed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import Fate, fate_of
from tiered_kv.observe.table import CHUNK_KEYS_MAX, TICKS_PER_S, Entries, Fates, FateTable, Mask, hashes
from tiered_kv.tiering.step import give_way

CPU: Final = 0
"""The primary tier's number; the secondary tiers follow, in the order they are searched."""
PENDING_KEYS_MAX: Final = 1 << 17
"""Keys that wait to be taken from the queue; further ones are not noted, and counted."""
PENDING_BATCHES_MAX: Final = 1 << 14
"""Batches that wait; further ones likewise."""
REQUEST_KEYS_MAX: Final = 1 << 16
"""Missed keys of one request, and loaded ones; further ones are counted as not noted."""
REQUESTS_KEPT: Final = 1024
"""Ended requests that can be asked about."""
INTERVAL_S: Final = 0.25
"""How often the thread looks whether there is anything to take."""
THREAD_SHARE: Final = 0.02
"""The most of a processor that the thread takes, since it takes turns with the scheduler's."""
_BATCHES_A_CHUNK: Final = 64
_LONG_AGO: Final = -(1 << 40)

Because = bytes
"""The fate that holds for all keys of a batch, for each tier; 0 where the table says why."""
Troubles = Mapping[OffloadKey, Mapping[int, str]]
"""Why a tier that had a block did not bring it, by key and the tier's number."""
_NO_TROUBLES: Final[Troubles] = {}


@dataclass(slots=True, eq=False)
class RequestLog:
    """What a request asked for; filled by the history only.

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


class _Batch(NamedTuple):
    work: Callable[[Any, float], Iterator[int]]
    """Does the work in pieces, and yields how many keys each had."""
    keys: int
    now_s: float
    arguments: Any  # as `work` takes them


class BlockHistory:
    """Notes, explains and counts.

    `note`, `missed`, `loaded`, `ended`, `gave_up` and `reset` belong to the manager's thread, cost some hundred
    nanoseconds a batch, and take no lock. All other methods may be called by any thread.

    Args:
        entries: Of the table, 8 bytes each.
        names: The names of all tiers, the primary one first.
        ttl_s: For each, how long it keeps a block; None where it does not expire.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        entries: int,
        names: Sequence[str],
        ttl_s: Sequence[float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = tuple(names)
        self.table = FateTable(entries)
        self._ttl_ticks = [None if ttl is None else int(ttl * TICKS_PER_S) for ttl in ttl_s]
        self._clock = clock
        self._start_s = clock()
        # The manager's thread counts what it appends, whoever takes batches what they take: no count has two writers.
        self._pending: deque[_Batch] = deque()
        self._appended_keys = self._dropped_keys = 0
        self._lock = threading.Lock()
        """Guards what follows, and the table; held for one chunk, never across I/O."""
        self._taken_keys = self._overlong_keys = 0
        self._least_tick = 0
        self._reset_ticks = [-1] * len(names)
        self._gave_up_ticks = [_LONG_AGO] * len(names)
        self._hits = [0] * len(names)
        self._misses = [Counter[int]() for _ in names]
        self._ended: deque[EndedRequest] = deque(maxlen=REQUESTS_KEPT)
        self._chunks = self._take_chunks()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-history", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it has noted can still be read."""
        self._is_closing.set()
        self._thread.join()

    # The manager's thread.

    def note(self, tier: int, fate: Fate, keys: Sequence[OffloadKey]) -> None:
        """Note what became of blocks in a tier. The list must not change any more."""
        self._append(self._note, len(keys), (tier, fate, keys))

    def missed(
        self, log: RequestLog, because: Because, keys: Sequence[OffloadKey], troubles: Troubles = _NO_TROUBLES
    ) -> None:
        """Note keys that a request was told that nobody has; with repetitions, if it asked again."""
        self._append(self._miss, len(keys), (log, log.missed, because, keys, troubles))

    def promoted(self, log: RequestLog, because: Because, keys: Sequence[OffloadKey]) -> None:
        """Note keys that only a secondary tier has, and that a request waits for."""
        self._append(self._miss, len(keys), (log, log.promoted, because, keys, None))

    def loaded(self, log: RequestLog, keys: Sequence[OffloadKey], sources: Mapping[OffloadKey, str]) -> None:
        """Note keys that a request loads, and the names of the secondary tiers that brought some of them."""
        self._append(self._load, len(keys), (log, keys, sources))

    def ended(self, log: RequestLog, troubles: Troubles = _NO_TROUBLES) -> None:
        """Note that a request has ended, so that its blocks are counted."""
        self._append(self._end, 0, (log, troubles))

    def gave_up(self, tier: int) -> None:
        """Note that a tier answered a lookup with a miss because it could not know."""
        self._append(self._give_up, 0, tier)

    def reset(self, tier: int, keys: Sequence[OffloadKey] = ()) -> None:
        """Note that a tier has forgotten all of its blocks: `keys`, and those noted as stored there."""
        self._pending.append(_Batch(self._reset, len(keys), self._clock(), (tier, keys)))  # rare, and never left out
        self._appended_keys += len(keys)

    def _append(self, work: Callable[[Any, float], Iterator[int]], keys: int, arguments: Any) -> None:
        pending = self._pending
        if self._appended_keys - self._taken_keys > PENDING_KEYS_MAX or len(pending) > PENDING_BATCHES_MAX:
            self._dropped_keys += keys
            return
        self._appended_keys += keys
        pending.append(_Batch(work, keys, self._clock(), arguments))

    # Any thread.

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were not noted because too many came at once."""
        return self._dropped_keys + self._overlong_keys

    def settle(self, keys_max: int | None = None) -> None:
        """Take what is pending now: all of it, or nothing where it is more than `keys_max` keys."""
        last = self._appended_keys
        if keys_max is not None and (last - self._taken_keys > keys_max or len(self._pending) > keys_max):
            return
        while self._take_chunk():
            if self._taken_keys > last:
                return  # the manager is faster

    def counted(self) -> list[dict[str, dict[str, int]]]:
        """Return `blocks_total` by result and `misses_total` by reason, for each tier, as far as there are any."""
        with self._lock:
            hits, misses = list(self._hits), [dict(each) for each in self._misses]
        counted: list[dict[str, dict[str, int]]] = []
        for num_hits, of_tier in zip(hits, misses, strict=True):
            results = {"hit": num_hits, "miss": sum(of_tier.values())}
            shown = {result: count for result, count in results.items() if count}
            reasons = {Fate(fate).label: count for fate, count in sorted(of_tier.items())}
            named = {"blocks_total": shown, "misses_total": reasons}
            counted.append({name: counts for name, counts in named.items() if counts})
        return counted

    def fates(self, keys: Sequence[OffloadKey]) -> list[list[tuple[Fate, float]]]:
        """Return for each key what became of it in each tier, and how many seconds ago."""
        self.settle()
        with self._lock:
            now_tick = self._tick(self._clock())
            found: list[list[tuple[Fate, float]]] = []
            for first in range(0, len(keys), CHUNK_KEYS_MAX):
                digests = hashes(keys[first : first + CHUNK_KEYS_MAX])
                columns = []
                for tier in range(len(self.names)):
                    fates, ticks = self.table.read(digests, tier)
                    stored = fates == Fate.STORED
                    fates[stored & (ticks <= self._reset_ticks[tier])] = Fate.RESET
                    ages = np.maximum(now_tick - ticks.astype(np.int64), 0)
                    columns.append(
                        [
                            (Fate(fate), age / TICKS_PER_S)
                            for fate, age in zip(fates.tolist(), ages.tolist(), strict=True)
                        ]
                    )
                found += [list(row) for row in zip(*columns, strict=True)]
            return found

    def requests(self) -> list[EndedRequest]:
        """Return the last ended requests, the oldest first."""
        self.settle()
        with self._lock:
            return list(self._ended)

    def age_s(self, request: EndedRequest) -> float:
        """Return how many seconds ago a request ended."""
        return self._clock() - request.ended_s

    # Whoever takes batches, with the lock.

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._is_closing.wait(pause_s):
            give_way()
            began_s = time.thread_time()
            is_more = self._take_chunk()
            pause_s = (time.thread_time() - began_s) / THREAD_SHARE if is_more else INTERVAL_S

    def _take_chunk(self) -> bool:
        """Do a piece of the pending work; return whether there was any."""
        with self._lock:
            return next(self._chunks, False)

    def _take_chunks(self) -> Iterator[bool]:
        """Yield after each piece of work, True; and False where nothing is pending."""
        done = batches = 0
        while True:
            if not self._pending:
                yield False
                done = batches = 0
                continue
            batch = self._pending.popleft()
            for count in batch.work(batch.arguments, batch.now_s):
                self._taken_keys += count
                done += count
                if done >= CHUNK_KEYS_MAX:
                    yield True
                    done = batches = 0
            batches += 1
            if batches >= _BATCHES_A_CHUNK:
                yield True
                done = batches = 0

    def _tick(self, now_s: float) -> int:
        """Return the time of an entry. After a reset time goes on with the next tick, so that it separates entries."""
        return max(int((now_s - self._start_s) * TICKS_PER_S), self._least_tick)

    def _note(self, arguments: tuple[int, Fate, Sequence[OffloadKey]], now_s: float) -> Iterator[int]:
        tier, fate, keys = arguments
        # A store that was not made says nothing of a block that is there. All else is newer than what was noted.
        keeps = self._reset_ticks[tier] if fate in _NOT_STORED else None
        for chunk in _chunks(keys):
            self.table.note(chunk, tier, fate, self._tick(now_s), keeps_stored_after=keeps)
            yield len(chunk)

    def _give_up(self, tier: int, now_s: float) -> Iterator[int]:
        self._gave_up_ticks[tier] = self._tick(now_s)
        return iter(())

    def _reset(self, arguments: tuple[int, Sequence[OffloadKey]], now_s: float) -> Iterator[int]:
        tier, keys = arguments
        self._reset_ticks[tier] = self._tick(now_s)
        for chunk in _chunks(keys):
            self.table.note(chunk, tier, Fate.RESET, self._tick(now_s))
            yield len(chunk)
        self._least_tick = self._reset_ticks[tier] + 1

    def _miss(
        self,
        arguments: tuple[RequestLog, dict[OffloadKey, bytes], Because, Sequence[OffloadKey], Troubles | None],
        now_s: float,
    ) -> Iterator[int]:
        log, noted, because, keys, troubles = arguments
        for chunk in _chunks(keys):
            new = [key for key in chunk if key not in noted] if noted else chunk
            if len(noted) + len(new) > REQUEST_KEYS_MAX:
                self._overlong_keys += len(new)
            elif new:
                noted |= self._why(log, new, because, now_s, troubles)
            yield len(chunk)

    def _load(
        self, arguments: tuple[RequestLog, Sequence[OffloadKey], Mapping[OffloadKey, str]], now_s: float
    ) -> Iterator[int]:
        log, keys, sources = arguments
        for chunk in _chunks(keys):
            if len(log.loaded) + len(chunk) > REQUEST_KEYS_MAX:
                self._overlong_keys += len(chunk)
                yield len(chunk)
                continue
            log.loaded |= dict.fromkeys(chunk, CPU)
            for key in chunk if sources else ():
                if key in sources:
                    log.loaded[key] = self.names.index(sources[key])
            yield len(chunk)

    def _end(self, arguments: tuple[RequestLog, Troubles], now_s: float) -> Iterator[int]:
        """Count a request's blocks. A block that it loaded is a hit, whatever it was told before."""
        log, troubles = arguments
        patterns = Counter[bytes]()
        """How often the fates of all tiers above the hit, or of all tiers that were asked, were the same."""
        hits = Counter(log.loaded.values())
        loaded = iter(log.loaded.items() if hits.keys() - {CPU} else ())
        while chunk := list(islice(loaded, CHUNK_KEYS_MAX)):
            why = ((log.promoted.get(key) or log.missed.get(key, b""), tier) for key, tier in chunk if tier)
            patterns.update(fates[:tier] for fates, tier in why)
            yield from self._again(len(chunk))
        first: tuple[OffloadKey, bytes] | None = None
        missed_blocks = 0
        missed = iter(log.missed.items())
        while pairs := list(islice(missed, CHUNK_KEYS_MAX)):
            final = [pair for pair in pairs if pair[0] not in log.loaded]
            if final and first is None:
                first = final[0][0], _troubled(final[0][1], troubles.get(final[0][0]))
            missed_blocks += len(final)
            if troubles:
                patterns.update(_troubled(why, troubles.get(key)) for key, why in final)
            else:
                patterns.update([why for _, why in final])
            yield from self._again(len(pairs))
        if not missed_blocks and not hits:
            return
        self._count(log.req_id, now_s, patterns, hits, missed_blocks, first)

    def _again(self, keys: int) -> Iterator[int]:
        """Yield for keys that were counted as taken when they came."""
        self._taken_keys -= keys
        yield keys

    def _count(
        self,
        req_id: str,
        now_s: float,
        patterns: Counter[bytes],
        hits: Counter[int],
        missed_blocks: int,
        first: tuple[OffloadKey, bytes] | None,
    ) -> None:
        misses = [Counter[int]() for _ in self.names]
        for pattern, count in patterns.items():
            for tier, fate in enumerate(pattern):
                misses[tier][fate] += count
        for tier, of_tier in enumerate(misses):
            self._misses[tier].update(of_tier)
            self._hits[tier] += hits[tier]
        named = {
            name: {Fate(fate).label: count for fate, count in of_tier.items()}
            for name, of_tier in zip(self.names, misses, strict=True)
            if of_tier
        }
        brought = {self.names[tier]: count for tier, count in hits.items()}
        key, why = (None, b"") if first is None else first
        because = {name: Fate(fate).label for name, fate in zip(self.names, why, strict=False)}
        self._ended.append(EndedRequest(req_id, now_s, brought, named, missed_blocks, key, because))

    def _why(
        self, log: RequestLog, keys: Sequence[OffloadKey], because: Because, now_s: float, troubles: Troubles | None
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


_NOT_STORED: Final = frozenset(
    {Fate.ADMISSION, Fate.BUDGET, Fate.NO_SPACE, Fate.BREAKER, Fate.DISABLED, Fate.TIMEOUT, Fate.FAILED}
)


def _chunks(keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
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
