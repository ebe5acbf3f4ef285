"""A client of the ledger: it takes and returns a tier's grants, and starts sweeps.

`FsTier` makes one client, and calls `take` before a store and `settle` after it. The client runs on the tier's event
loop; its two tasks use at most one thread each, for the ledger and for a sweep. These things stay true:

- A store writes only bytes that the ledger has granted, and only while the grant is valid.
- Bytes that a process returns or owes reach the ledger's total once.
- A failure ends no task: it is counted and logged. Later stores fail at once for its reason, during `_REFUSAL_S`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import Reason
from tiered_kv.system.file_systems import OWN_NAME
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.toolkit.epoch import Epoch
from tiered_kv.toolkit.failure_texts import FailureTexts
from tiered_kv.toolkit.jobs import failure_reason
from tiered_kv.toolkit.small_files import remedy_for, told
from tiered_kv_fs.directory import Directory, FileFailure, FileReason, reason_of
from tiered_kv_fs.full_disk import without_room
from tiered_kv_fs.ledger import SURVEY_INTERVAL_S, VALID_S, DirectoryLedger, Holder, LedgerState
from tiered_kv_fs.locks import LostLockError
from tiered_kv_fs.sweeper import DirectorySweeper, Sweep

_log = logging.getLogger("tiered_kv.fs")

_TICK_S: Final = 5.0  # how often the ledger is used while no store asks
_IDLE_TICKS: Final = 2  # ticks without a store until unused bytes are returned
_BUSY_PAUSE_S: Final = 0.05  # between two uses of the ledger while a sweep makes room
_REFUSAL_S: Final = 1.0  # how long later stores fail at once after a failure, so that each need not wait
_CLOSE_TIMEOUT_S: Final = 0.5
"""Limit of the seconds that `close` waits for the end of the tasks, and again for the return of grants."""
_MEASURE_S: Final = 10.0
"""How often to look at the disk's free space; some file systems count a removed file seconds later."""
GRANTS_MIN: Final = 16
"""The least number of grants for which a capacity has room; the disk counts, if it is smaller than the capacity."""
_EPOCH_TIMEOUT_S: Final = 5.0
_EXCHANGES_MAX: Final = 5  # tries of one use of the ledger, if locks are lost
_SURVEY_PAUSES: Final = 10  # the pause between surveys for lost locks, in durations of a survey
_LOST_PAUSE_S: Final = 0.1  # the longest pause between two tries
_LOST_LOCK: Final = (
    "another process held a lock of the directory too, or this one lost it, so the directory may exceed its capacity "
    f"until the next survey; {OWN_NAME}"
)


class _Reply(NamedTuple):
    granted_bytes: int
    is_known: bool  # the ledger had this tier among its holders
    total_bytes: int
    needs_sweep: bool  # a survey is due, or the capacity has no room for another grant


@dataclass(eq=False)
class GrantClient:
    """Takes and returns grants, starts sweeps, and writes the epoch's mark.

    The event loop owns it. Raises `OSError`: the ledger cannot be read or locked.
    """

    directory: Directory
    epoch: Epoch
    counters: Counters
    call: Callable[..., Awaitable[Any]]  # runs a function that may wait, on a thread. Any: the function's result
    capacity_bytes: int  # the limit of the directory
    grant_bytes: int  # the size of one grant; less on a small disk
    part_bytes: Callable[[], int]  # returns the most bytes that a part of a job may take, as far as known
    room_timeout_s: float  # how long a store waits for room
    on_age: Callable[[float], None]  # see `DirectorySweeper.on_age`; runs on a thread

    def __post_init__(self) -> None:
        self.owner = secrets.token_hex(8)  # this tier's name in the ledger
        self._allocation = self.directory.allocation
        self._usable_bytes = self.capacity_bytes - self._allocation.opening_bytes
        self._grant_bytes_max = self.grant_bytes
        self.failure = ""  # the failure of the newest use of the ledger, for people; any thread may read it
        self.newest_path = ""  # the path of the last stored block; `FsTier` sets it
        self._measure_after_s = 0.0
        self._ledger = DirectoryLedger(self.directory.path, self._note_lost_lock)
        self._sweeper = DirectorySweeper(self.directory, self._ledger, self._usable_bytes, self.counters, self.on_age)
        self.used_bytes = 0
        """Bytes that the directory used when this process last used the ledger. Any thread may read it."""
        with without_room(), self._ledger.locked() as state:
            self.used_bytes = state.total_bytes or 0
        self._free_bytes = 0  # granted, and not reserved by a store
        self._in_flight_bytes = 0  # reserved by stores that have not ended
        self._valid_until_s = 0.0
        """When the grants lapse, in seconds of `time.monotonic`."""
        self._waiting: deque[int] = deque()  # the bytes that each waiting store wants, the longest wait first
        self._idle_ticks = _IDLE_TICKS  # ticks since the last store; no grant is taken before the first store
        self._is_registered = False  # the ledger has had an entry of this tier
        self._is_full = False  # the last sweep could not make room
        self._sweep_after_s = 0.0  # no sweep is asked for before, if the last one could not make room
        self._refusal: tuple[FileReason | None, float] = (None, 0.0)
        """Why nothing was granted, and until when stores fail at once for that reason."""
        self._is_closing = False
        self._entries: list[Holder] = []
        """The entries of this tier that the ledger may have: the last write, or the write before if the last may have
        failed."""
        self._is_survey_owed = False  # the ledger lost this tier's entry, and perhaps a part of the total
        self._survey_after_s = -math.inf  # no survey is asked for before, because of a lost entry
        self._lost_lock_s = -math.inf
        """When another process was last known to hold the same lock, in seconds of `time.monotonic`."""
        self._is_asked = asyncio.Event()
        self._is_sweep_asked = asyncio.Event()
        self._is_answered = asyncio.Event()  # set, and then replaced, after each use of the ledger
        self._log_limit = LogLimit()
        self.failure_texts = FailureTexts()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def granted_bytes(self) -> int:
        """Granted bytes that are not stored yet. Any thread."""
        return self._free_bytes + self._in_flight_bytes

    def is_granted(self) -> bool:
        """Return whether the grants are still valid. Any thread."""
        return time.monotonic() < self._valid_until_s

    def give_way(self, wanted_bytes: int, wanted_files: int, attempt: int) -> bool:
        """Let old blocks make room on a full disk; return whether a store may be tried again. A worker's thread."""
        return not self._is_closing and self._sweeper.give_way(wanted_bytes, wanted_files, attempt)

    # The event loop.

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_granted()), asyncio.create_task(self._sweep_when_asked())]

    def wake(self) -> None:
        """Use the ledger now, which makes missing directories again."""
        self._is_asked.set()

    async def take(self, size_bytes: int) -> FileReason | None:
        """Reserve granted bytes, and wait for a grant if needed; return why that failed."""
        if self._waiting or not self._take(size_bytes):
            if (reason := self._refused()) is not None:
                return reason
            self._waiting.append(size_bytes)
            try:
                async with asyncio.timeout(self.room_timeout_s):
                    while not self._take(size_bytes):
                        self._is_asked.set()
                        await self._is_answered.wait()
                        if (reason := self._refused()) is not None:
                            return reason
            except TimeoutError:
                self.counters.add("failed_calls_total", Reason.NO_SPACE.value)
                return Reason.NO_SPACE
            finally:
                self._waiting.remove(size_bytes)
        if self._free_bytes < self.grant_bytes // 2:
            self._is_asked.set()
        return None

    def measure_again(self) -> None:
        """Look at the disk now: it was full."""
        self._measure_after_s = 0.0
        self._is_asked.set()

    def settle(self, taken_bytes: int, used_bytes: int) -> None:
        """End a store that reserved `taken_bytes` and filled `used_bytes`, which may be more."""
        self._in_flight_bytes -= taken_bytes
        self._free_bytes += taken_bytes - used_bytes

    async def close(self) -> None:
        """End the tasks, and return the grants. No job is in flight any more."""
        self._is_closing = True
        self._sweeper.stop()
        self._is_asked.set()
        self._is_sweep_asked.set()
        _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        if self._is_registered:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.call(self._return, self._free_bytes)

    def _refused(self) -> FileReason | None:
        reason, until_s = self._refusal
        return reason if time.monotonic() < until_s else None

    def _take(self, size_bytes: int) -> bool:
        if self._free_bytes < size_bytes or not self.is_granted():
            return False
        self._free_bytes -= size_bytes
        self._in_flight_bytes += size_bytes
        self._idle_ticks = 0
        return True

    async def _keep_granted(self) -> None:
        """Use the ledger when a store needs a grant, and every few seconds."""
        while not self._is_closing:
            free_bytes = self._free_bytes
            reason = await self._attempt(self._renew)
            if self._waiting and reason is None and self._is_full:
                reason = Reason.NO_SPACE
                self.counters.add("failed_calls_total", reason.value)
            self._refusal = (reason, time.monotonic() + _REFUSAL_S)
            self._is_answered.set()
            self._is_answered = asyncio.Event()
            if self._waiting and self._free_bytes <= free_bytes:  # room is being made
                await asyncio.sleep(_BUSY_PAUSE_S)
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._is_asked.wait()
            except TimeoutError:
                self._idle_ticks += 1
            self._is_asked.clear()

    async def _renew(self) -> None:
        is_idle = self._idle_ticks >= _IDLE_TICKS and not self._waiting
        returned_bytes = self._free_bytes if is_idle or self._free_bytes < 0 else 0  # negative: this tier owes bytes
        self._free_bytes -= returned_bytes
        free_bytes = self._free_bytes
        needs_grant = free_bytes < (self._waiting[0] if self._waiting else self.grant_bytes // 2)
        exchange = partial(
            self._exchange,
            free_bytes=free_bytes,
            in_flight_bytes=self._in_flight_bytes,
            returned_bytes=returned_bytes,
            wanted_bytes=self.grant_bytes if needs_grant and not is_idle else 0,
        )
        begin_s = time.monotonic()
        try:
            reply: _Reply = await self.call(_repeated, exchange)
        except BaseException:
            self._free_bytes += min(0, returned_bytes)  # the debt stays
            raise
        if not reply.is_known and self._is_registered:
            self._free_bytes = max(0, self._free_bytes - free_bytes)
        self._is_registered = True
        self._free_bytes += reply.granted_bytes
        self._valid_until_s = begin_s + VALID_S
        self.used_bytes = reply.total_bytes
        if reply.granted_bytes:
            self._is_full = False
        if reply.needs_sweep and time.monotonic() >= self._sweep_after_s:
            self._is_full = False
            self._is_sweep_asked.set()

    async def _sweep_when_asked(self) -> None:
        """Make room, or survey, whenever the ledger's answer requests that."""
        while not self._is_closing:
            await self._is_sweep_asked.wait()
            self._is_sweep_asked.clear()
            await self._attempt(self._make_room)

    async def _make_room(self) -> None:
        begin_s = time.monotonic()
        outcome = await self.call(self._sweeper.make_room, 2 * self.grant_bytes)
        self._is_full = outcome is Sweep.FULL
        if self._is_full:  # for example, because of foreign files: that does not change soon
            self._sweep_after_s = time.monotonic() + max(_REFUSAL_S, 10 * (time.monotonic() - begin_s))
        if outcome is not Sweep.BUSY or self._waiting:  # if not, the next tick tries again
            self._is_asked.set()

    async def _attempt(self, work: Callable[[], Awaitable[None]]) -> FileReason | None:
        """Run an action; return why it failed. No exception must end the task."""
        try:
            await work()
        except LostLockError:  # `_note_lost_lock` has said so
            return FileFailure.LOCK_LOST
        except Exception as error:
            reason = reason_of(error) if isinstance(error, OSError) else failure_reason(error)
            self.counters.add("failed_calls_total", reason.value)
            text = f"{told(error)}{remedy_for(error) if isinstance(error, OSError) else ''}"
            self.failure_texts.note(reason, f"keeping the capacity failed: {text}")
            if self._log_limit.take(reason) is not None:
                _log.warning("%s: %s; %s", self.directory.path, text, self._log_limit.about)
            self.failure = f"keeping the capacity failed: {told(error)}"
            return reason
        self.failure = ""
        return None

    # Threads.

    def _exchange(self, *, free_bytes: int, in_flight_bytes: int, returned_bytes: int, wanted_bytes: int) -> _Reply:
        """Return bytes to the ledger, renew the grants, and take another grant if the capacity has room for it."""
        if not self.directory.is_marked():  # a cleaner or a purge has deleted the files
            self.directory.make()
        value = self.epoch.saved_value(time.monotonic() + _EPOCH_TIMEOUT_S)
        with self._ledger.locked() as state:
            state.unit_bytes = self._allocation.share(state.unit_bytes)
            self._measure(state)
            wanted_bytes = min(wanted_bytes, self.grant_bytes)
            entry = state.holders.get(self.owner)
            is_known = entry is not None and entry in self._entries
            if entry is not None and not is_known:  # another process held the lock too, and overwrote the entry
                self._note_lost_lock()
            self._is_survey_owed |= not is_known and self._is_registered
            if self._is_survey_owed and time.monotonic() >= self._survey_after_s:  # no survey after each loss
                pause_s = max(_TICK_S, _SURVEY_PAUSES * self._sweeper.survey_s)
                self._is_survey_owed, self._survey_after_s = False, time.monotonic() + pause_s
                state.surveyed_s = 0.0
            # The total may miss bytes in use, if the ledger has removed this holder.
            owed_bytes = self._allocation.opening_bytes + in_flight_bytes - min(0, returned_bytes)
            state.add(-returned_bytes if is_known else owed_bytes)
            has_room = state.total_bytes is not None and state.total_bytes + wanted_bytes <= self._usable_bytes
            granted_bytes = wanted_bytes if has_room else 0
            state.add(granted_bytes)
            held_bytes = in_flight_bytes + granted_bytes + (free_bytes if is_known else 0)
            written = Holder(self.directory.namespace, value, held_bytes, state.now_s)
            self._entries = [*([entry] if entry is not None and is_known else []), written]  # the write may fail
            state.holders[self.owner] = written
        self._entries = [written]
        if state.total_bytes is None:  # the ledger was lost, and other files may have been removed with it
            self.directory.make()
            return _Reply(0, is_known, 0, needs_sweep=True)
        is_short = state.total_bytes + self.grant_bytes > self._usable_bytes
        return _Reply(granted_bytes, is_known, state.total_bytes, is_short or state.is_survey_due)

    def _measure(self, state: LedgerState) -> None:
        """Keep the usable bytes within the room of the disk: a sweep begins only when they are nearly used."""
        if state.total_bytes is None or time.monotonic() < self._measure_after_s:
            return
        self._measure_after_s = time.monotonic() + _MEASURE_S
        with suppress(OSError):  # the block may be gone
            # A file system that allocates late shows a block's space only now. A survey recounts earlier blocks.
            if self.newest_path and self._allocation.learn(os.lstat(self.newest_path)):
                state.unit_bytes = self._allocation.share(state.unit_bytes)
                state.surveyed_s = 0.0
        disk = os.statvfs(self.directory.path)
        if not disk.f_blocks:  # a FUSE file system that reports no size
            return
        granted_bytes = sum(holder.granted_bytes for holder in state.holders.values())
        room_bytes = max(0, state.total_bytes - granted_bytes) + disk.f_bavail * disk.f_frsize
        self._usable_bytes = max(0, min(self.capacity_bytes, room_bytes) - self._allocation.opening_bytes)
        self._sweeper.capacity_bytes = self._usable_bytes
        self.grant_bytes = max(self.part_bytes(), min(self._grant_bytes_max, self._usable_bytes // GRANTS_MIN))

    @property
    def lost_lock(self) -> str:
        """The remedy for lost locks, if one was lost since the last survey was due. Any thread."""
        return _LOST_LOCK if time.monotonic() - self._lost_lock_s < SURVEY_INTERVAL_S else ""

    def _note_lost_lock(self) -> None:
        is_first = self._lost_lock_s == -math.inf
        self._lost_lock_s = time.monotonic()
        self.counters.add("failed_calls_total", "lock_lost")
        if is_first:
            _log.warning("%s: %s; further losses are only counted", self.directory.path, _LOST_LOCK)

    def _return(self, free_bytes: int) -> None:
        with self._ledger.locked() as state:
            state.unit_bytes = self._allocation.share(state.unit_bytes)
            if state.holders.pop(self.owner, None) is not None:
                state.add(-free_bytes)


def _repeated(exchange: Callable[[], _Reply]) -> _Reply:
    """Use the ledger. Begin again if another process held the lock too, and has written the ledger meanwhile."""
    for _ in range(_EXCHANGES_MAX - 1):
        try:
            return exchange()
        except LostLockError:
            time.sleep(random.uniform(0.0, _LOST_PAUSE_S))
    return exchange()
