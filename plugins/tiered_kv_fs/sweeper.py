"""Making room: one process at a time counts the directory and removes what was used longest ago."""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from contextlib import suppress
from enum import Enum
from typing import Final

from tiered_kv.permissions import check_file
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.epochs import read_epoch
from tiered_kv_fs.layout import EPOCH, NAMESPACE, SHARD, temporary_name
from tiered_kv_fs.ledger import Share
from tiered_kv_fs.posix import (
    directories,
    occupied_bytes,
    opened,
    opened_above,
    opened_directory,
    remove,
    take_away,
    try_lock,
    unlock,
)
from tiered_kv_fs.survey import Candidate, Survey, namespace_of, survey
from tiered_kv_fs.volume import Volume

TEMPORARY_AGE_MAX_S: Final = 3600.0
"""A file that has been in writing for so long, by the server's clock, is a leftover even if its owner lives."""

_SMALL_FILES_BYTES: Final = 64 << 10
"""Counted for small files that are being replaced while the directory is counted."""
_EVICTED_AT_ONCE: Final = 64
_COUNTED_FOR_S: Final = 600.0
"""A list of the oldest files is not used for longer: others will have become the oldest."""


class Sweep(Enum):
    """How an attempt to make room ended."""

    DONE = "done"
    """There is as much room as was wanted."""
    BUSY = "busy"
    """Another process is at it; look again soon."""
    FULL = "full"
    """All that may go is gone, and it was not enough."""


class Sweeper:
    """Counts and evicts. One thread.

    Removed files are taken off the ledger's total only if nobody has counted since they were there: the lock's file may
    be removed, and another's count be made. So no file that a count has not seen any more is taken off a second time.

    Args:
        volume: The directory.
        capacity_bytes: What it may occupy.
        quota_bytes: What the volume's namespace may occupy of it; None for all.
        unknown_grant_bytes: What to assume of a living owner that the ledger does not know.
        counters: Where to count.
    """

    def __init__(
        self,
        volume: Volume,
        capacity_bytes: int,
        quota_bytes: int | None,
        unknown_grant_bytes: int,
        counters: Counters,
    ) -> None:
        self.foreign_files = 0
        self.block_files = 0
        self._volume = volume
        self._capacity_bytes = capacity_bytes
        self._quota_bytes = quota_bytes
        self._unknown_grant_bytes = unknown_grant_bytes
        self._counters = counters
        self._candidates: deque[Candidate] = deque()
        self._own_candidates: deque[Candidate] = deque()  # of the namespace, where it has a quota
        self._candidates_until_s = 0.0
        self._count_seen = ""  # of the ledger, when it was looked at last

    def make_room(self, wanted_bytes: int, *, must_count: bool = False) -> Sweep:
        """Remove files until `wanted_bytes` more fit into the capacity, and into the namespace's quota.

        Args:
            wanted_bytes: How much.
            must_count: Count first, whatever the ledger says.

        Raises:
            OSError: The file system does not let us.
        """
        with opened(self._volume.sweep_path, os.O_RDWR | os.O_CREAT) as sweep_fd:
            check_file(sweep_fd, self._volume.sweep_path, any_owner=True)
            if not try_lock(sweep_fd):
                return Sweep.BUSY
            try:
                return self._make_room(sweep_fd, wanted_bytes, must_count)
            finally:
                unlock(sweep_fd)

    def _make_room(self, sweep_fd: int, wanted_bytes: int, must_count: bool) -> Sweep:
        """Do so, as the one process that holds the lock of the file at `sweep_fd`."""
        missing = self._missing_bytes(wanted_bytes)
        if must_count or missing is None:
            self._count(sweep_fd)
            missing = self._missing_bytes(wanted_bytes)
            must_count = True
        if time.monotonic() >= self._candidates_until_s:
            self._candidates.clear()
            self._own_candidates.clear()
        while missing is not None and any(missing):
            own_bytes, all_bytes = missing  # what the namespace gives makes room in the directory too
            candidates = self._own_candidates if own_bytes else self._candidates
            if not candidates:
                if must_count:  # what has been counted a moment ago has nothing more to give
                    return Sweep.FULL
                must_count = True
                self._count(sweep_fd)
            else:
                self._evict(candidates, own_bytes or all_bytes)
            missing = self._missing_bytes(wanted_bytes)
        return Sweep.DONE

    def _missing_bytes(self, wanted_bytes: int) -> tuple[int, int] | None:
        """Return how much has to go so that `wanted_bytes` fit: of the namespace, and of whatever is there.

        None if the total, or with a quota the namespace's share of it, is not known.
        """
        with self._volume.ledger.locked() as state:
            self._count_seen = state.count
            if state.total_bytes is None:
                return None
            own_bytes = 0
            if self._quota_bytes is not None:
                share_bytes = state.share_bytes(self._volume.namespace)
                if share_bytes is None:
                    return None
                own_bytes = share_bytes + wanted_bytes - self._quota_bytes
            return max(0, own_bytes), max(0, state.total_bytes + wanted_bytes - self._capacity_bytes)

    def _count(self, sweep_fd: int) -> None:
        """Count the directory and write the total.

        Let F be the files there now, and G all grants now, plus those given while we count. Whatever is written
        meanwhile comes out of G. So F + G is at least what there is, and what may come, at the end; a file that is
        written and counted meanwhile is in both, until the next count. So it is for each namespace that has owners.

        If the ledger was lost meanwhile, what was given cannot be told: then nothing is written, and the new ledger,
        which knows no total, has somebody count again. If it knew none before, nothing was given. Releases that know
        of no count leave the word out when they write; a ledger without it that knows a total was not lost.
        """
        ledger = self._volume.ledger
        with ledger.locked() as state:
            count = state.mark_count()
            was_known = state.total_bytes is not None
            alive = self._volume.reap(state)
            grants_by: defaultdict[str, int] = defaultdict(int)
            for note in alive:
                grants_by[note.namespace] += state.grants.get(note.name, self._unknown_grant_bytes)
            granted_before = state.granted_bytes
            granted_by_before = {name: share.granted_bytes for name, share in state.shares.items()}
        live_epochs = {(note.namespace, note.epoch) for note in alive} | self._joined_epochs()
        own_namespace = "" if self._quota_bytes is None else self._volume.namespace
        found = survey(self._volume.path, live_epochs, own_namespace=own_namespace)
        # One that has joined meanwhile may have written, too.
        self._remove_leftovers(found, {note.name for note in alive} | self._volume.owner_names(), sweep_fd)
        with ledger.locked() as state:
            if state.count not in (count, "") or was_known != (state.total_bytes is not None):
                return
            state.mark_count()
            if not was_known:
                granted_before = state.granted_bytes
                granted_by_before = {name: share.granted_bytes for name, share in state.shares.items()}
            granted_bytes = sum(grants_by.values()) + state.granted_bytes - granted_before
            state.total_bytes = found.used_bytes + granted_bytes + _SMALL_FILES_BYTES
            for name in grants_by.keys() - state.shares.keys() - {""}:
                state.shares[name] = Share()
            for name, share in list(state.shares.items()):
                newly_granted_bytes = share.granted_bytes - granted_by_before.get(name, 0)
                if name not in grants_by and not newly_granted_bytes:  # nobody there: its next owner has it counted
                    del state.shares[name]
                    continue
                granted_bytes = grants_by[name] + newly_granted_bytes
                share.total_bytes = found.used_by[name] + granted_bytes + _SMALL_FILES_BYTES
            state.counted_at_s = time.time()
        self._candidates = deque(found.candidates)
        self._own_candidates = deque(found.own_candidates)
        self._candidates_until_s = time.monotonic() + _COUNTED_FOR_S
        self.foreign_files = found.foreign_files
        self.block_files = found.block_files
        self._counters.add("sweeps")
        if not found.candidates or found.candidates[0].used_ns:
            self._remove_empty_epochs(live_epochs)

    def _joined_epochs(self) -> set[tuple[str, str]]:
        joined = set()
        for path in directories(self._volume.path, NAMESPACE):
            try:
                with opened_directory(path) as namespace_fd:
                    epoch = read_epoch(namespace_fd)
            except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone, or a link; or somebody else's
                continue
            if epoch is not None:
                joined.add((path.rsplit("/", 1)[1], epoch))
        return joined

    def _remove_leftovers(self, found: Survey, alive: set[str], sweep_fd: int) -> None:
        """Remove files whose writers have ended, or gave up long ago, and take them off what was found."""
        os.utime(sweep_fd)
        now_ns = os.fstat(sweep_fd).st_mtime_ns  # by the server's clock, as the files' times are
        for leftover in found.temporaries:
            is_old = now_ns - leftover.mtime_ns > TEMPORARY_AGE_MAX_S * 1e9
            has_ended = leftover.owner and leftover.owner not in alive
            if (is_old or has_ended) and self._remove(leftover.path):
                found.used_bytes -= leftover.size_bytes
                found.used_by[namespace_of(leftover.path, self._volume.path)] -= leftover.size_bytes
                self._counters.add("removed_temporaries")

    def _evict(self, candidates: deque[Candidate], wanted_bytes: int) -> None:
        """Remove some of the oldest files that were not used since they were listed."""
        removed_by: defaultdict[str, int] = defaultdict(int)
        removed_bytes = removed_files = 0
        try:
            for _ in range(_EVICTED_AT_ONCE):
                if removed_bytes >= wanted_bytes or not candidates:
                    break
                candidate = candidates.popleft()
                taken = self._take_away(candidate)
                if taken is not None:  # not what was listed, if it has just been replaced
                    size_bytes = occupied_bytes(taken)
                    removed_by[namespace_of(candidate.path, self._volume.path)] += size_bytes
                    removed_bytes += size_bytes
                    removed_files += 1
        finally:
            self._counters.add("evicted_files", removed_files)
            with self._volume.ledger.locked() as state:
                if state.count in (self._count_seen, ""):  # releases that know of no count leave the word out
                    for namespace, size_bytes in removed_by.items():
                        state.take_off(size_bytes, namespace)

    def _take_away(self, candidate: Candidate) -> os.stat_result | None:
        """Remove a file unless it was used since it was listed; return what it was, None if it is not removed."""
        try:
            with opened_above(candidate.path, self._volume.path) as (shard_fd, name):
                if os.stat(name, dir_fd=shard_fd, follow_symlinks=False).st_mtime_ns != candidate.mtime_ns:
                    return None
                return take_away(name, temporary_name(name, self._volume.owner.name), shard_fd)
        except (FileNotFoundError, NotADirectoryError):  # gone, or a link has taken a directory's place
            return None

    def _remove_empty_epochs(self, live_epochs: set[tuple[str, str]]) -> None:
        """Remove the directories of epochs that nobody asks for and that have no files any more."""
        for namespace_path in directories(self._volume.path, NAMESPACE):
            with suppress(PermissionError):  # somebody else's
                for path in directories(namespace_path, EPOCH):
                    namespace, epoch = path.rsplit("/", 2)[1:]
                    if (namespace, epoch) not in live_epochs:
                        for shard_path in directories(path, SHARD):
                            self._remove_directory(shard_path)
                        self._remove_directory(path)

    def _remove(self, path: str) -> bool:
        try:
            with opened_above(path, self._volume.path) as (above_fd, name):
                return remove(name, above_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _remove_directory(self, path: str) -> None:
        with suppress(OSError), opened_above(path, self._volume.path) as (above_fd, name):  # not empty, or gone
            os.rmdir(name, dir_fd=above_fd)
