"""The tier's background work: sweeps for `ttl` and `capacity`, and the renewal of used blocks.

A sweep lists the namespace's blocks, of every epoch. It deletes the blocks older than `ttl`, and the oldest blocks
beyond `capacity`. One process sweeps for all: see sweep_right.py. If several processes sweep, they choose about the
same blocks, and deleting a deleted block is no error.

The tier's worker threads note stores and loads here, and its background thread notes uses. No such call asks the
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
from dataclasses import dataclass, field

from tiered_kv.errors import ResourceError, TierError
from tiered_kv.metrics.counters import Counters
from tiered_kv.system.threads import BackgroundTask, start_thread
from tiered_kv.toolkit.objects.deletion_age import DeletionAge
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.objects.presence import Presence
from tiered_kv.toolkit.objects.settings import ObjectSettings
from tiered_kv.toolkit.objects.store import DELETED_AT_ONCE, Listed, ObjectControl
from tiered_kv.toolkit.objects.sweep_right import SweepRight, Swept
from tiered_kv.toolkit.objects.uses import BlockUses
from tiered_kv.toolkit.objects.verdict import Verdict

CANDIDATES_MAX = 100_000
"""Limit of the blocks that a sweep deletes after one listing: it bounds memory. For more blocks a sweep lists again."""
RENEWALS_MAX = 1024
"""Limit of the blocks that wait for their renewal. Further blocks are not renewed."""
RENEWALS_PAUSE_S = 1 / 32
"""Seconds between two renewals: a renewal takes two requests, which cost money."""
REFUSED_MAX = 8
"""Limit of the requests to delete that a server refuses one after another. Then the sweep ends."""
CLOCK_S = 2.0
"""Largest error of an age, in seconds: servers give times in whole seconds."""
_JITTER = 0.2
"""Largest random change of the interval between two sweeps, as a share of the interval."""


@dataclass(slots=True)
class _Listing:
    """What a sweep has found in one listing, complete when the listing has ended. The sweeper's thread owns it."""

    size_bytes: int = 0
    """Size of all blocks."""
    oldest_s: float = 0.0
    """Age of the oldest block, counted from its last use in this process."""
    kept: int = 0
    """Blocks that the last sweep deleted, by the server's answer, and that the server still lists."""
    used: list[Listed] = field(default_factory=list)
    """Blocks up to `ttl` that this process has used since they were stored, with their ages since the store."""


class Sweeper:
    """Sweeps from the first store until it is stopped. Any thread may call.

    A process that only loads does not sweep. It reads the results of other processes' sweeps, and takes their deletion
    age for its renewals.
    """

    def __init__(
        self,
        control: ObjectControl,
        naming: Naming,
        presence: Presence,
        counters: Counters,
        settings: ObjectSettings,
        name: str,
    ) -> None:
        self._control = control
        self._naming = naming
        self._presence = presence
        self._counters = counters
        self.deletion_age = DeletionAge(settings.ttl or math.inf, settings.capacity or math.inf)
        self._ttl_s = settings.ttl or math.inf
        self._capacity_bytes = settings.capacity or math.inf
        self._interval_s = settings.sweep_interval
        self._renewing = BackgroundTask(self._renew_all, f"{name}-renewals")
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards `used_bytes`, `_renewals`, `_has_stored`, and the start of the thread
        self.used_bytes = 0  # the size of all blocks at the last sweep, plus the stores of this process since then
        self.uses = BlockUses()
        self._right = SweepRight(control, naming.sweep, self._interval_s)
        self._last_deleted: tuple[float, frozenset[str]] = (0.0, frozenset())
        """When the last sweep ended, and some of the blocks that it deleted. Only the sweeper's thread uses both."""
        self._renewals: OrderedDict[str, None] = OrderedDict()
        """Names of the blocks that wait for their renewal, in the order of their requests."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._is_started = min(self._ttl_s, self._capacity_bytes) == math.inf
        """Whether there is nothing to start: the thread runs, or the settings have neither `ttl` nor `capacity`."""
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
        if age_s > self.deletion_age.renewed_s:
            self.renew(name)

    def note_uses(self, names: Sequence[str]) -> set[str]:
        """Note uses in a tier above. Return the blocks that were deleted; old blocks that exist are renewed."""
        self._start()
        gone = self.uses.take_gone(names)
        names = [name for name in names if name not in gone]
        self.uses.note_uses(names)
        renewed_s = self.deletion_age.renewed_s
        for name in names if renewed_s < math.inf else ():
            if self.uses.age_s(name) > renewed_s:
                self.renew(name)
        return gone

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
        swept = self._right.take(Swept(self.deletion_age.by_capacity_s, self.used_bytes))
        if swept is None:
            try:
                self.sweep()
            except BaseException:
                self._right.leave()
                raise
            if not self._stopping.is_set():  # a late write might come after a purge of the namespace
                self._right.end(Swept(self.deletion_age.by_capacity_s, self.used_bytes))
        else:
            self._follow(swept)

    def _follow(self, swept: Swept | None) -> None:
        """Take over the result of another process's sweep: its deletion age, and the size of all blocks."""
        if swept is not None:
            self.deletion_age.follow(swept.deleted_s)
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
                if not self._is_old(name):
                    continue
                if self._control.renew(name):
                    self.uses.note_stored(name)
                    self._counters.add("renewed_blocks_total")
                else:
                    self._note_gone(name)
                    self._counters.add("failed_renewals_total")
            except Exception:  # any exception of a library; the block's next use asks again
                self._counters.add("failed_renewals_total")

    def _is_old(self, name: str) -> bool:
        """Return whether the bucket has a block, and the block is old enough to be renewed.

        The bucket is asked only for an age that this process does not know.
        """
        if self.uses.age_s(name) < math.inf:
            return True  # callers of `renew` have compared a known age
        age_s = self._control.age_s(name)
        if age_s is None:
            self._note_gone(name)
            self._counters.add("failed_renewals_total")
            return False
        self.uses.note_age(name, age_s)
        return age_s > self.deletion_age.renewed_s

    def _note_gone(self, name: str) -> None:
        self._presence.note(name, Verdict.ABSENT, time.monotonic())
        self.uses.note_gone(name)

    def _sweep_once(self) -> bool:
        """List and delete once; return whether there may be more to delete.

        A block that this process uses is as old as its last use. The block is renewed, so that the sweeps of other
        processes spare it too.
        """
        listing = _Listing()
        doomed = self._doomed(listing)
        self.deletion_age.note_sweep(listing.size_bytes, listing.oldest_s, doomed[-1].age_s if doomed else None)
        self._renew_used(listing.used, doomed)
        gone, refusals = self._delete(doomed)
        if self._stopping.is_set():
            return False
        self._last_deleted = time.monotonic(), frozenset(each.name for each in gone[:DELETED_AT_ONCE])
        with self._lock:
            self.used_bytes = listing.size_bytes - sum(each.size_bytes for each in gone)
        if refusals:  # the next listing shows which blocks are left
            raise TierError(f"blocks could not be deleted: {', '.join(sorted(refusals))}", operation="delete")
        if listing.kept:
            raise self._control.not_deleted()
        return len(doomed) == CANDIDATES_MAX

    def _doomed(self, listing: _Listing) -> list[Listed]:
        """List all blocks, and return the blocks to delete, the oldest first, at most `CANDIDATES_MAX`."""
        doomed: list[Listed] = []
        doomed_bytes = 0
        for each in heapq.nlargest(CANDIDATES_MAX, self._blocks(listing)):
            if each.age_s <= self._ttl_s and listing.size_bytes - doomed_bytes <= self._capacity_bytes:
                break
            doomed.append(each)
            doomed_bytes += each.size_bytes
        return doomed

    def _blocks(self, listing: _Listing) -> Iterator[Listed]:
        """Yield all blocks, each with its age since its last use, and count them in `listing`."""
        begun_s = time.monotonic()
        ended_s, deleted_last = self._last_deleted
        since_s = begun_s - ended_s + CLOCK_S  # the time since the last sweep ended: a younger block was stored again
        for page in self._control.listed(self._naming.blocks):
            if self._stopping.is_set():
                return
            for entry in page:
                if self._naming.is_block(entry.name):
                    listing.size_bytes += entry.size_bytes
                    listing.kept += entry.name in deleted_last and entry.age_s > since_s
                    unused_s = self.uses.unused_s(entry.name, begun_s)
                    if unused_s < entry.age_s <= self._ttl_s:
                        listing.used.append(entry)
                        entry = entry._replace(age_s=unused_s)
                    listing.oldest_s = max(listing.oldest_s, entry.age_s)
                    yield entry

    def _renew_used(self, used: Sequence[Listed], doomed: Sequence[Listed]) -> None:
        """Renew the oldest used blocks that are old by `capacity`. The next use renews a block that is old by `ttl`."""
        deleted = {each.name for each in doomed}
        for each in sorted(used, reverse=True)[:RENEWALS_MAX]:
            if each.age_s > self.deletion_age.by_capacity_s / 2 and each.name not in deleted:
                self.uses.note_listed(each.name, each.age_s)
                self.renew(each.name)

    def _delete(self, doomed: Sequence[Listed]) -> tuple[list[Listed], set[str]]:
        """Delete blocks until the sweeper is stopped; return the deleted ones, and why others are not."""
        all_gone: list[Listed] = []
        refusals: set[str] = set()
        refused = 0  # requests that the server refused in a row
        for start in range(0, len(doomed), DELETED_AT_ONCE):
            if self._stopping.is_set() or refused == REFUSED_MAX:
                break
            batch = doomed[start : start + DELETED_AT_ONCE]
            found = self._control.delete([each.name for each in batch])
            gone = [each for at, each in enumerate(batch) if at not in found]
            self._counters.add("deleted_blocks_total", count=len(gone))
            for each in gone:
                self._note_gone(each.name)
            all_gone += gone
            refusals.update(found.values())
            refused = 0 if gone else refused + 1
        return all_gone, refusals
