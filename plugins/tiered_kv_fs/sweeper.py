"""The sweep: it counts the directory (a survey), and removes the least recently used files.

`GrantClient` starts it on a thread of the tier; a store's worker calls `give_way`. The lock `sweep` lets one process
sweep at a time. A sweep deletes only files with the tier's names, and no more than the room takes.
"""

from __future__ import annotations

import heapq
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tiered_kv.metrics.counters import Counters
from tiered_kv.toolkit.claimed import TEMPORARY, walk
from tiered_kv_fs.allocation import UNIT_BYTES_MIN, occupied_bytes, unit_of
from tiered_kv_fs.directory import Directory
from tiered_kv_fs.full_disk import free, removed
from tiered_kv_fs.ledger import LAPSE_S, SURVEY_INTERVAL_S, DirectoryLedger
from tiered_kv_fs.locks import locked
from tiered_kv_fs.names import BLOCK_PATH, EPOCH, NAMESPACE, SWEEP_NAME, TEMPORARY_PATH

_CANDIDATES_MAX: Final = 65_536  # files that one survey keeps as the next to evict; at most about 20 MB
_GIVING_WAY_TIMEOUT_S: Final = 2.0  # how long `give_way` waits while another thread deletes
_EVICTED_AT_ONCE: Final = 256  # files evicted between two changes of the ledger

# Paths below the shared directory.
_BLOCK: Final = re.compile(f"{NAMESPACE.pattern}/{BLOCK_PATH.pattern}")
_TEMPORARY: Final = re.compile(
    f"{NAMESPACE.pattern}/{TEMPORARY_PATH.pattern}|({NAMESPACE.pattern}/)?{TEMPORARY.pattern}"
)
_EPOCH: Final = re.compile(f"{NAMESPACE.pattern}/{EPOCH.pattern}")


class Sweep(Enum):
    """How an attempt to make room ended."""

    DONE = "there is room"
    BUSY = "another process sweeps, or the tier is closing"
    FULL = "too few blocks can be removed"


@dataclass(slots=True)
class _Count:
    """What a survey has found; its thread owns it."""

    used_bytes: int = 0
    unit_bytes: int = UNIT_BYTES_MIN  # the least allocation unit that covers the space of every block
    oldest: list[tuple[int, str, int]] = field(default_factory=list)
    """The oldest blocks, a heap with the newest first: negated time of last use, path, size."""
    temporaries: list[tuple[str, str | None, os.stat_result]] = field(default_factory=list)
    """Unfinished files: path, writer (known for blocks), status."""
    epochs: list[str] = field(default_factory=list)  # paths of their directories


@dataclass(eq=False)
class DirectorySweeper:
    """Makes room in a directory, which may occupy `capacity_bytes`. One thread at a time calls, except `give_way`."""

    directory: Directory
    ledger: DirectoryLedger
    capacity_bytes: int
    counters: Counters
    on_age: Callable[[float], None] = lambda age_s: None
    """Called before files are removed, with the age in seconds of the oldest block."""

    def __post_init__(self) -> None:
        self._root = self.directory.path
        self._candidates: deque[tuple[int, str, int]] = deque()
        """The next blocks to evict, in the form of `_Count.oldest`; the oldest block comes first."""
        self._candidates_until_s = 0.0
        """When `_candidates` are too old to be used, in seconds of `time.monotonic`."""
        self._spared: list[tuple[int, str, int]] = []  # candidates that were used since they were listed
        self.survey_s = 0.0
        """How long the last survey took. Any thread may read it."""
        self._is_stopped = threading.Event()
        self._giving_way = threading.Lock()

    def stop(self) -> None:
        """Let a running sweep end early. Any thread."""
        self._is_stopped.set()

    def make_room(self, wanted_bytes: int) -> Sweep:
        """Remove files until `wanted_bytes` more fit into the capacity; survey first if that is due.

        Raises `OSError`: the file system refuses.
        """
        with ExitStack() as held:
            try:
                held.enter_context(locked(f"{self._root}/{SWEEP_NAME}", 0.0))
            except TimeoutError:
                return Sweep.BUSY
            has_surveyed, spares_used = False, True
            missing_bytes = self._missing_bytes(wanted_bytes)
            if time.monotonic() >= self._candidates_until_s:  # the candidates are old, and may be gone
                self._candidates.clear()
            while missing_bytes is None or missing_bytes > 0:
                if self._is_stopped.is_set():
                    return Sweep.BUSY
                if missing_bytes is None or not self._candidates:
                    if not has_surveyed:
                        has_surveyed = True
                        if not self._survey():
                            return Sweep.BUSY
                    elif missing_bytes is None:  # the ledger was lost, or written over, since the survey
                        return Sweep.BUSY
                    elif not self._spared:  # a second survey would find no more
                        return Sweep.FULL
                    else:  # all are in use: the least recently used ones must go
                        self._candidates, self._spared = deque(sorted(self._spared, reverse=True)), []
                        spares_used = False
                else:
                    if spares_used:  # otherwise uses that were written for this sweep would make all blocks look young
                        self.on_age(time.time() + self._candidates[0][0] / 1e9)
                    self._evict(missing_bytes, spares_used)
                missing_bytes = self._missing_bytes(wanted_bytes)
            return Sweep.DONE

    def give_way(self, wanted_bytes: int, wanted_files: int, attempt: int) -> bool:
        """Delete old blocks for a store on a full disk; return whether to try again. Several threads may call.

        While another process sweeps, the ledger's total is not lowered, and is too large until the next survey.
        """
        if not self._giving_way.acquire(timeout=_GIVING_WAY_TIMEOUT_S):
            return False
        try:
            with ExitStack() as held:
                is_alone = True
                try:
                    held.enter_context(locked(f"{self._root}/{SWEEP_NAME}", 0.0))
                except OSError:
                    is_alone = False
                freed = free(self._root, wanted_bytes, wanted_files, attempt)
                self.counters.add("evicted_blocks_total", count=freed.files)
                if is_alone and freed:
                    with suppress(OSError), self.ledger.locked() as state:
                        state.take_off(freed.size_bytes)
        finally:
            self._giving_way.release()
        return bool(freed)

    def _missing_bytes(self, wanted_bytes: int) -> int | None:
        """Return how many bytes to remove so that `wanted_bytes` fit; None if a survey is needed first."""
        with self.ledger.locked() as state:
            if state.total_bytes is None or state.is_survey_due:
                return None
            return max(0, state.total_bytes + wanted_bytes - self.capacity_bytes)

    def _survey(self) -> bool:
        """Count the directory and correct the ledger; return False if the tier is closing or another survey has begun.

        Stores during the count fill pending grants. So the count plus these grants covers all bytes that exist at the
        end, or that may still be written. If the ledger was lost meanwhile, it has no name of this survey, and the next
        survey finds the total. Where locks do not exclude other processes, two surveys may run at once.
        """
        begin_s, word = time.monotonic(), secrets.token_hex(8)
        unit_bytes = self.directory.allocation.unit_bytes
        with self.ledger.locked() as state:
            state.survey = word
            state.pending_bytes = sum(holder.granted_bytes for holder in state.holders.values())
            used = {f"{holder.namespace}/{holder.epoch}" for holder in state.holders.values()}
            now_s = state.now_s
        found = self._count(unit_bytes)
        if found is None:
            return False
        for path, owner, status in found.temporaries:
            is_abandoned = owner not in state.holders and now_s - status.st_mtime > LAPSE_S
            if is_abandoned and removed(f"{self._root}/{path}", self._root):
                found.used_bytes -= occupied_bytes(status, unit_bytes)
        with self.ledger.locked() as state:
            if state.survey != word:
                return False
            state.total_bytes = found.used_bytes + state.pending_bytes
            state.surveyed_s = state.now_s
            if found.oldest:  # if there is no block, the unit is not known
                state.unit_bytes = found.unit_bytes
        self._candidates = deque(sorted(found.oldest, reverse=True))
        self._candidates_until_s = time.monotonic() + SURVEY_INTERVAL_S
        self._spared.clear()
        self.survey_s = time.monotonic() - begin_s
        self.counters.add("surveys_total")
        self._remove_empty(epoch for epoch in found.epochs if epoch not in used)
        return True

    def _count(self, unit_bytes: int) -> _Count | None:
        """Walk the directory; return None if that was stopped."""
        found = _Count(occupied_bytes(os.lstat(self._root)))
        for files in walk(self._root):
            for path, status in files:
                size_bytes = occupied_bytes(status, unit_bytes)
                found.used_bytes += size_bytes
                if stat.S_ISREG(status.st_mode) and _BLOCK.fullmatch(path):
                    is_allocated = status.st_blocks * 512 >= status.st_size  # if not, the unit is unknown
                    found.unit_bytes = unit_of(status, max(found.unit_bytes, 0 if is_allocated else unit_bytes))
                    entry = (-status.st_mtime_ns, path, size_bytes)
                    if len(found.oldest) < _CANDIDATES_MAX:
                        heapq.heappush(found.oldest, entry)
                    else:
                        heapq.heappushpop(found.oldest, entry)
                elif stat.S_ISREG(status.st_mode) and (match := _TEMPORARY.fullmatch(path)):
                    found.temporaries.append((path, match["owner"], status))
                elif _EPOCH.fullmatch(path) and stat.S_ISDIR(status.st_mode):
                    found.epochs.append(path)
            if self._is_stopped.is_set():
                return None
        return found

    def _evict(self, wanted_bytes: int, spares_used: bool) -> None:
        """Remove some of the oldest files. With `spares_used`, keep files that were used after the listing."""
        removed_bytes = removed_files = 0
        try:
            for _ in range(_EVICTED_AT_ONCE):
                if removed_bytes >= wanted_bytes or not self._candidates:
                    break
                negated_ns, path, size_bytes = self._candidates.popleft()
                with suppress(OSError):  # gone, or its status cannot be read
                    used_ns = os.lstat(f"{self._root}/{path}").st_mtime_ns
                    if spares_used and used_ns != -negated_ns:
                        self._spared.append((-used_ns, path, size_bytes))
                    elif removed(f"{self._root}/{path}", self._root):
                        removed_bytes += size_bytes
                        removed_files += 1
        finally:
            self.counters.add("evicted_blocks_total", count=removed_files)
            with self.ledger.locked() as state:
                state.take_off(removed_bytes)

    def _remove_empty(self, epochs: Iterable[str]) -> None:
        """Remove empty directories of epochs. A process that has just joined an epoch makes its directories again."""
        for epoch in epochs:
            path = f"{self._root}/{epoch}"
            with suppress(OSError):  # the directory is not empty, or has been removed
                for shard in os.listdir(path):
                    os.rmdir(f"{path}/{shard}")
                os.rmdir(path)
