"""The fs tier: block files in a shared directory behind the secondary tier's contract."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ConfigError, MissingExtraError, TierUnavailableError
from tiered_kv.toolkit.aio import AsyncTier, uninterrupted
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv_fs.allowance import Allowance
from tiered_kv_fs.blocks import BlockFiles, Moved, room_bytes_of
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.epochs import new_epoch
from tiered_kv_fs.keeper import Keeper, KeeperLimits
from tiered_kv_fs.replaced import Replaced
from tiered_kv_fs.settings import FsSettings
from tiered_kv_fs.sweeper import Sweeper
from tiered_kv_fs.threads import DaemonThreads
from tiered_kv_fs.volume import OPENING_BYTES, Identity, Volume

T = TypeVar("T")

_PART_BYTES: Final = 256 << 10
"""One call to a thread: several small blocks, since the way to a thread and back costs as much as 64 KiB."""
_GRANT_BYTES_MAX: Final = 64 << 20
_GRANTS_MIN: Final = 16
"""The least number of grants in a capacity."""
_SMALL_THINGS_BYTES: Final = 8 * OPENING_BYTES
"""Of the least capacity: the small files of several owners, and directories."""
_ROOM_TIMEOUT_MAX_S: Final = 5.0
_LOOKUP_THREADS: Final = 8
_LOOKUP_KEYS: Final = 64
"""Keys in one call to a thread: on a network file system each may be a round trip."""
_SHUTDOWN_TIMEOUT_S: Final = 2.0


def carrier() -> Callable[[Callable[..., T]], Callable[..., Awaitable[T]]]:
    """Return aiofiles' bridge from the event loop to calls that wait for a file system.

    Whole parts go over it, one call each. A file opened by aiofiles takes four trips to a thread and back for a block:
    for 64 KiB that is five times slower than one trip for several blocks (`docs/fs.md`).

    Raises:
        MissingExtraError: aiofiles is not installed.
    """
    try:
        from aiofiles.os import wrap
    except ImportError as error:
        raise MissingExtraError("tier 'fs'", "fs") from error
    return wrap


@dataclass(frozen=True, slots=True)
class Sizing:
    """How a capacity is dealt with.

    Args:
        part_blocks: Blocks in one part of a job.
        room_bytes: What storing one block may take.
        grant_bytes: How much is asked of the ledger at once.
    """

    part_blocks: int
    room_bytes: int
    grant_bytes: int

    @classmethod
    def of(cls, capacity_bytes: int, block_bytes: int, *, overhead_bytes: int = 0, setting: str = "capacity") -> Sizing:
        """Return the sizes for a capacity, or another limit that is called `setting`.

        A stored block exceeds its size by `overhead_bytes` at most.

        Raises:
            ConfigError: It is too small.
        """
        room_bytes = room_bytes_of(block_bytes + overhead_bytes)
        least_bytes = _SMALL_THINGS_BYTES + _GRANTS_MIN * room_bytes
        if capacity_bytes < least_bytes:
            raise ConfigError(
                f"{capacity_bytes} bytes are too few for blocks of {block_bytes}; give at least {least_bytes}",
                location=setting,
            )
        usable_bytes = capacity_bytes - _SMALL_THINGS_BYTES
        part_blocks = max(1, min(_PART_BYTES // block_bytes, usable_bytes // _GRANTS_MIN // room_bytes))
        grant_bytes = max(part_blocks * room_bytes, min(_GRANT_BYTES_MAX, usable_bytes // _GRANTS_MIN))
        return cls(part_blocks, room_bytes, grant_bytes)


class FsTier(AsyncTier):
    """Blocks as files in a directory that processes and hosts may share.

    The directory is opened by the constructor. Lookups are batched, and done by threads of their own.

    Args:
        offloading_spec, primary_kv_view, tier_type: As in `SecondaryTierManager`. A `TierSpec` gives the
            namespace; without one all stacks of one block size share one.
        settings: The tier's YAML entry.

    Raises:
        ConfigError: The capacity is too small for the blocks, a library is missing, or a key file cannot be used.
        FormatError, TierUnavailableError: The directory cannot be used, and why.
    """

    def __init__(
        self,
        offloading_spec: Any,  # Any: an engine's own class; read by getattr
        primary_kv_view: memoryview,
        tier_type: str,
        settings: FsSettings,
    ) -> None:
        # First what can fail for good reasons: a tier that was not opened holds no view of the region.
        self._carry = carrier()
        self._settings = settings
        self._codecs = settings.open_codecs()
        block_bytes = block_bytes_of(primary_kv_view)
        overhead_bytes = self._codecs.overhead_bytes
        self._sizing = Sizing.of(settings.capacity, block_bytes, overhead_bytes=overhead_bytes)
        if settings.quota is not None:
            self._sizing = Sizing.of(settings.quota, block_bytes, overhead_bytes=overhead_bytes, setting="quota")
        digest: bytes = getattr(offloading_spec, "namespace_digest", bytes(16))
        name = getattr(offloading_spec, "name", None) or tier_type
        self._counters = Counters()
        self._allowance = Allowance()
        self._replaced = Replaced()
        self._room_timeout_s = min(_ROOM_TIMEOUT_MAX_S, settings.job_timeout / 2)
        identity = Identity(digest, getattr(offloading_spec, "namespace", {}), block_bytes)
        self._volume = Volume(settings.path, identity, tier=name, private=settings.private)
        self._files = BlockFiles(
            self._volume.namespace_path,
            digest,
            block_bytes,
            self._codecs,
            self._counters,
            private=settings.private,
        )
        self._epoch_names = (0, self._volume.found_epoch)
        """The toolkit's number of the epoch, and its directory; replaced in one step."""
        self._keeper = self._start_keeper(name)
        blocks_max = settings.threads * self._sizing.part_blocks
        self._transfer_threads = DaemonThreads(
            f"tiered-kv-{name}-transfer", threads_max=settings.threads, queue_max=blocks_max
        )
        self._lookup_threads = DaemonThreads(f"tiered-kv-{name}-lookup", threads_max=_LOOKUP_THREADS, queue_max=256)
        try:
            super().__init__(
                offloading_spec,
                primary_kv_view,
                tier_type,
                blocks_in_flight_max=blocks_max,
                part_bytes=self._sizing.part_blocks * block_bytes,
                lookup_timeout_s=settings.lookup_timeout,
                shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
            )
        except BaseException:
            self._keeper.stop(_SHUTDOWN_TIMEOUT_S)
            raise

    # The event loop.

    async def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        number, epoch = self._epoch_names
        if self.part_epoch != number:
            return Outcome((), "reset")
        room_bytes = len(keys) * self._sizing.room_bytes
        reason = await self._take_room(room_bytes)
        if reason:
            return Outcome((), reason)
        try:
            store = self._carry(self._store_part)(epoch, keys, blocks, room_bytes, executor=self._transfer_threads)
            moved = await uninterrupted(store)
        except TierUnavailableError:  # no thread has taken it
            self._allowance.settle(room_bytes, 0)
            raise
        if moved.reason == "missing":
            self._keeper.wake()
        return _outcome(moved, keys)

    async def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        number, epoch = self._epoch_names
        if self.part_epoch != number:
            return Outcome((), "reset")
        load = self._carry(self._files.load)(epoch, keys, blocks, executor=self._transfer_threads)
        return _outcome(await uninterrupted(load), keys)

    async def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        _, epoch = self._epoch_names
        ask = self._carry(self._files.contains)
        pieces = [keys[start : start + _LOOKUP_KEYS] for start in range(0, len(keys), _LOOKUP_KEYS)]
        answers = await asyncio.gather(*(ask(epoch, piece, executor=self._lookup_threads) for piece in pieces))
        return [answer for piece in answers for answer in piece]

    async def _take_room(self, size_bytes: int) -> str:
        """Take bytes of the capacity, waiting for them if need be; return why not, or an empty string."""
        try:
            async with asyncio.timeout(self._room_timeout_s):
                while not self._allowance.take(size_bytes):
                    reason = await asyncio.wrap_future(self._keeper.refill(size_bytes))
                    if reason:
                        return reason
        except TimeoutError:
            self._counters.add("room_timeouts")
            return "no_space"
        return ""

    # Transfer threads.

    def _store_part(
        self, epoch: str, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], room_bytes: int
    ) -> Moved:
        used_bytes = room_bytes
        count = self._replaced.count
        try:
            moved = self._files.store(epoch, self._volume.owner.name, keys, blocks)
            used_bytes = moved.used_bytes
            self._replaced.add(moved.freed_bytes, count)
            return moved
        finally:
            self._allowance.settle(room_bytes, used_bytes)

    # The scheduler's thread.

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self._epoch_names = (self.epoch, new_epoch())
        self._keeper.reset(self._epoch_names[1])
        return True

    def stats(self) -> Mapping[str, int]:
        return {
            **super().stats(),
            **self._counters.snapshot(),
            "ended_owners": self._volume.ended_owners,
            "used_bytes": self._keeper.used_bytes,
            "capacity_bytes": self._settings.capacity,
            "granted_bytes": self._allowance.outstanding_bytes,
            **self._quota_stats(),
        }

    def describe(self) -> Mapping[str, object]:
        return {
            "path": self._volume.path,
            "layout": "one file a block",
            "namespace": self._volume.namespace,
            "epoch": self._epoch_names[1],
            "owners": self._volume.count_owners(),
            "private": self._settings.private,
            "codec": self._codecs.writer.name,
            "threads": self._settings.threads,
            "capacity_bytes": self._settings.capacity,
            "used_bytes": self._keeper.used_bytes,
            "grant_bytes": self._sizing.grant_bytes,
            **self._quota_stats(),
        }

    def shutdown(self) -> None:
        super().shutdown()
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        for threads in (self._transfer_threads, self._lookup_threads):
            threads.shutdown()
        for threads in (self._transfer_threads, self._lookup_threads):
            threads.join(deadline)
        self._keeper.stop(max(0.1, deadline - time.monotonic()))

    def _quota_stats(self) -> dict[str, int]:
        quota_bytes = self._settings.quota
        return {} if quota_bytes is None else {"quota_bytes": quota_bytes, "share_bytes": self._keeper.share_bytes}

    def _start_keeper(self, name: str) -> Keeper:
        limits = KeeperLimits(
            capacity_bytes=self._settings.capacity,
            grant_bytes=self._sizing.grant_bytes,
            room_timeout_s=self._room_timeout_s,
            quota_bytes=self._settings.quota,
        )
        sweeper = Sweeper(self._volume, limits.capacity_bytes, limits.quota_bytes, limits.grant_bytes, self._counters)
        epoch = self._epoch_names[1]
        return Keeper(
            self._volume,
            sweeper,
            self._allowance,
            self._replaced,
            limits,
            self._counters,
            epoch,
            f"tiered-kv-{name}-keeper",
        )


def _outcome(moved: Moved, keys: Sequence[OffloadKey]) -> Outcome:
    return ALL_DONE if len(moved.done) == len(keys) else Outcome(moved.done, moved.reason)
