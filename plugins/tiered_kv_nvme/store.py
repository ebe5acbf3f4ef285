"""The segment store: the engine of the nvme tier. It handles blocks and keys, not jobs."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tiered_kv.base import OffloadKey
from tiered_kv.config.units import rounded_bytes
from tiered_kv.counters import Counters
from tiered_kv.errors import TierUnavailableError
from tiered_kv.toolkit.background import BackgroundTask
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import PLAIN, CodecSet
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv_nvme.counters import COUNTERS, COUNTERS_BY_LABEL
from tiered_kv_nvme.directory import Directory
from tiered_kv_nvme.disk import Disk, refusal_of_direct
from tiered_kv_nvme.epoch import DirectoryEpoch
from tiered_kv_nvme.files import SegmentFiles
from tiered_kv_nvme.index import ordinal_of, slot_of, take_apart
from tiered_kv_nvme.layout import PAGE_BYTES
from tiered_kv_nvme.pool import SegmentPool
from tiered_kv_nvme.reader import BlockReader
from tiered_kv_nvme.reclaimer import Reclaimer
from tiered_kv_nvme.recovery import recover
from tiered_kv_nvme.segment import SegmentState
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.worth import Worth
from tiered_kv_nvme.writer import BatchWriter

FREE_SEGMENTS = 2
"""Free segments: one for stores, one for the reclaimer's moves."""
RETRY_S = 0.1
"""The time after which a failed write of an epoch is repeated."""
CLOSE_TIMEOUT_S = 5.0
"""How long closing waits by default for the reclaimer and for writes of resets."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """A store's options; its `Identity` describes its blocks."""

    sizing: Sizing
    aligned: bool = True  # whether passed blocks begin on page boundaries; those that do not are tried in vain first
    want_direct: bool = True  # whether to use O_DIRECT if the file system supports it
    codecs: CodecSet = PLAIN
    threads: int = 8  # how many threads will call; as many read the directory when it is opened
    room_timeout_s: float = 5.0  # how long a store waits for a free segment
    wants_events: bool = False  # whether somebody takes the store's `events`


class SegmentStore:
    """Blocks in a directory of segments, made if it is missing. Every method but `close` may be called by any thread.

    Raises:
        TierBusyError, FormatError, TierUnavailableError: As `Directory`.
    """

    def __init__(
        self, path: str, identity: Identity, options: StoreOptions, *, tier: str = "nvme", disk: Disk | None = None
    ) -> None:
        disk = disk or Disk()
        self._options = options
        self._name = f"tiered-kv-{tier}"
        self._forgotten: deque[dict[OffloadKey, int]] = deque()  # the indexes from before resets
        self._noting = BackgroundTask(self._note_reset, f"{self._name}-reset")
        self.counters = Counters(COUNTERS, COUNTERS_BY_LABEL)
        self._directory = Directory(path, identity, tier=tier)
        with ExitStack() as undo:
            undo.callback(self._directory.close)
            self._open(path, identity, tier, disk, undo)
            undo.pop_all()

    def _open(self, path: str, identity: Identity, tier: str, disk: Disk, undo: ExitStack) -> None:
        """Make all parts that use the directory; `undo` then holds their release."""
        options = self._options
        try:
            self.not_direct = "turned off by the setting 'direct'"
            """Why segments are not opened for direct I/O; empty if they are."""
            if options.want_direct:
                self.not_direct = refusal_of_direct(disk, self._directory.fd)
            self._epoch = DirectoryEpoch(self._directory.fd)
        except OSError as error:
            raise self._directory.claimed.unavailable(error) from error
        undo.callback(self._epoch.close)
        sizing = options.sizing
        self._files = SegmentFiles(
            disk, self._directory, not self.not_direct, self.counters, sizing.segment_bytes, sizing.capacity_bytes
        )
        worth = Worth(sizing.capacity_bytes // identity.block_bytes, sizing.segments_max)
        self._pool = SegmentPool(
            identity.digest, self._epoch.value, FREE_SEGMENTS, worth, wants_events=options.wants_events
        )
        self.index = self._pool.index
        self.events = self._pool.events
        try:
            recover(self._files, self._pool, threads=options.threads)
        except OSError as error:
            raise TierUnavailableError(
                f"a segment in {path} cannot be opened: {error.strerror}", tier=tier, operation="open"
            ) from error

        for segment in self._pool.segments.values():
            undo.callback(os.close, segment.fd)

        # Memory that is not aligned, or payloads that are not whole pages, go through a buffer.
        whole_pages = identity.block_bytes % PAGE_BYTES == 0
        straight = whole_pages and (options.aligned or bool(self.not_direct))
        codecs = options.codecs
        self._reader = BlockReader(disk, self._pool, self.counters, identity.block_bytes, codecs, scatter=straight)
        gather = straight and codecs.writes_raw
        self._writer = BatchWriter(disk, self._pool, self.counters, codecs, gather, options.room_timeout_s)
        self._reclaimer = Reclaimer(
            self._files, self._pool, self.counters, self._reader, self._writer, name=f"{self._name}-reclaimer"
        )
        self._released = False

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether its block can be loaded. Takes no lock."""
        places = self.index.places
        return [key in places for key in keys]

    def store(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        epoch: int | None = None,
        deadline: float = math.inf,
    ) -> Outcome:
        """Store blocks, leaving out those that are here; see `BatchWriter.store`."""
        if self._forgotten:  # there may have been no thread for the reset
            self._noting.ask()
        return self._writer.store(keys, blocks, self._pool.epoch if epoch is None else epoch, deadline)

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float = math.inf) -> Outcome:
        """Load blocks into `blocks`; see `BlockReader.load`."""
        return self._reader.load(keys, blocks, deadline)

    def touch(self, keys: Collection[OffloadKey]) -> None:
        """Note that blocks are used, so that they outlive their segment. Takes no lock."""
        places, segments = self.index.places, self._pool.segments
        for key in keys:
            place = places.get(key)
            segment = segments.get(slot_of(place)) if place is not None else None
            if segment is not None and place is not None:
                try:
                    self._pool.worth.use(segment.table, ordinal_of(place))
                except IndexError:
                    pass  # its segment was used again a moment ago

    @property
    def epoch(self) -> int:
        """The epoch: it separates valid blocks from those that were stored before a reset."""
        return self._pool.epoch

    def reset(self) -> int:
        """Forget every block, and return the new epoch, which a thread of its own writes into the directory.

        A block that is being loaded is reported as failed. The scheduler's thread; no I/O.
        """
        epoch = self._epoch.renew()
        with self._pool.changed:
            self._pool.reset(epoch)
            self._forgotten.append(self.index.clear())
            self.events.clear()
        self._noting.ask()
        return epoch

    def _note_reset(self) -> None:
        """Write the epoch, flush it, and clear the old index; repeat until that succeeds or the store closes."""
        while count := len(self._forgotten):
            try:
                self._epoch.sync()
            except OSError:
                self.counters.add("io_errors_total")
                with self._pool.changed:
                    if self._pool.changed.wait_for(lambda: self._pool.closed, RETRY_S):
                        return
                continue
            for _ in range(count):
                take_apart(self._forgotten.popleft())

    def stats(self) -> dict[str, Any]:  # Any: as `SecondaryTierManager.stats`
        """Return counters, and the stored amount."""
        with self._pool.changed:
            segments = list(self._pool.segments.values())
        return {
            "blocks": len(self.index.places),
            "used_bytes": sum(segment.segment_bytes for segment in segments),
            "capacity_bytes": self._options.sizing.capacity_bytes,
            "segments": len(segments),
            "free_segments": sum(segment.state is SegmentState.FREE for segment in segments),
            "foreign_files": self._directory.foreign_files,
            **self.counters.snapshot(),
        }

    def describe(self) -> Mapping[str, object]:
        """Return facts about the store and its disk. Does I/O."""
        sizing = self._options.sizing
        listing = self._directory.list()
        status = os.statvfs(self._directory.fd)
        free_bytes = status.f_bavail * status.f_frsize
        room_bytes = listing.used_bytes + free_bytes
        short = f"only {rounded_bytes(room_bytes)} of the capacity can be had: its disk has no more free space"
        return {
            "path": self._directory.path,
            "direct_io": f"no: {self.not_direct}" if self.not_direct else "yes",
            "capacity_bytes": sizing.capacity_bytes,
            "used_bytes": listing.used_bytes,
            "free_bytes": free_bytes,
            **({"warning": short} if room_bytes < sizing.capacity_bytes else {}),
            "segment_bytes": sizing.segment_bytes,
            "segments_max": sizing.segments_max,
            "foreign_files": self._directory.foreign_files,
            "codec": self._options.codecs.name,
            "threads": self._options.threads,
            "blocks_found": self.counters["recovered_blocks_total"],
        }

    def stop_stores(self) -> None:
        """Let stores that wait for room fail, and refuse new ones; loads continue."""
        with self._pool.changed:
            self._pool.close()

    def close(self, timeout_s: float | None = None) -> bool:
        """Write the missing summaries and release the directory. Return False if some is left, for a later call.

        A segment in which a call still hangs stays open, and the directory locked, until the process ends:
        the call must not change another process's file.
        """
        if self._released:
            return True
        with self._pool.changed:
            self._pool.close()
            self.index.clear()
        deadline = time.monotonic() + (CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)
        for stop in (self._reclaimer.stop, self._noting.join):
            if not stop(max(0.0, deadline - time.monotonic())):
                return False
        with self._pool.changed:
            segments = list(self._pool.segments.values())
            idle = [segment for segment in segments if not segment.readers and not segment.writers]
            for segment in idle:
                self._pool.remove(segment)
        with ExitStack() as release:
            for segment in idle:
                release.callback(os.close, segment.fd)
            for segment in idle:
                if segment.state is SegmentState.FULL and segment.epoch == self._pool.epoch:
                    self._files.seal(segment)
        if len(idle) < len(segments):
            return False
        self._released = True
        with ExitStack() as release:
            release.callback(self._directory.close)
            try:
                self._epoch.close()
            except OSError:
                self.counters.add("io_errors_total")
        return True
