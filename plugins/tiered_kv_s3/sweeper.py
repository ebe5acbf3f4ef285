"""The tier's background work: sweeps for `ttl` and `capacity`, and the renewal of used blocks.

A sweep lists the namespace's blocks, of every epoch, and deletes those older than `ttl`, and the oldest beyond
`capacity`. One process sweeps for all: see sweep_right.py. If several do, they choose about the same blocks, and
deleting a deleted one is no error.

`S3Tier`'s worker threads note stores and loads here, and its background thread notes uses. No such call asks the
bucket. The sweeper's thread sweeps; a background task renews. What must stay true: a sweep deletes only blocks of this
namespace, and counts the age of a block from its last use in this process.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tiered_kv.errors import ResourceError, TierError
from tiered_kv.metrics.counters import Counters
from tiered_kv.system.threads import BackgroundTask, start_thread
from tiered_kv_s3.control import DELETED_AT_ONCE, NO_OBJECT, Control, Listed
from tiered_kv_s3.epoch import Naming
from tiered_kv_s3.presence import Presence
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.sweep_right import SweepRight, Swept
from tiered_kv_s3.uses import BlockUses
from tiered_kv_s3.verdict import BucketError, Verdict

CANDIDATES_MAX = 100_000
"""Blocks that a sweep deletes after one listing, to bound its memory; it lists again if there are more."""
RENEWALS_MAX = 1024  # blocks that may wait for their renewal; further ones are not renewed
RENEWALS_PAUSE_S = 1 / 32  # each takes two requests, which cost money
REFUSED_MAX = 8  # requests to delete that are refused one after another, before a sweep ends
CLOCK_S = 2.0  # servers give times in whole seconds
_JITTER = 0.2


class Sweeper:
    """Sweeps from the first store until it is stopped. Any thread may call.

    A process that only loads does not sweep. It reads the results of the other processes' sweeps, and renews by them.
    """

    def __init__(
        self, control: Control, naming: Naming, presence: Presence, counters: Counters, settings: S3Settings, name: str
    ) -> None:
        self._control = control
        self._naming = naming
        self._presence = presence
        self._counters = counters
        self._ttl_s = settings.ttl or math.inf
        self._capacity_bytes = settings.capacity or math.inf
        self._interval_s = settings.sweep_interval
        self._renewing = BackgroundTask(self._renew_all, f"{name}-renewals")
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards `used_bytes`, `_renewals`, `_has_stored`, and the start of the thread
        self.used_bytes = 0  # the size of all blocks at the last sweep, plus the stores of this process since then
        self.uses = BlockUses()
        self._right = SweepRight(control, naming.sweep, self._interval_s)
        self._deleted_s = math.inf
        """The age from which sweeps delete blocks to keep the capacity; larger, or infinite, while there is room.
        Only the sweeper's thread changes it."""
        self._last_deleted: tuple[float, frozenset[str]] = (0.0, frozenset())
        """When the last sweep ended, and some of the blocks that it deleted. Only the sweeper's thread uses it."""
        self._renewals: OrderedDict[str, None] = OrderedDict()
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_started = min(self._ttl_s, self._capacity_bytes) == math.inf
        """Whether there is nothing to start: the thread runs, or no sweep is needed, without `ttl` and `capacity`."""
        self._has_stored = False

    def note_stored(self, size_bytes: int) -> None:
        """Count a block that was stored; the first one starts the sweeps."""
        with self._lock:
            self.used_bytes += size_bytes
            self._has_stored = True
        self._start()

    def note_load(self, name: str, age_s: float) -> None:
        """Note the use of a block of a known age."""
        self._start()
        self.uses.note_age(name, age_s)
        if age_s > self.renewed_s:
            self.renew(name)

    def note_uses(self, names: Sequence[str]) -> set[str]:
        """Note uses in a tier above, and return the blocks that are gone. Others are renewed if they are old."""
        self._start()
        gone = self.uses.take_gone(names)
        names = [name for name in names if name not in gone]
        self.uses.note_uses(names)
        for name in names if self.renewed_s < math.inf else ():
            if self.uses.age_s(name) > self.renewed_s:
                self.renew(name)
        return gone

    @property
    def renewed_s(self) -> float:
        """The age from which on a used block is renewed: half of that at which it would be deleted."""
        return min(self._ttl_s, self._deleted_s) / 2

    def renew(self, name: str) -> None:
        """Renew a block soon, in the background."""
        with self._lock:
            if len(self._renewals) < RENEWALS_MAX:
                self._renewals[name] = None
        self._renewing.ask()

    def stop(self) -> None:
        """Tell the threads to end; does not wait."""
        with self._lock:
            self._stopping.set()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._renewing.join(timeout_s)

    def sweep(self) -> None:
        """Delete blocks that are too old or beyond the capacity; raises `TierError` if a request fails."""
        while self._sweep_once():
            pass

    def sweep_if_due(self) -> None:
        """Sweep, unless another process has done so lately; raises: see `sweep`."""
        swept = self._right.take(Swept(self._deleted_s, self.used_bytes))
        if swept is None:
            try:
                self.sweep()
            except BaseException:
                self._right.leave()
                raise
            self._right.end(Swept(self._deleted_s, self.used_bytes))
        else:
            self._follow(swept)

    def _follow(self, swept: Swept | None) -> None:
        """Renew by the result of another process's sweep."""
        if swept is not None:
            self._deleted_s = swept.deleted_s
            with self._lock:
                self.used_bytes = swept.used_bytes

    def _start(self) -> None:
        if self._is_started:
            return
        with self._lock:
            if self._is_started or self._stopping.is_set():
                return
            with contextlib.suppress(ResourceError):  # the next store or use tries again
                self._thread = start_thread(self._run, self._name)
                self._is_started = True

    def _run(self) -> None:
        pause_s = random.uniform(0, self._interval_s)
        while not self._stopping.wait(pause_s):
            try:
                if self._has_stored:
                    self.sweep_if_due()
                else:
                    self._follow(self._right.others())
            except Exception:  # any exception of a library; the thread continues
                self._counters.add("failed_sweeps_total")
            pause_s = self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)

    def _renew_all(self) -> None:
        while not self._stopping.wait(RENEWALS_PAUSE_S):
            with self._lock:
                if not self._renewals:
                    return
                name, _ = self._renewals.popitem(last=False)
            try:
                if self._is_old(name):
                    self._control.renew(name)
                    self.uses.note_stored(name)
                    self._counters.add("renewed_blocks_total")
            except BucketError as error:
                if error.reason in NO_OBJECT:
                    self._note_gone(name)
                self._counters.add("failed_renewals_total")
            except Exception:  # any exception of a library; the block's next use asks again
                self._counters.add("failed_renewals_total")

    def _is_old(self, name: str) -> bool:
        """Return whether a block is there, and old enough; ask the bucket for an age that is not known."""
        if self.uses.age_s(name) < math.inf:
            return True  # `renew` is called for a known age only if the block is old
        age_s = self._control.age_s(name)
        if age_s is None:
            self._note_gone(name)
            self._counters.add("failed_renewals_total")
            return False
        self.uses.note_age(name, age_s)
        return age_s > self.renewed_s

    def _note_gone(self, name: str) -> None:
        self._presence.note(name, Verdict.ABSENT, time.monotonic())
        self.uses.note_gone(name)

    def _sweep_once(self) -> bool:
        """List and delete once; return whether there may be more to delete.

        A block that this process uses is as old as its last use. It is renewed, so that other sweeps spare it too.
        """
        listed_bytes = doomed_bytes = kept = 0
        oldest_s = 0.0
        used: list[Listed] = []
        begun_s = time.monotonic()
        earlier_s, earlier = self._last_deleted
        since_s = time.monotonic() - earlier_s + CLOCK_S

        def blocks() -> Iterator[Listed]:
            nonlocal listed_bytes, kept, oldest_s
            for page in self._control.listed(self._naming.blocks):
                if self._stopping.is_set():
                    return
                for entry in page:
                    if self._naming.is_block(entry.name):
                        listed_bytes += entry.size_bytes
                        kept += entry.name in earlier and entry.age_s > since_s  # a younger one was stored again
                        unused_s = self.uses.unused_s(entry.name, begun_s)
                        if unused_s < entry.age_s <= self._ttl_s:
                            used.append(entry)
                            entry = entry._replace(age_s=unused_s)
                        oldest_s = max(oldest_s, entry.age_s)
                        yield entry

        doomed: list[Listed] = []
        for each in heapq.nlargest(CANDIDATES_MAX, blocks()):
            if each.age_s <= self._ttl_s and listed_bytes - doomed_bytes <= self._capacity_bytes:
                break
            doomed.append(each)
            doomed_bytes += each.size_bytes
        youngest_s = doomed[-1].age_s if doomed else math.inf
        if doomed and youngest_s <= self._ttl_s:
            self._deleted_s = youngest_s
        elif listed_bytes > self._capacity_bytes / 2:  # estimates the age of the oldest block at a full capacity
            self._deleted_s = min(2 * self._deleted_s, oldest_s * self._capacity_bytes / listed_bytes)
        else:
            self._deleted_s *= 2
        deleted = {each.name for each in doomed}
        for each in sorted(used, reverse=True)[:RENEWALS_MAX]:
            if each.age_s > self._deleted_s / 2 and each.name not in deleted:
                self.uses.note_listed(each.name, each.age_s)
                self.renew(each.name)
        gone, refusals = self._delete(doomed)
        if self._stopping.is_set():
            return False
        self._last_deleted = time.monotonic(), frozenset(each.name for each in gone[:DELETED_AT_ONCE])
        with self._lock:
            self.used_bytes = listed_bytes - sum(each.size_bytes for each in gone)
        if refusals:  # the next listing shows which blocks are left
            raise TierError(f"blocks could not be deleted: {', '.join(sorted(refusals))}", operation="delete")
        if kept:
            raise self._control.not_deleted()
        return len(doomed) == CANDIDATES_MAX

    def _delete(self, doomed: Sequence[Listed]) -> tuple[list[Listed], set[str]]:
        """Delete blocks until the sweeper is stopped; return the deleted ones, and why others are not."""
        all_gone: list[Listed] = []
        refusals: set[str] = set()
        refused = 0  # requests in a row; more would be refused too
        for start in range(0, len(doomed), DELETED_AT_ONCE):
            if self._stopping.is_set() or refused == REFUSED_MAX:
                break
            batch = doomed[start : start + DELETED_AT_ONCE]
            found = self._control.delete([{"Key": each.name} for each in batch])
            gone = [each for at, each in enumerate(batch) if at not in found]
            self._counters.add("deleted_blocks_total", count=len(gone))
            for each in gone:
                self._note_gone(each.name)
            all_gone += gone
            refusals.update(found.values())
            refused = 0 if gone else refused + 1
        return all_gone, refusals
