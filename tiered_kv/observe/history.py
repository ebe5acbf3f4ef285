"""A bounded, lossy memory of what became of blocks, and of why requests missed them.

The scheduler's thread appends batches to a queue. A thread of the history, or whoever reads, takes them from it:

    manager:  note(tier, fate, keys) · missed(log, because, keys) · loaded(log, keys, sources) · ended(log, troubles)
    history:  STORED, EVICTED, ... into the table · why each key was missed, by the table as it then is · counts

The order matters: a block that a request misses is computed and stored again, and that must not hide why it was missed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import Fate
from tiered_kv.observe.ledger import Because, EndedRequest, Ledger, RequestLog, Troubles
from tiered_kv.observe.table import CHUNK_KEYS_MAX
from tiered_kv.tiering.step import give_way

PENDING_KEYS_MAX: Final = 1 << 17
"""Keys that wait to be taken from the queue; further ones are not noted, and counted."""
PENDING_BATCHES_MAX: Final = 1 << 14
"""Batches that wait; further ones likewise."""
INTERVAL_S: Final = 0.25
"""How often the thread looks whether there is anything to take."""
THREAD_SHARE: Final = 0.02
"""The most of a processor that the thread takes: the scheduler's thread waits for the interpreter meanwhile."""
_BATCHES_A_CHUNK: Final = 64
_NO_TROUBLES: Final[Troubles] = {}


class _Batch(NamedTuple):
    work: Callable[..., Iterator[int]]
    """The ledger's method."""
    keys: int
    arguments: tuple[Any, ...]  # Any: as `work` takes them


class BlockHistory:
    """Notes, explains and counts.

    `note`, `missed`, `promoted`, `loaded`, `ended`, `gave_up` and `reset` belong to the manager's thread, cost some
    hundred nanoseconds a batch, and take no lock. All other methods may be called by any thread.

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
        self._clock = clock
        # The manager's thread counts what it appends, whoever takes batches what they take: no count has two writers.
        self._pending: deque[_Batch] = deque()
        self._appended_keys = self._dropped_keys = 0
        self._lock = threading.Lock()
        """Guards what follows; held for one chunk, never across I/O."""
        self._ledger = Ledger(entries, names, ttl_s, clock())
        self._taken_keys = 0
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
        self._append(self._ledger.note, len(keys), tier, fate, keys)

    def missed(
        self, log: RequestLog, because: Because, keys: Sequence[OffloadKey], troubles: Troubles = _NO_TROUBLES
    ) -> None:
        """Note keys that a request was told that nobody has; with repetitions, if it asked again."""
        self._append(self._ledger.miss, len(keys), log, because, keys, troubles)

    def promoted(self, log: RequestLog, because: Because, keys: Sequence[OffloadKey]) -> None:
        """Note keys that only a secondary tier has, and that a request waits for."""
        self._append(self._ledger.miss, len(keys), log, because, keys, None)

    def loaded(self, log: RequestLog, keys: Sequence[OffloadKey], sources: Mapping[OffloadKey, str]) -> None:
        """Note keys that a request loads, and the names of the secondary tiers that brought some of them."""
        self._append(self._ledger.load, len(keys), log, keys, sources)

    def ended(self, log: RequestLog, troubles: Troubles = _NO_TROUBLES) -> None:
        """Note that a request has ended, so that its blocks are counted."""
        if not self._append(self._ledger.end, 0, log, troubles):
            self._dropped_keys += len(log.missed) + len(log.loaded)

    def gave_up(self, tier: int) -> None:
        """Note that a tier answered a lookup with a miss because it could not know."""
        self._append(self._ledger.give_up, 0, tier)

    def reset(self, tier: int, keys: Sequence[OffloadKey] = ()) -> None:
        """Note that a tier has forgotten all of its blocks: `keys`, and those noted as stored there."""
        # Rare, and never left out.
        self._pending.append(_Batch(self._ledger.reset, len(keys), (tier, keys, self._clock())))
        self._appended_keys += len(keys)

    def _append(self, work: Callable[..., Iterator[int]], keys: int, *arguments: Any) -> bool:
        """Append a batch, and the time; return whether there was room."""
        pending = self._pending
        if self._appended_keys - self._taken_keys > PENDING_KEYS_MAX or len(pending) > PENDING_BATCHES_MAX:
            self._dropped_keys += keys
            return False
        self._appended_keys += keys
        pending.append(_Batch(work, keys, (*arguments, self._clock())))
        return True

    # Any thread.

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were not noted because too many came at once."""
        return self._dropped_keys + self._ledger.overlong_keys

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
            return self._ledger.counted()

    def fates(self, keys: Sequence[OffloadKey]) -> list[list[tuple[Fate, float]]]:
        """Return for each key what became of it in each tier, and how many seconds ago."""
        self.settle()
        with self._lock:
            return self._ledger.fates(keys, self._clock())

    def requests(self) -> list[EndedRequest]:
        """Return the last ended requests, the oldest first."""
        self.settle()
        with self._lock:
            return list(self._ledger.ended)

    def age_s(self, request: EndedRequest) -> float:
        """Return how many seconds ago a request ended."""
        return self._clock() - request.ended_s

    # Whoever takes batches.

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
            for count in batch.work(*batch.arguments):
                done += count
                if done >= CHUNK_KEYS_MAX:
                    yield True
                    done = batches = 0
            self._taken_keys += batch.keys
            batches += 1
            if batches >= _BATCHES_A_CHUNK:
                yield True
                done = batches = 0
