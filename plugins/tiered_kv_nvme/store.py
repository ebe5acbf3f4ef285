"""The segment store: stores and loads blocks by key in a directory of segments. It knows no jobs.

`NvmeTier` opens it, and calls `contains`, `touch` and `reset` on the scheduler's thread. These do no I/O, and take no
lock that a thread holds across I/O. The toolkit's workers call `store` and `load`. A block that `contains` reports has
been written whole. After a reset, no block from before it is found.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import DEFAULT_TENANT, TenantLimits
from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.key_table import KeyTable
from tiered_kv.system.limits import Need, disk_need
from tiered_kv.system.threads import BackgroundTask
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import PLAIN, CodecSet
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv.toolkit.record import WholeRecords
from tiered_kv_nvme.direct import DirectIO, probe_direct
from tiered_kv_nvme.directory import LOCK_NAME, SegmentDirectory
from tiered_kv_nvme.disk import DirectMemory, Disk, StoreCounters
from tiered_kv_nvme.epoch import EPOCH_NAME, DirectoryEpoch
from tiered_kv_nvme.index import ordinal_of, slot_of
from tiered_kv_nvme.layout import PAGE_BYTES
from tiered_kv_nvme.pool import CHUNK_KEYS, PAUSE_S, SegmentPool
from tiered_kv_nvme.probe import DiskProbe
from tiered_kv_nvme.reader import BlockReader
from tiered_kv_nvme.reclaimer import Reclaimer
from tiered_kv_nvme.recovery import recover
from tiered_kv_nvme.saved_index import save_index
from tiered_kv_nvme.segment import SegmentFiles, SegmentState
from tiered_kv_nvme.sizing import SEGMENTS_MIN, Sizing
from tiered_kv_nvme.tenants import SegmentShares
from tiered_kv_nvme.worth import Worth
from tiered_kv_nvme.writer import BatchWriter

CLOSE_TIMEOUT_S = 5.0  # how long closing waits by default for the reclaimer and for writes of resets
_RETRY_S = 0.1  # after this time a failed write of an epoch is repeated


_log = logging.getLogger("tiered_kv.nvme")

_open_stores: weakref.WeakSet[SegmentStore] = weakref.WeakSet()


def open_segments_max() -> int:
    """Return how many segments the open stores of this process have or may add."""
    return sum(store.segments_max for store in list(_open_stores))


@dataclass(frozen=True, slots=True)
class StoreOptions:
    sizing: Sizing
    want_direct: bool = True  # use O_DIRECT if the file system supports it
    codecs: CodecSet = PLAIN
    threads: int = 8  # how many threads call the store; as many recover the segments
    room_timeout_s: float = 5.0  # how long a store waits for a free segment
    private: bool = True  # refuse a directory that another user controls
    required_mount: str | None = None  # a mount point without which the directory is neither made nor opened
    wants_events: bool = False  # record `events`
    limits: TenantLimits | None = None  # the tenants' shares, if they are given
    is_in_pages: bool = False  # whether all blocks to store, and all destinations of loads, begin on a page


class SegmentStore:
    """Blocks in a directory of segments. Any thread may call every method but `close`.

    Raises `TierBusyError`, `FormatError`, `TierUnavailableError`: see `SegmentDirectory`.
    """

    def __init__(
        self, path: str, identity: Identity, options: StoreOptions, *, tier: str = "nvme", disk: Disk | None = None
    ) -> None:
        disk = disk or Disk()
        self._options = options
        self._old_indexes: deque[KeyTable] = deque()  # from before resets that are not written yet
        self._reset_task = BackgroundTask(self._write_resets, f"tiered-kv-{tier}-reset")
        self.counters = StoreCounters(path)
        self._directory = SegmentDirectory(
            path, identity, tier=tier, private=options.private, required_mount=options.required_mount
        )
        with ExitStack() as undo:
            undo.callback(self._directory.close)
            try:
                self._open(identity, tier, disk, undo)
            except OSError as error:
                raise self._directory.claimed.unavailable(error) from error
            undo.pop_all()
        _open_stores.add(self)

    def _open(self, identity: Identity, tier: str, disk: Disk, undo: ExitStack) -> None:
        """Open everything that uses the directory, and add its release to `undo`."""
        options = self._options
        directory = self._directory
        self._direct = DirectIO(False, "turned off by the setting 'direct'")
        if options.want_direct:
            self._direct = probe_direct(disk, directory.fd, directory.mount, LOCK_NAME)
        self._epoch = DirectoryEpoch(self._directory.fd, private=options.private)
        undo.callback(self._epoch.close)
        sizing = options.sizing
        self._files = SegmentFiles(
            disk,
            self._directory,
            self._direct.is_used,
            self.counters,
            sizing.segment_bytes,
            sizing.capacity_bytes,
            sizing.descriptors_max,
        )
        worth = Worth(sizing.capacity_bytes // identity.block_bytes, sizing.segments_max)
        shares = None if options.limits is None else SegmentShares(options.limits, sizing.capacity_bytes)
        self.pool = SegmentPool(
            identity.digest, self._epoch.value, worth, shares=shares, wants_events=options.wants_events
        )
        self._used_saved_index = recover(self._files, self.pool, threads=options.threads)
        for segment in self.pool.segments.values():
            undo.callback(os.close, segment.fd)
        if self._epoch.is_new and (lost := sum(each.epoch > 0 for each in self.pool.segments.values())):
            about = "tier '%s': the file '%s' was missing or damaged: the blocks of %d segments are lost"
            _log.warning(about, tier, EPOCH_NAME, lost)

        codecs = options.codecs
        memory = DirectMemory(is_direct=self._direct.is_used, is_in_pages=options.is_in_pages)
        probe = DiskProbe(disk, self._files, self.pool)
        self._reader = BlockReader(disk, self.pool, self.counters, identity.block_bytes, codecs, memory, probe)
        self.load = self._reader.load
        gather = (codecs.writes_raw or isinstance(codecs, WholeRecords)) and identity.block_bytes % PAGE_BYTES == 0
        self._writer = BatchWriter(
            disk, self.pool, self.counters, codecs, gather, memory, probe, options.room_timeout_s
        )
        thread_name = f"tiered-kv-{tier}-reclaimer"
        self._reclaimer = Reclaimer(
            self._files, self.pool, self.counters, self._reader, self._writer, probe, self._remake, thread_name
        )
        self._released = False  # whether `close` has released the directory

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether its block can be loaded. Takes no lock."""
        return [place >= 0 for place in self.pool.index.places.get_many(keys)]

    def store(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        epoch: int | None = None,
        deadline: float = math.inf,
        tenant: str = DEFAULT_TENANT,
    ) -> Outcome:
        """Store blocks, except existing ones; see `BatchWriter.store`."""
        if self._old_indexes:  # the reset's background task may have got no thread
            self._reset_task.ask()
        return self._writer.store(keys, blocks, self.pool.epoch if epoch is None else epoch, deadline, tenant)

    def touch(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Note that blocks are used, and return the keys that have no block. Takes no lock."""
        segments, absent = self.pool.segments, []
        for key, place in zip(keys, self.pool.index.places.get_many(keys), strict=True):
            if place < 0:
                absent.append(key)
            elif (segment := segments.get(slot_of(place))) is not None:
                with suppress(IndexError):  # the segment has been reclaimed meanwhile
                    self.pool.worth.use(segment.table, ordinal_of(place))
        return absent

    @property
    def segments_max(self) -> int:
        return self._options.sizing.segments_max

    @property
    def epoch(self) -> int:
        return self.pool.epoch

    @property
    def has_saved_reset(self) -> bool:
        """Whether the directory has the epoch of the last reset."""
        return self._epoch.is_saved

    def reset(self) -> int:
        """Remove every block, and return the new epoch. A background task writes it into the directory.

        Loads in flight fail. The scheduler's thread; no I/O.
        """
        epoch = self._epoch.renew()
        with self.pool.changed:
            self.pool.reset(epoch)
            self._old_indexes.append(self.pool.index.clear())
            self.pool.events.clear()
        self._reset_task.ask()
        return epoch

    def _write_resets(self) -> None:
        """Write and flush the epoch, and give back what the reset hid, in slices; repeat until the store closes."""
        while count := len(self._old_indexes):
            try:
                self._epoch.sync()
            except OSError as error:
                self.counters.note_io_error("writing a reset", error)
                with self.pool.changed:
                    if self.pool.changed.wait_for(lambda: self.pool.closed, _RETRY_S):
                        return
                continue
            for _ in range(count):
                index = self._old_indexes.popleft()
                while index.release(CHUNK_KEYS):
                    time.sleep(PAUSE_S)
            for segment in list(self.pool.segments.values()):
                with self.pool.changed:
                    table = self.pool.take_void_table(segment)
                del table
                time.sleep(PAUSE_S)

    def _remake(self) -> None:
        """Make the directory and its small files again if somebody has deleted them; see `SegmentDirectory.remake`."""
        self._directory.remake()
        self._epoch.remake()

    def stats(self) -> dict[str, Any]:  # Any: see `SecondaryTierManager.stats`
        with self.pool.changed:
            segments, left_out = list(self.pool.segments.values()), self.pool.left_out
        return {
            "blocks": len(self.pool.index.places),
            "used_bytes": sum(segment.segment_bytes for segment in segments),
            "capacity_bytes": self._options.sizing.capacity_bytes,
            "segments": len(segments),
            "free_segments": sum(segment.state is SegmentState.FREE for segment in segments),
            "left_out_segments": left_out,
            "foreign_files": self._directory.foreign_files,
            **self.counters.snapshot(),
            **({} if self.pool.shares is None else self.pool.shares.numbers()),
        }

    def describe(self) -> Mapping[str, object]:
        """Describe the store and its disk. Does I/O."""
        sizing = self._options.sizing
        listing = self._directory.list()
        with self.pool.changed:
            copied, left_out = sum(segment.is_copied for segment in self.pool.segments.values()), self.pool.left_out
        need = disk_need(self._directory.fd, sizing.capacity_bytes, listing.used_bytes)
        if need.available < SEGMENTS_MIN * sizing.segment_bytes:
            need = disk_need(self._directory.fd, sizing.capacity_bytes, listing.used_bytes, "capacity and segment")
        return {
            **self._directory.description,
            "direct_io": self._direct.shown,
            **({"fallocate": "no: zeros are written"} if self._files.disk.writes_zeros else {}),
            **({"copy_on_write": f"{copied} segments, which are replaced when they are reclaimed"} if copied else {}),
            **({"left_out": f"{left_out} segments: the disk refuses writes to a place in each"} if left_out else {}),
            "capacity_bytes": sizing.capacity_bytes,
            "used_bytes": listing.used_bytes,
            "free_bytes": need.available - listing.used_bytes,
            **({"warning": warning} if (warning := self._problem(need)) else {}),
            "segment_bytes": sizing.segment_bytes,
            "segments_max": sizing.segments_max,
            "foreign_files": self._directory.foreign_files,
            "private": self._options.private,
            "codec": self._options.codecs.name,
            "threads": self._options.threads,
            "blocks_found": self.counters["recovered_blocks_total"],
            "index": "as the last end saved it" if self._used_saved_index else "built from the segments",
        }

    def _problem(self, need: Need) -> str:
        mount = self._directory.mount
        locks = mount.lock_problem if mount is not None else None
        return "; ".join(filter(None, (locks, need.problem or self._growth_problem(need))))

    def _growth_problem(self, need: Need) -> str | None:
        """Return why the tier gets no further segment though the disk shows space; None if it gets one."""
        size = format_bytes(self._options.sizing.segment_bytes)
        if self.counters["no_space_errors_total"]:
            free = f"a segment of {size} was refused, and {rounded_bytes(need.available)} seem to be free"
            return f"{free}: a quota is used up, or the disk was full; lower capacity, or raise the quota"
        with self.pool.changed:
            since_s = self.pool.growing_since_s
        if since_s is None or (duration_s := time.monotonic() - since_s) < self._options.room_timeout_s:
            return None
        how = (
            "filled with zeros, as the file system has no fallocate," if self._files.disk.writes_zeros else "allocated"
        )
        return f"a segment of {size} is being {how} for {duration_s:.0f} s; lower segment, or give a faster disk"

    def stop_stores(self) -> None:
        """Let stores that wait for space fail, and refuse new ones; loads continue."""
        with self.pool.changed:
            self.pool.close()

    def close(self, timeout_s: float | None = None, save_until_s: float = math.inf) -> bool:
        """Write the missing summaries and release the directory. Return False if a thread is still busy: call again.

        The index is saved if it has all blocks, and if that takes no longer than until `save_until_s`, by
        `time.monotonic`.

        A segment in which a system call hangs stays open, and the directory stays locked, until a later call or the end
        of the process. So the hanging call cannot change another owner's file.
        """
        if self._released:
            return True
        with self.pool.changed:
            self.pool.close()
        deadline = time.monotonic() + (CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        for join in (self._reclaimer.join, self._reset_task.join):
            if not join(max(0.0, deadline - time.monotonic())):
                with self.pool.changed:
                    self.pool.index.clear()
                return False
        with self.pool.changed:
            places = self.pool.index.clear()
            segments = list(self.pool.segments.values())
            idle = [segment for segment in segments if not segment.readers and not segment.writers]
            for segment in idle:
                self.pool.remove(segment)
        with ExitStack() as release:
            for segment in idle:
                release.callback(os.close, segment.fd)
            for segment in idle:
                is_due = segment.state is SegmentState.FULL and segment.epoch == self.pool.epoch
                if is_due and self._files.seal(segment, self.pool.tenant_names):
                    segment.state = SegmentState.SEALED
        if len(idle) < len(segments):
            return False
        with suppress(MemoryError):  # the next opening builds it
            if not self.pool.hides_blocks:
                save_index(self._files, segments, places, self.pool.epoch, min(deadline, save_until_s))
        self._released = True
        _open_stores.discard(self)
        with ExitStack() as release:
            release.callback(self._directory.close)
            try:
                self._epoch.close()
            except OSError as error:
                self.counters.note_io_error("closing the epoch", error)
        return True
