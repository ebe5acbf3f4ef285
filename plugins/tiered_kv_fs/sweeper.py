"""The sweep: one process at a time counts the directory, and removes the files that were used longest ago."""

from __future__ import annotations

import heapq
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tiered_kv.counters import Counters
from tiered_kv.errors import FormatError
from tiered_kv.toolkit.claimed import TEMPORARY, walk
from tiered_kv.toolkit.epoch import MARK_BYTES_MAX, EpochMark
from tiered_kv.toolkit.small_files import read_file, remove
from tiered_kv_fs.directory import Directory
from tiered_kv_fs.files import locked, occupied_bytes
from tiered_kv_fs.layout import BLOCK, EPOCH, EPOCH_NAME, NAMESPACE, SHARD, SWEEP_NAME, TEMPORARY_BLOCK
from tiered_kv_fs.ledger import LAPSE_S, Ledger, LedgerState

SURVEY_INTERVAL_S: Final = 600.0
"""One of the processes that share the directory counts it at least this often."""
_CANDIDATES_MAX: Final = 65_536
"""Files that one survey keeps as the next to evict; at most about 20 MB."""
_EVICTED_AT_ONCE: Final = 256
"""The time between two changes of the ledger."""

_SHARD_PATH: Final = rf"(?P<epoch>{NAMESPACE.pattern}/{EPOCH.pattern})/{SHARD.pattern}"
_BLOCK_PATH: Final = re.compile(rf"{_SHARD_PATH}/{BLOCK.pattern}")
_TEMPORARY_PATH: Final = re.compile(
    rf"{_SHARD_PATH}/{TEMPORARY_BLOCK.pattern}|({NAMESPACE.pattern}/)?{TEMPORARY.pattern}"
)
_EPOCH_PATH: Final = re.compile(rf"(?P<namespace>{NAMESPACE.pattern})/(?P<epoch>{EPOCH.pattern})")


class Sweep(Enum):
    """How an attempt to make room ended."""

    DONE = "there is room"
    BUSY = "another process is at it"
    FULL = "what can be removed is not enough"


@dataclass(slots=True)
class _Survey:
    """The result of a survey: total bytes, the oldest blocks, unfinished files, directories of epochs.

    `oldest` is a heap of (negated time of last use, path, size, time of last change), the newest first.
    """

    used_bytes: int = 0
    oldest: list[tuple[int, str, int, int]] = field(default_factory=list)
    temporaries: list[tuple[str, os.stat_result]] = field(default_factory=list)
    epochs: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Sweeper:
    """Makes room in a directory, which may occupy `capacity_bytes`. One thread at a time."""

    directory: Directory
    ledger: Ledger
    capacity_bytes: int
    counters: Counters

    def __post_init__(self) -> None:
        self._root = self.directory.path
        self._candidates: deque[tuple[str, int, int]] = deque()  # path, size and time of last change, oldest use first
        self._candidates_until_s = 0.0
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Let a running sweep end soon, without a result; any thread."""
        self._is_stopped.set()

    def make_room(self, wanted_bytes: int) -> Sweep:
        """Remove files until `wanted_bytes` more fit into the capacity; survey first if that is due.

        Raises:
            OSError: The file system refuses.
        """
        with ExitStack() as held:
            try:
                held.enter_context(locked(f"{self._root}/{SWEEP_NAME}", 0.0))
            except TimeoutError:
                return Sweep.BUSY
            has_surveyed = False
            missing_bytes = self._missing_bytes(wanted_bytes)
            if time.monotonic() >= self._candidates_until_s:
                self._candidates.clear()
            while missing_bytes is None or missing_bytes > 0:
                if self._is_stopped.is_set():
                    return Sweep.BUSY
                if missing_bytes is None or not self._candidates:
                    if has_surveyed:  # a second survey would find no more
                        return Sweep.FULL
                    has_surveyed = True
                    self._survey()
                else:
                    self._evict(missing_bytes)
                missing_bytes = self._missing_bytes(wanted_bytes)
            return Sweep.DONE

    def _missing_bytes(self, wanted_bytes: int) -> int | None:
        """Return how many bytes to remove so that `wanted_bytes` fit; None if a survey is needed first."""
        with self.ledger.locked() as state:
            if state.total_bytes is None or is_survey_due(state):
                return None
            return max(0, state.total_bytes + wanted_bytes - self.capacity_bytes)

    def _survey(self) -> None:
        """Count the directory and correct the ledger.

        Writes during the count use pending grants. So the count plus those grants is at least the bytes that exist,
        or may be written, at the end. If the ledger was lost meanwhile, it does not know this survey,
        and the next one finds the total.
        """
        word = secrets.token_hex(8)
        with self.ledger.locked() as state:
            state.survey = word
            state.pending_bytes = sum(holder.granted_bytes for holder in state.holders.values())
            live = {f"{holder.namespace}/{holder.epoch}" for holder in state.holders.values()}
            now_s = state.now_s
        found = self._count(live)
        if found is None:
            return
        for path, status in found.temporaries:
            match = _TEMPORARY_PATH.fullmatch(path)
            assert match is not None, "it was found by this pattern"
            is_left = match["owner"] not in state.holders and now_s - status.st_mtime > LAPSE_S
            if is_left and remove(f"{self._root}/{path}"):
                found.used_bytes -= occupied_bytes(status)
        with self.ledger.locked() as state:
            if state.survey != word:
                return
            state.total_bytes = found.used_bytes + state.pending_bytes
            state.surveyed_s = state.now_s
        self._candidates = deque((path, size, changed) for _, path, size, changed in sorted(found.oldest, reverse=True))
        self._candidates_until_s = time.monotonic() + SURVEY_INTERVAL_S
        self.counters.add("surveys_total")
        self._remove_dead_epochs(found.epochs, live)

    def _count(self, live: set[str]) -> _Survey | None:
        """Look at everything; return None if that was stopped."""
        found = _Survey(occupied_bytes(os.lstat(self._root)))
        for files in walk(self._root):
            for path, status in files:
                found.used_bytes += occupied_bytes(status)
                if stat.S_ISREG(status.st_mode):
                    self._note_file(path, status, live, found)
                elif _EPOCH_PATH.fullmatch(path) and stat.S_ISDIR(status.st_mode):
                    found.epochs.append(path)
                    self._note_live(path, live)
            if self._is_stopped.is_set():
                return None
        return found

    def _note_file(self, path: str, status: os.stat_result, live: set[str], found: _Survey) -> None:
        if match := _BLOCK_PATH.fullmatch(path):
            used_ns = status.st_mtime_ns if match["epoch"] in live else 0
            entry = (-used_ns, path, occupied_bytes(status), status.st_mtime_ns)
            if len(found.oldest) < _CANDIDATES_MAX:
                heapq.heappush(found.oldest, entry)
            elif entry > found.oldest[0]:
                heapq.heapreplace(found.oldest, entry)
        elif _TEMPORARY_PATH.fullmatch(path):
            found.temporaries.append((path, status))

    def _note_live(self, epoch_path: str, live: set[str]) -> None:
        """Add the epoch of a namespace's mark; if the mark cannot be read, add all epochs of that namespace."""
        namespace, _, epoch = epoch_path.partition("/")
        try:
            data = read_file(f"{self._root}/{namespace}/{EPOCH_NAME}", MARK_BYTES_MAX)
            mark = EpochMark.decode(data) if data is not None else None
        except (OSError, FormatError):
            live.add(epoch_path)
            return
        if mark is not None and mark.value == epoch:
            live.add(epoch_path)

    def _evict(self, wanted_bytes: int) -> None:
        """Remove some of the oldest files that were not used since they were listed."""
        removed_bytes = removed_files = 0
        try:
            for _ in range(_EVICTED_AT_ONCE):
                if removed_bytes >= wanted_bytes or not self._candidates:
                    break
                path, size_bytes, changed_ns = self._candidates.popleft()
                path = f"{self._root}/{path}"
                with suppress(FileNotFoundError, NotADirectoryError):
                    if os.lstat(path).st_mtime_ns == changed_ns:
                        os.unlink(path)
                        removed_bytes += size_bytes
                        removed_files += 1
        finally:
            self.counters.add("evicted_blocks_total", count=removed_files)
            with self.ledger.locked() as state:
                state.take_off(removed_bytes)

    def _remove_dead_epochs(self, epochs: list[str], live: set[str]) -> None:
        """Remove empty directories of epochs that no process uses."""
        for epoch in epochs:
            if epoch not in live:
                path = f"{self._root}/{epoch}"
                with suppress(OSError):  # not empty, or gone
                    for shard in os.listdir(path):
                        os.rmdir(f"{path}/{shard}")
                    os.rmdir(path)


def is_survey_due(state: LedgerState) -> bool:
    """Return whether a survey is due; the file server's clock may have been set back."""
    return not 0 <= state.now_s - state.surveyed_s < SURVEY_INTERVAL_S
