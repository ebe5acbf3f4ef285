"""A bounded, lossy memory of what became of blocks, and of why requests missed them.

The scheduler's thread appends batches to a queue. The history's thread, a reader or a host's server takes the batches:

    search:   asks(log), miss(key), found(key), append_gathered()
    manager:  note(tier, fate, keys) · loaded(log, keys, sources) · ended(log)
    history:  write fates into the table · find why each key was missed, by the table at that moment · count

What must stay true: batches are taken in the order in which they were appended. A block that a request misses is
computed and stored again, and the store must not hide the reason of the miss.

Keys wait in tuples. Python's garbage collector visits each key of a new list up to three times, and each key of a tuple
once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from tiered_kv.base import OffloadKey
from tiered_kv.metrics.history.fates import CHUNK_KEYS_MAX
from tiered_kv.metrics.history.ledger import CPU, BatchFates, EndedRequest, Ledger, RequestLog
from tiered_kv.metrics.history.names import KeyNames
from tiered_kv.reasons import Fate
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.step import IDLE_WAIT, IDLE_WAIT_S_MAX, give_way
from tiered_kv.system.threads import start_thread

_log = logging.getLogger(__name__)

PENDING_KEYS_MAX: Final = 1 << 17
"""Limit of keys in the queue. Further keys are not noted; if a request asked for them, they count as unexplained."""
PENDING_BATCHES_MAX: Final = 1 << 14
"""Limit of batches in the queue; further batches are not noted either."""
INTERVAL_S: Final = 0.25
"""How often the thread looks into an empty queue."""
THREAD_SHARE: Final = 0.02
"""Share of a processor for the thread while the queue is short. Meanwhile the scheduler waits for the interpreter."""
THREAD_SHARE_MAX: Final = 0.2
"""Limit of the thread's share of a processor. Between `THREAD_SHARE` and this limit, the thread's share is the part of
the queue that is full."""
CHUNKS_S: Final = 0.001
"""Seconds that the thread works between two of its pauses, at most; the last chunk may end later."""
WORK_S: Final = 0.0005
"""Seconds that a busy server works for the history between two of its passes; the last chunk may end later."""
_KEYS_A_BATCH: Final = 4
"""The cost of a batch for the thread, in keys: a batch without keys costs as much as this many keys."""

_Keys = tuple[OffloadKey, ...]
_Batch = tuple[Callable[..., None], _Keys, int, tuple[Any, ...]]
"""A method of the ledger, keys, the index of the first that is left, and other arguments (Any: as the method takes)."""


class BlockHistory:
    """Notes, explains and counts.

    The methods of the manager's thread cost one or two microseconds a batch and some nanoseconds a key, and take no
    lock. Any thread may call all other methods.

    Args:
        entries: Size of the table of fates, in entries of 8 bytes.
        names: The tiers' names, the primary tier's first.
        ttl_s: For each tier, how long it keeps a block; None if blocks do not expire.
        blocks: For each tier, its capacity in blocks, by which its ghosts are counted; None for a tier without ghosts.
            By default no tier has ghosts.
        has_thread: Whether a thread takes the noted batches. Without it the manager's thread calls `work`.
        has_names: Whether `keys_of` can be asked.
        on_ended: Gets the outcome of each request, on the thread that takes the batch: it must return at once.
    """

    def __init__(
        self,
        entries: int,
        names: Sequence[str],
        ttl_s: Sequence[float | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        blocks: Sequence[int | None] | None = None,
        has_thread: bool = True,
        has_names: bool = False,
        on_ended: Callable[[EndedRequest], None] | None = None,
    ) -> None:
        self.names = tuple(names)
        self._clock = clock
        self._evicted: list[OffloadKey] = []
        """Blocks that the primary tier evicted since `append_gathered` was last called. The manager's thread only."""
        self._misses: list[OffloadKey] = []
        """Misses of the request that asks now. The manager's thread only."""
        self.miss: Callable[[OffloadKey], None] = self._misses.append
        """Notes that the asking request misses a block. Hot path: no call in Python."""
        self._asking: RequestLog | None = None
        self._is_ahead = False
        """Whether `_asking` asks for its prefetch."""
        # Each count has one writer: the manager's thread for appended keys, the holder of the lock for taken ones.
        self._pending: deque[_Batch] = deque()
        self._appended_keys = self._dropped_keys = 0
        self._lock = threading.Lock()
        """Guards the ledger and the fields below; held for one chunk, never across I/O."""
        key_names = KeyNames(entries) if has_names else None
        self._ledger = Ledger(entries, names, ttl_s, blocks or [None] * len(names), clock(), on_ended, key_names)
        self._taken_keys = 0
        self._log_limit = LogLimit()
        self._batch: _Batch | None = None
        """The batch that was taken last, without the keys that were taken; None if all its keys were taken."""
        self._is_closing = threading.Event()
        self._thread = start_thread(self._run, "tiered-kv-history") if has_thread else None

    def close(self) -> None:
        """End the thread; the history can still be read."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()

    # The manager's thread.

    def asks(self, log: RequestLog, because: BatchFates | None, *, is_ahead: bool = False) -> None:
        """Note which request asks for blocks. With `is_ahead` it asks for its prefetch, whose misses do not count.

        `because` says why tiers are not asked; None if the reasons are as before.
        """
        self.append_gathered()
        self._asking, self._is_ahead = log, is_ahead
        if because is not None:
            log.because = because

    def found(self, key: OffloadKey) -> None:
        """Note a block for which the asking request begins to wait."""
        if self._asking is not None:
            self._asking.found.append(key)

    def append_gathered(self) -> None:
        """Append to the queue what was gathered since the last call: the blocks that the primary tier evicted, and the
        blocks that the asking request missed or waits for."""
        if self._evicted:
            self._add(self._ledger.note, self._evicted, CPU, Fate.EVICTED)
            self._evicted.clear()
        log = self._asking
        if log is None:
            return
        if self._misses:
            missed = tuple(self._misses)
            self._misses.clear()
            # A waiting request asks in each step. The misses of its first two steps are noted. After that, the misses
            # of a step are noted only if they differ from those of the step before. Most requests ask once: a first
            # step needs no hash.
            misses_hash = 0 if log.misses_hash is None else hash(missed)
            if not self._is_ahead and misses_hash != log.misses_hash:
                log.misses_hash = misses_hash
                self.missed(log, log.because, missed)
        if log.found:
            self._add(self._ledger.promote, log.found, log, log.because)
            log.found = []

    def evicted(self, keys: Collection[OffloadKey]) -> None:
        """Note keys that the primary tier has evicted. They are appended before the next misses."""
        self._evicted.extend(keys)

    def swept(self, keys: Collection[OffloadKey]) -> None:
        """Note keys of the primary tier from before a reset."""
        self.note(CPU, Fate.RESET, keys)

    def note(self, tier: int, fate: Fate, keys: Collection[OffloadKey]) -> None:
        self._add(self._ledger.note, keys, tier, fate)

    def missed(self, log: RequestLog, because: BatchFates, keys: Collection[OffloadKey]) -> None:
        """Note keys for which a request got a miss; with repetitions, if it asked again."""
        if not self._add(self._ledger.miss, keys, log, because, log.failures):
            self._dropped_keys += len(keys)

    def loaded(self, log: RequestLog, keys: Collection[OffloadKey], sources: Mapping[OffloadKey, str]) -> None:
        """Note keys that a request loads, and the secondary tiers of promoted ones."""
        if not self._add(self._ledger.load, keys, log, sources):
            self._dropped_keys += len(keys)

    def ended(self, log: RequestLog) -> None:
        """Count the blocks of a request that has ended. If the queue has no room, the ledger forgets it later."""
        self.append_gathered()
        self._add(self._ledger.end, (), log, log.failures)

    def stored(self, keys: Collection[OffloadKey]) -> None:
        """Note keys that the engine has computed and stored, after a miss."""
        self.append_gathered()
        self._add(self._ledger.store, keys)

    def note_lookup_timeout(self, tier: int) -> None:
        """Note that a lookup in a tier timed out, and counts as a miss."""
        self._add(self._ledger.lookup_timeout, (), tier)

    def reset(self, tier: int, keys: Collection[OffloadKey] = ()) -> None:
        """Note that a tier has forgotten all blocks: `keys`, and all noted as stored there."""
        self.append_gathered()
        self._append(self._ledger.reset, tuple(keys), tier)  # rare, and needed even without room

    def _add(self, work: Callable[..., None], keys: Collection[OffloadKey], *arguments: Any) -> bool:
        """Append a batch of keys if the queue has room; return whether it had."""
        waiting, batches = self._appended_keys - self._taken_keys, len(self._pending)
        has_room = waiting <= PENDING_KEYS_MAX and batches <= PENDING_BATCHES_MAX
        if has_room:
            self._append(work, tuple(keys), *arguments)
        return has_room

    def _append(self, work: Callable[..., None], keys: _Keys, *arguments: Any) -> None:
        self._appended_keys += len(keys)
        self._pending.append((work, keys, 0, (self._clock(), *arguments)))

    @property
    def has_work(self) -> bool:
        return bool(self._batch or self._pending)

    def work(self, *, is_idle: bool) -> None:
        """Take one chunk if the caller is idle; else chunks for `WORK_S` seconds while the queue is over half full."""
        end_s = time.monotonic() + WORK_S
        while self.has_work and (is_idle or self._fullness() > 0.5) and self._lock.acquire(blocking=False):
            try:  # a reader that holds the lock takes chunks itself
                self._take()
            finally:
                self._lock.release()
            if is_idle or time.monotonic() > end_s:
                return

    # Any thread.

    @property
    def dropped_blocks(self) -> int:
        """Blocks counted in no miss or hit: too many came at once, or too many requests did not end."""
        return self._dropped_keys + self._ledger.forgotten_keys

    def settle(self, keys_max: int | None = None) -> None:
        """Take all that is in the queue now; nothing, if that is more than `keys_max` keys or batches."""
        last = self._appended_keys
        if keys_max is not None and (last - self._taken_keys > keys_max or len(self._pending) > keys_max):
            return
        while self._take_chunk():
            if self._taken_keys > last:
                return  # the rest came after the call
            if keys_max is None:
                give_way()

    def snapshot(self) -> list[dict[str, dict[str, int]]]:
        """Return for each tier `blocks_total` by result, `misses_total` by reason and `ghost_hits_total` by size."""
        with self._lock:
            return self._ledger.snapshot()

    def fates(self, keys: Sequence[OffloadKey]) -> list[list[tuple[Fate, float]]]:
        """Return for each key its fate in each tier, and the age of this fate in seconds."""
        self.settle()
        found: list[list[tuple[Fate, float]]] = []
        for first in range(0, len(keys), CHUNK_KEYS_MAX):
            give_way()
            with self._lock:
                found += self._ledger.fates(keys[first : first + CHUNK_KEYS_MAX], self._clock())
        return found

    def requests(self, keys_max: int | None = None) -> list[EndedRequest]:
        """Return the last ended requests, the oldest first; see `settle` for `keys_max`."""
        self.settle(keys_max)
        with self._lock:
            return list(self._ledger.ended)

    def keys_of(self, hashes: Sequence[int], group: int) -> list[OffloadKey | None]:
        """Return the keys of blocks by the last 64 bits of their hashes, as events name them; None if not known."""
        self.settle(PENDING_KEYS_MAX)
        with self._lock:
            return [None] * len(hashes) if self._ledger.keys is None else self._ledger.keys.find(hashes, group)

    def age_s(self, request: EndedRequest) -> float:
        return self._clock() - request.ended_s

    # The history's thread, or a reader.

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._is_closing.wait(pause_s):
            IDLE_WAIT.left_s = IDLE_WAIT_S_MAX
            give_way()
            used_s = self._take_chunks()
            pause_s = used_s / self._share() if self.has_work else INTERVAL_S

    def _take_chunks(self) -> float:
        """Take chunks while the engine's thread is idle, for `CHUNKS_S` at most; one if it is not. Return the CPU time.

        To wake up more often would take the interpreter lock from the engine more often.
        """
        began_s = time.thread_time()
        while True:
            is_more = self._take_chunk()
            used_s = time.thread_time() - began_s
            if not is_more or used_s > CHUNKS_S:
                return used_s
            give_way()
            if IDLE_WAIT.left_s <= 0.0:
                return used_s

    def _share(self) -> float:
        """Return the share of a processor for the thread now."""
        return min(max(THREAD_SHARE, self._fullness()), THREAD_SHARE_MAX)

    def _fullness(self) -> float:
        waiting = self._appended_keys - self._taken_keys
        return max(waiting / PENDING_KEYS_MAX, len(self._pending) / PENDING_BATCHES_MAX)

    def _take_chunk(self) -> bool:
        """Take up to `CHUNK_KEYS_MAX` keys from the queue; return whether it has more."""
        with self._lock:
            self._take()
            return self.has_work

    def _take(self) -> None:
        """Take a chunk; the caller holds the lock."""
        done = 0
        while done < CHUNK_KEYS_MAX and self.has_work:
            work, keys, start, arguments = self._batch or self._pending.popleft()
            end = min(start + CHUNK_KEYS_MAX, len(keys))
            # Before the work, so that Ctrl-C in a reader costs one chunk only.
            self._batch = (work, keys, end, arguments) if end < len(keys) else None
            self._taken_keys += end - start
            try:
                work(keys[start:end], *arguments)
            except Exception:  # the thread, and readers, go on without these keys
                if self._log_limit.take() is not None:
                    _log.exception("the history lost keys: an unexpected error; %s", self._log_limit.about)
            done += end - start + _KEYS_A_BATCH
