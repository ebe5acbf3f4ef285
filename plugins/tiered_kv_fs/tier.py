"""The fs tier: block files in a shared directory, behind the contract of secondary tiers.

A `GuardedTier` calls it on the scheduler's thread, and no such call does I/O. Its coroutines run on an event loop, and
the calls of the file system on threads. A store writes only granted bytes; a lookup asks the file system.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from aiofiles.os import wrap

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import Reason
from tiered_kv.system.limits import disk_need
from tiered_kv.system.threads import BackgroundTask, DaemonThreads
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.aio import AsyncTier, uninterrupted
from tiered_kv.toolkit.claimed import Identity, as_line
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome
from tiered_kv.toolkit.queued import block_bytes_of
from tiered_kv.toolkit.record import HEADER_BYTES, codecs_of
from tiered_kv.toolkit.touches import Touches
from tiered_kv_fs.allocation import UNIT_BYTES_MIN, Allocation
from tiered_kv_fs.blocks import TOUCH_INTERVAL_S, BlockFiles, Moved
from tiered_kv_fs.directory import Directory
from tiered_kv_fs.epoch import EpochFile
from tiered_kv_fs.full_disk import without_room
from tiered_kv_fs.grants import GRANTS_MIN, GrantClient
from tiered_kv_fs.metrics import METRICS
from tiered_kv_fs.settings import FsSettings

T = TypeVar("T")
_log = logging.getLogger("tiered_kv.fs")

_PART_BYTES: Final = 256 << 10
"""Bytes of one call to a thread: several small blocks, because the call costs as much as a block of 64 KiB."""
_GRANT_BYTES_MAX: Final = 64 << 20
_SMALL_THINGS_BYTES: Final = 448 << 10
"""Bytes that a capacity needs for small files of several processes and for directories, beside `opening_bytes`."""
_ROOM_TIMEOUT_MAX_S: Final = 5.0
_LOOKUPS_MAX: Final = 8
"""Calls for lookups that run at once, each on a thread of its own, which transfers cannot delay."""
_LOOKUP_KEYS: Final = 64  # keys in one call to a thread: on a network file system each may be a round trip
_GRANT_THREADS: Final = 2
_SHUTDOWN_TIMEOUT_S: Final = 2.0
_OPEN_TIMEOUT_S: Final = 5.0
_TOUCH_TIMEOUT_S: Final = 0.5
_TOUCHES_A_LIFE: Final = 8  # uses of a block that are written, at most, in the time for which an unused block stays
_TOUCH_INTERVAL_MIN_S: Final = 0.05


class FsTier(AsyncTier):
    """Blocks as files in a directory that processes and hosts may share.

    The constructor opens the directory, and may wait for the file system.

    Raises:
        ConfigError: The capacity is too small for the blocks, a library is missing, or a key file cannot be used.
        FormatError, TierUnavailableError: The directory cannot be used, and why.
    """

    takes_records = True

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: FsSettings) -> None:
        # First the steps that may fail: a tier that was not opened holds no view of the region.
        self._settings = settings
        spec = TierSpec.of(offloading_spec, tier_type, primary_kv_view)
        self._codecs = codecs_of(spec, settings)
        block_bytes = block_bytes_of(primary_kv_view)
        self._record_bytes = HEADER_BYTES + block_bytes + self._codecs.overhead_bytes
        _sizes(settings.capacity, block_bytes, self._record_bytes, Allocation())
        name = spec.name
        identity = Identity(spec.namespace_digest, spec.namespace, block_bytes)
        self._directory = Directory(
            settings.path, identity, tier=name, private=settings.private, required_mount=settings.required_mount
        )
        self._allocation = self._directory.allocation
        part_blocks, grant_bytes = _sizes(settings.capacity, block_bytes, self._record_bytes, self._allocation)
        self._counters = Counters(METRICS)
        self._cache_epoch = Epoch(EpochFile(self._directory.namespace_path, self._directory.make), tier=name)
        save = partial(self._cache_epoch.try_to_save, _SHUTDOWN_TIMEOUT_S)
        self._saving = BackgroundTask(save, f"tiered-kv-{name}-reset")
        try:
            with without_room():  # if the disk is full, the first store joins an epoch instead
                self._cache_epoch.value(time.monotonic() + _OPEN_TIMEOUT_S)
            self._grants = GrantClient(
                self._directory,
                self._cache_epoch,
                self._counters,
                self._call,
                capacity_bytes=settings.capacity,
                grant_bytes=grant_bytes,
                part_bytes=lambda: part_blocks * self._allocation.room_bytes(self._record_bytes),
                room_timeout_s=min(_ROOM_TIMEOUT_MAX_S, settings.job_timeout / 2),
                on_age=self._note_age,
            )
        except OSError as error:
            raise self._directory.claimed.unavailable(error) from error
        self._files = BlockFiles(
            self._directory.namespace_path,
            spec.namespace_digest,
            self._grants.owner,
            block_bytes,
            self._codecs,
            self._counters,
            self._grants.is_granted,
            self._grants.give_way,
            self._allocation,
            settings.private,
        )
        self._touch_interval_s = TOUCH_INTERVAL_S
        self._touches = Touches(self._note_uses, f"tiered-kv-{name}-touches", TOUCH_INTERVAL_S)
        self._threads = DaemonThreads(f"tiered-kv-{name}", settings.threads + _LOOKUPS_MAX + _GRANT_THREADS)
        self._lookup_slots = asyncio.Semaphore(_LOOKUPS_MAX)
        # Parts of few blocks may be more than the threads, since only the blocks in flight have a limit.
        self._transfer_slots = asyncio.Semaphore(settings.threads)
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            blocks_in_flight_max=settings.threads * part_blocks,
            part_bytes=part_blocks * block_bytes,
            lookup_timeout_s=settings.lookup_timeout,
            shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
        )
        _log.info("tier '%s': opened; %s", name, as_line(self._directory.description))
        for warning in filter(None, (*self._directory.shortcomings, self._disk_warning())):
            _log.warning("tier '%s': %s", name, warning)

    def explain_failure(self, reason: str) -> str | None:
        return self._files.explain(reason) or self._grants.failure_texts.of(reason) or super().explain_failure(reason)

    # The event loop.

    async def open(self) -> None:
        self._grants.start()

    async def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        room_bytes = len(keys) * self._allocation.room_bytes(self._record_bytes)  # less may be used, or more
        reason = await self._grants.take(room_bytes)
        if reason is not None:
            return Outcome((), reason)
        used_bytes = 0
        try:
            async with self._transfer_slots:
                used_bytes = room_bytes  # the filled bytes are unknown unless the call returns
                store = self._call(self._move, True, self.part_epoch, self.part_deadline, keys, blocks)
                moved = await uninterrupted(store)
                used_bytes = moved.used_bytes
        finally:
            self._grants.settle(room_bytes, used_bytes)
        self._grants.newest_path = self._files.newest_path
        if moved.yields:
            self._grants.measure_again()
        if moved.reason is Reason.MISSING:  # directories were removed: the next use of the ledger makes them anew
            self._cache_epoch.recheck()
            self._grants.wake()
        return _outcome(moved, keys)

    async def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        async with self._transfer_slots:
            load = self._call(self._move, False, self.part_epoch, self.part_deadline, keys, blocks)
            return _outcome(await uninterrupted(load), keys)

    async def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        pieces = [keys[start : start + _LOOKUP_KEYS] for start in range(0, len(keys), _LOOKUP_KEYS)]
        answers = await asyncio.gather(*(self._contains(self.part_deadline, piece) for piece in pieces))
        return [answer for piece in answers for answer in piece]

    async def close(self) -> None:
        try:
            await self._grants.close()
        finally:
            self._threads.shutdown()

    async def _contains(self, deadline: float, keys: Sequence[OffloadKey]) -> list[bool]:
        async with self._lookup_slots:  # held until the call has returned, also after the lookup's deadline
            return await uninterrupted(self._call(self._contains_part, deadline, keys))

    def _call(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]:  # Any: the function's
        # A part is one call to a thread: see the measurements in `docs/reference/fs.md`.
        return wrap(function)(*arguments, executor=self._threads)

    # Threads.

    def _move(
        self, is_store: bool, epoch: int, deadline: float, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
    ) -> Moved:
        value = self._cache_epoch.saved_value(deadline) if is_store else self._cache_epoch.value(deadline)
        move = self._files.store if is_store else self._files.load
        # `reset_cache` changes `self.epoch` before the value. So if `self.epoch` is still the part's, the value is too.
        return move(value, keys, blocks, deadline) if epoch == self.epoch else Moved([], Reason.RESET)

    def _contains_part(self, deadline: float, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._files.contains(self._cache_epoch.value(deadline), keys)

    def _note_uses(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        value = self._cache_epoch.value(time.monotonic() + _TOUCH_TIMEOUT_S)
        return self._files.touch(value, keys, self._touch_interval_s)

    def _note_age(self, oldest_s: float) -> None:
        """Write uses to the files so often that none looks unused when its turn to be removed comes."""
        self._touch_interval_s = min(TOUCH_INTERVAL_S, max(_TOUCH_INTERVAL_MIN_S, oldest_s / _TOUCHES_A_LIFE))
        self._touches.set_interval(self._touch_interval_s)

    # The scheduler's thread.

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._touches.note(keys)

    def take_absent(self) -> list[OffloadKey]:
        return self._touches.take_absent()

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self._touches.clear()
        self._cache_epoch.renew()
        self._saving.ask()  # where that fails, `GrantClient` tries again, and logs why
        return True

    def stats(self) -> Mapping[str, Any]:
        return {
            **super().stats(),
            **self._counters.snapshot(),
            "epoch_repairs_total": self._cache_epoch.repairs,
            "used_bytes": self._grants.used_bytes,
            "capacity_bytes": self._settings.capacity,
            "granted_bytes": self._grants.granted_bytes,
        }

    def describe(self) -> Mapping[str, object]:
        warning = "; ".join(
            filter(
                None,
                (
                    self._files.failure,
                    self._grants.failure,
                    self._grants.lost_lock,
                    *self._directory.shortcomings,
                    self._disk_warning(),
                ),
            )
        )
        return {
            **({"warning": warning} if warning else {}),
            **self._directory.description,
            "layout": "one file a block",
            "namespace": self._directory.namespace,
            "private": self._settings.private,
            "codec": self._codecs.name,
            "threads": self._settings.threads,
            "capacity_bytes": self._settings.capacity,
            "used_bytes": self._grants.used_bytes,
            "grant_bytes": self._grants.grant_bytes,
        }

    def _disk_warning(self) -> str:
        used_bytes = self._grants.used_bytes - self._grants.granted_bytes
        with suppress(OSError):
            return disk_need(self._directory.path, self._settings.capacity, used_bytes).problem
        return ""

    @property
    def has_saved_reset(self) -> bool:
        return self._cache_epoch.is_saved

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._touch_interval_s = 0.0
        self._touches.stop(_TOUCH_TIMEOUT_S, writes_rest=True)
        super().shutdown()
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        if not self._cache_epoch.is_saved:
            self._saving.ask()
        self._saving.join(_SHUTDOWN_TIMEOUT_S)
        self._threads.join(deadline)


def _sizes(capacity_bytes: int, block_bytes: int, record_bytes: int, allocation: Allocation) -> tuple[int, int]:
    """Return the blocks in a part of a job, and the bytes of one grant; raise `ConfigError` if they have no room."""
    room_bytes = allocation.room_bytes(record_bytes)
    small_bytes = _SMALL_THINGS_BYTES + allocation.opening_bytes
    usable_bytes = capacity_bytes - small_bytes
    if usable_bytes < GRANTS_MIN * room_bytes:
        least_bytes = small_bytes + GRANTS_MIN * room_bytes
        unit = allocation.unit_bytes
        where = f" where the file system allocates {unit} at a time" if unit > UNIT_BYTES_MIN else ""
        what = f"{capacity_bytes} bytes are too few for blocks of {block_bytes}{where}; give at least {least_bytes}"
        raise ConfigError(what, location="capacity")
    part_blocks = max(1, min(_PART_BYTES // block_bytes, usable_bytes // GRANTS_MIN // room_bytes))
    return part_blocks, max(part_blocks * room_bytes, min(_GRANT_BYTES_MAX, usable_bytes // GRANTS_MIN))


def _outcome(moved: Moved, keys: Sequence[OffloadKey]) -> Outcome:
    return ALL_DONE if len(moved.done) == len(keys) else Outcome(moved.done, moved.reason)
