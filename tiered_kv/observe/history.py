"""A bounded, lossy memory of what became of blocks, and of why requests missed them.

The scheduler's thread appends batches to a queue. A thread of the history, or whoever reads, takes them from it:

    manager:  note(tier, fate, keys) · missed(log, because, keys) · loaded(log, keys, sources) · ended(log, troubles)
    history:  STORED, EVICTED, ... into the table · why each key was missed, by the table as it then is · counts

The order matters: a block that a request misses is computed and stored again, and that must not hide why it was missed.

Pages: lists of keys that wait for another thread, of many batches each.

Python's garbage collector visits each key of a new list, but not of an old one. So a list for each batch would cost the
scheduler's thread more than its making. Who appends a batch gives away the part of the page that it is in.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from tiered_kv.base import OffloadKey
from tiered_kv.observe.fates import CHUNK_KEYS_MAX, Fate
from tiered_kv.observe.ledger import CPU, Because, EndedRequest, Ledger, RequestLog, Troubles
from tiered_kv.tiering.step import give_way

PENDING_KEYS_MAX: Final = 1 << 17
"""Keys that wait to be taken from the queue; further ones are not noted. Those that a request asked for are counted."""
PENDING_BATCHES_MAX: Final = 1 << 14
"""Batches that wait; further ones likewise."""
INTERVAL_S: Final = 0.25
"""How often the thread looks whether there is anything to take."""
THREAD_SHARE: Final = 0.02
"""Of a processor, what the thread takes while little waits: the scheduler's thread waits for the interpreter then."""
THREAD_SHARE_MAX: Final = 0.2
"""The most that it takes. What waits, as a share of what may wait, is the share that it takes up to there."""
_KEYS_A_BATCH: Final = 4
"""A batch costs the thread as much as so many keys more."""
_NO_TROUBLES: Final[Troubles] = {}
PAGE_KEYS: Final = 1 << 14

Page = list[OffloadKey]


def next_page(page: Page) -> Page:
    """Return a page that has room: this one, or a new one."""
    return page if len(page) < PAGE_KEYS else []


class BlockHistory:
    """Notes, explains and counts.

    The methods of the manager's thread cost one or two microseconds a batch and some nanoseconds a key, and take no
    lock. Any thread may call all other methods.

    Args:
        entries: Of the table, 8 bytes each.
        names: The names of all tiers, the primary one first.
        ttl_s: For each, how long it keeps a block; None where it does not expire.
        blocks: For each, its capacity, for its ghosts; None where it has none. By default no tier has.
        clock: Seconds of a monotonic clock.

    Attributes:
        evicted: Where the primary tier appends the keys that it evicts; another page after `turn_evicted`.
    """

    def __init__(
        self,
        entries: int,
        names: Sequence[str],
        ttl_s: Sequence[float | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        blocks: Sequence[int | None] | None = None,
    ) -> None:
        self.names = tuple(names)
        self.evicted: Page = []
        self._noted_evicted = 0
        self._clock = clock
        # The manager's thread counts what it appends, whoever takes batches what they take: no count has two writers.
        self._pending: deque[tuple[Callable[..., None], Page, int, int, tuple[Any, ...]]] = deque()
        """A method of the ledger, the part of a page that has its keys, and its other arguments (Any: as it takes)."""
        self._page: Page = []
        self._appended_keys = self._dropped_keys = 0
        self._lock = threading.Lock()
        """Guards what follows; held for one chunk, never across I/O."""
        self._ledger = Ledger(entries, names, ttl_s, blocks or [None] * len(names), clock())
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

    def turn_evicted(self) -> Page:
        """Note what the primary tier has evicted; return the page where it appends from now on."""
        self._note_evicted()
        if len(self.evicted) >= PAGE_KEYS:
            self.evicted, self._noted_evicted = [], 0
        return self.evicted

    def _note_evicted(self) -> None:
        """Note what the primary tier has evicted since the last call; before a miss is noted it is called."""
        page, start = self.evicted, self._noted_evicted
        if len(page) > start:
            if not self._append(self._ledger.note, page, start, len(page), CPU, Fate.EVICTED):
                del page[start:]
            self._noted_evicted = len(page)

    def note(self, tier: int, fate: Fate, keys: Collection[OffloadKey]) -> None:
        """Note what became of blocks in a tier."""
        self._add(self._ledger.note, keys, tier, fate)

    def missed(
        self,
        log: RequestLog,
        because: Because,
        page: Page,
        start: int = 0,
        troubles: Troubles = _NO_TROUBLES,
    ) -> None:
        """Note keys that a request was told that nobody has; with repetitions, if it asked again.

        They are `page[start:]`, which must not change; the page may become longer.
        """
        self._note_evicted()
        if not self._append(self._ledger.miss, page, start, len(page), log, because, troubles):
            self._dropped_keys += len(page) - start

    def promoted(self, log: RequestLog, because: Because, keys: Collection[OffloadKey]) -> None:
        """Note keys that only a secondary tier has, and that a request waits for."""
        self._note_evicted()
        self._add(self._ledger.promote, keys, log, because)

    def loaded(self, log: RequestLog, keys: Collection[OffloadKey], sources: Mapping[OffloadKey, str]) -> None:
        """Note keys that a request loads, and the names of the secondary tiers that brought some of them."""
        if not self._add(self._ledger.load, keys, log, sources):
            self._dropped_keys += len(keys)

    def ended(self, log: RequestLog, troubles: Troubles = _NO_TROUBLES) -> None:
        """Note that a request has ended, so that its blocks are counted; without room it is forgotten later."""
        self._append(self._ledger.end, self._page, 0, 0, log, troubles)

    def stored(self, keys: Collection[OffloadKey]) -> None:
        """Note keys that the engine has computed, and stored because nobody had them."""
        self._add(self._ledger.store, keys)

    def gave_up(self, tier: int) -> None:
        """Note that a tier answered a lookup with a miss because it could not know."""
        self._append(self._ledger.give_up, self._page, 0, 0, tier)

    def reset(self, tier: int, keys: Collection[OffloadKey] = ()) -> None:
        """Note that a tier has forgotten all of its blocks: `keys`, and those noted as stored there."""
        self._add(self._ledger.reset, keys, tier, is_needed=True)

    def _add(
        self, work: Callable[..., None], keys: Collection[OffloadKey], *arguments: Any, is_needed: bool = False
    ) -> bool:
        """Append a batch of these keys; return whether there was room. There is for one that is needed, and rare."""
        has_room = is_needed or self._has_room()
        if has_room:  # nothing is copied where there is none
            page = self._page = next_page(self._page)
            start = len(page)
            page.extend(keys)
            self._append(work, page, start, len(page), *arguments, is_needed=True)
        return has_room

    def _append(
        self, work: Callable[..., None], page: Page, start: int, stop: int, *arguments: Any, is_needed: bool = False
    ) -> bool:
        """Append a batch whose keys are in a page already, and the time; return whether there was room."""
        has_room = is_needed or self._has_room()
        if has_room:
            self._appended_keys += stop - start
            self._pending.append((work, page, start, stop, (self._clock(), *arguments)))
        return has_room

    def _has_room(self) -> bool:
        waiting = self._appended_keys - self._taken_keys
        return waiting <= PENDING_KEYS_MAX and len(self._pending) <= PENDING_BATCHES_MAX

    # Any thread.

    @property
    def dropped_blocks(self) -> int:
        """Blocks that are in no miss or hit, because too many came at once or too many requests did not end."""
        return self._dropped_keys + self._ledger.forgotten_keys

    def settle(self, keys_max: int | None = None) -> None:
        """Take what is pending now: all of it, or nothing where it is more than `keys_max` keys."""
        last = self._appended_keys
        if keys_max is not None and (last - self._taken_keys > keys_max or len(self._pending) > keys_max):
            return
        while self._take_chunk():
            if self._taken_keys > last:
                return  # the manager is faster
            if keys_max is None:
                give_way()

    def counted(self) -> list[dict[str, dict[str, int]]]:
        """Return for each tier `blocks_total` by result, `misses_total` by reason and `ghost_hits_total` by size."""
        with self._lock:
            return self._ledger.counted()

    def fates(self, keys: Sequence[OffloadKey]) -> list[list[tuple[Fate, float]]]:
        """Return for each key what became of it in each tier, and how many seconds ago."""
        self.settle()
        found: list[list[tuple[Fate, float]]] = []
        for first in range(0, len(keys), CHUNK_KEYS_MAX):
            give_way()
            with self._lock:
                found += self._ledger.fates(keys[first : first + CHUNK_KEYS_MAX], self._clock())
        return found

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
            pause_s = (time.thread_time() - began_s) / self._share() if is_more else INTERVAL_S

    def _share(self) -> float:
        """Return the share of a processor to take now."""
        waiting = self._appended_keys - self._taken_keys
        full = max(waiting / PENDING_KEYS_MAX, len(self._pending) / PENDING_BATCHES_MAX)
        return min(max(THREAD_SHARE, full), THREAD_SHARE_MAX)

    def _take_chunk(self) -> bool:
        """Do a piece of the pending work; return whether there was any."""
        with self._lock:
            try:
                return next(self._chunks)
            except BaseException:  # such as Ctrl-C in a reader: a generator that raised has ended
                self._chunks = self._take_chunks()
                raise

    def _take_chunks(self) -> Iterator[bool]:
        """Yield after each piece of work, True; and False where nothing is pending."""
        done = 0
        while True:
            if not self._pending:
                yield False
                done = 0
                continue
            work, page, start, stop, arguments = self._pending.popleft()
            try:
                for first in range(start, max(stop, start + 1), CHUNK_KEYS_MAX):
                    if done >= CHUNK_KEYS_MAX:
                        yield True
                        done = 0
                    chunk = page[first : min(first + CHUNK_KEYS_MAX, stop)]
                    work(chunk, *arguments)
                    done += len(chunk) + _KEYS_A_BATCH
            finally:
                self._taken_keys += stop - start
