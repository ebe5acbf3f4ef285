"""The tier's background thread: it renews blocks that are used, and keeps `ttl` and `capacity` by a sweep now and then.

A sweep lists the namespace's blocks, of every epoch, and deletes those that are older than `ttl`, and the oldest beyond
`capacity`. Several processes may sweep at once: they find the same blocks the oldest, and a block that is gone already
is no error.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from tiered_kv.errors import TierError
from tiered_kv_s3.control import PAGE_OBJECTS, Control, Listed
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.presence import Presence

CANDIDATES_MAX = 100_000
"""Blocks that one listing can have deleted; it holds so many names in memory. Where more have to go, it lists again."""
RENEWALS_MAX = 1024
"""Blocks that wait to be renewed; further ones are not."""
_JITTER = 0.2


class Sweeper:
    """Runs from the first store or load until it is closed. Any thread may call.

    Args:
        control: Lists, deletes and copies.
        naming: The namespace's names.
        presence: Told of what was deleted.
        counters: Where deletions and failures are counted.
        ttl_s: How old a block may be; None for any age.
        capacity_bytes: What a sweep returns to; None for no limit.
        interval_s: Time between two sweeps, give or take a fifth.
        name: The thread's.
    """

    def __init__(
        self,
        control: Control,
        naming: Naming,
        presence: Presence,
        counters: Counters,
        *,
        ttl_s: float | None,
        capacity_bytes: int | None,
        interval_s: float,
        name: str,
    ) -> None:
        self._control = control
        self._naming = naming
        self._presence = presence
        self._counters = counters
        self._ttl_s = math.inf if ttl_s is None else ttl_s
        self._capacity_bytes = math.inf if capacity_bytes is None else capacity_bytes
        self._interval_s = interval_s
        self._lock = threading.Lock()  # guards the three below
        self._used_bytes = 0
        self._renewals: OrderedDict[str, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._name = name
        self._wake = threading.Event()
        self._is_stopping = False

    @property
    def used_bytes(self) -> int:
        """What blocks take: by the last sweep, and what this process has stored since."""
        return self._used_bytes

    def note_stored(self, size_bytes: int) -> None:
        """Count a block that was stored."""
        with self._lock:
            self._used_bytes += size_bytes
        if self._thread is None and min(self._ttl_s, self._capacity_bytes) < math.inf:
            self._start()

    def renew(self, name: str) -> None:
        """Have a block renewed soon, which has been used past half its time."""
        with self._lock:
            if len(self._renewals) < RENEWALS_MAX:
                self._renewals[name] = None
        self._start()
        self._wake.set()

    def stop(self) -> None:
        """Let the thread end soon; does not wait."""
        with self._lock:
            self._is_stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def sweep(self) -> None:
        """Delete what is too old or too much.

        Raises:
            TierUnavailableError: The server does not list or delete.
        """
        while self._sweep_once():
            pass

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._is_stopping:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread to be had; the next call tries again
                return
            self._thread = thread

    def _run(self) -> None:
        next_sweep_s = time.monotonic() + random.uniform(0, self._interval_s)
        while not self._is_stopping:
            self._wake.wait(max(0.0, next_sweep_s - time.monotonic()))
            self._wake.clear()
            self._renew_all(next_sweep_s)
            if time.monotonic() < next_sweep_s or self._is_stopping:
                continue
            try:
                self.sweep()
            except Exception:  # the thread lives on, whatever a library makes of an answer
                self._counters.add("failed_sweeps_total")
            next_sweep_s = time.monotonic() + self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)

    def _renew_all(self, until_s: float) -> None:
        """Renew what waits; what is left at `until_s` is renewed after the sweep, which must not be put off."""
        while not self._is_stopping:
            with self._lock:
                if not self._renewals:
                    return
                if time.monotonic() >= until_s:
                    self._wake.set()
                    return
                name, _ = self._renewals.popitem(last=False)
            try:
                self._control.renew(name)
                self._counters.add("renewed_blocks_total")
            except Exception:  # it may be gone meanwhile; the next use asks again
                self._counters.add("failed_renewals_total")

    def _sweep_once(self) -> bool:
        """List and delete once; return whether more has to go than one listing can tell."""
        listed_bytes = 0
        oldest: list[tuple[float, str, int]] = []  # a heap of age, name and size, the youngest on top
        for page in self._control.listed(self._naming.blocks):
            if self._is_stopping:
                return False
            for entry in page:
                if self._naming.is_block(entry.name):
                    listed_bytes += entry.size_bytes
                    _keep_if_old(oldest, entry)
        doomed: list[str] = []
        deleted_bytes = 0
        for age_s, name, size_bytes in sorted(oldest, reverse=True):
            if age_s <= self._ttl_s and listed_bytes - deleted_bytes <= self._capacity_bytes:
                break
            doomed.append(name)
            deleted_bytes += size_bytes
        for batch in _batches(doomed):
            if self._is_stopping:
                return False
            self._delete(batch)
        with self._lock:
            self._used_bytes = listed_bytes - deleted_bytes
        return len(doomed) == CANDIDATES_MAX

    def _delete(self, names: list[str]) -> None:
        refusals = self._control.delete([{"Key": name} for name in names])
        if refusals:  # which of them is not worth asking: the next listing tells
            raise TierError(f"blocks could not be deleted: {', '.join(sorted(refusals))}", operation="delete")
        self._counters.add("deleted_blocks_total", count=len(names))
        now_s = time.monotonic()
        for name in names:
            self._presence.note(name, False, now_s)


def _keep_if_old(oldest: list[tuple[float, str, int]], entry: Listed) -> None:
    """Remember the block if it is among the oldest `CANDIDATES_MAX`."""
    item = (entry.age_s, entry.name, entry.size_bytes)
    if len(oldest) < CANDIDATES_MAX:
        heapq.heappush(oldest, item)
    elif item > oldest[0]:
        heapq.heapreplace(oldest, item)


def _batches(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), PAGE_OBJECTS):
        yield names[start : start + PAGE_OBJECTS]
