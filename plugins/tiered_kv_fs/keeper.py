"""The keeper: the one thread of a tier that talks to the others who share its directory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from tiered_kv.toolkit.errand import Errand
from tiered_kv.toolkit.jobs import failure_reason
from tiered_kv_fs.allowance import Allowance
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.epochs import write_epoch
from tiered_kv_fs.ledger import LedgerState
from tiered_kv_fs.posix import reason_of
from tiered_kv_fs.replaced import Replaced
from tiered_kv_fs.sweeper import Sweep, Sweeper
from tiered_kv_fs.volume import Volume

_log = logging.getLogger("tiered_kv.fs")

_TICK_S: Final = 5.0
_SWEEP_POLL_S: Final = 0.02
_LATE_POLL_S: Final = 0.1
_REFILLS_WAITING_MAX: Final = 1024
_REFUSAL_S: Final = 1.0
"""For how long a failure stands for those who ask next, so that a queue of stores does not wait one after the other."""


@dataclass(frozen=True, slots=True)
class KeeperLimits:
    """What a keeper goes by.

    Args:
        capacity_bytes: What the directory may occupy.
        grant_bytes: How much is asked of the ledger at once.
        room_timeout_s: How long a store waits for room.
        quota_bytes: What the namespace may occupy; None for all of the capacity.
        count_interval_s: The directory is counted, by one of those who share it, at least so often.
    """

    capacity_bytes: int
    grant_bytes: int
    room_timeout_s: float
    quota_bytes: int | None = None
    count_interval_s: float = 600.0


@dataclass(frozen=True, slots=True)
class _Refill:
    need_bytes: int
    answer: Future[str]


class Keeper:
    """Asks the ledger for grants, makes room, writes resets down, and sweeps from time to time.

    Args:
        volume: The directory; the keeper's thread owns it from here on, and closes it.
        sweeper: Makes room.
        allowance: What it fills.
        replaced: What it tells the ledger of.
        limits: See there.
        counters: Where to count.
        epoch: The epoch at first.
        name: What the thread is called.
    """

    def __init__(
        self,
        volume: Volume,
        sweeper: Sweeper,
        allowance: Allowance,
        replaced: Replaced,
        limits: KeeperLimits,
        counters: Counters,
        epoch: str,
        name: str,
    ) -> None:
        self.used_bytes = 0
        """The ledger's total when it was last seen."""
        self.share_bytes = 0
        """The namespace's share of it, likewise; 0 where it is not known."""
        self._volume = volume
        self._sweeper = sweeper
        self._allowance = allowance
        self._replaced = replaced
        self._limits = limits
        self._counters = counters
        self._epoch = epoch  # written by `reset`
        self._resets = 0  # likewise, after `_epoch`
        self._resets_written = 0
        self._ended_owners_counted = 0
        self._count_seen: float | None = None  # the time of the last count, by its host's clock
        self._count_seen_s = 0.0  # when it was seen first, by ours
        self._stored_at_last_tick = -1
        self._reasons_logged: set[str] = set()
        self._refusal = ("", 0.0)  # why the last refill failed, and until when that stands; replaced in one step
        self._tasks: SimpleQueue[_Refill | None] = SimpleQueue()
        self._is_stopping = threading.Event()
        self._noting = Errand(self._note_reset, f"{name}-reset")  # of a reset
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    # Any thread.

    def refill(self, need_bytes: int) -> Future[str]:
        """Have the allowance filled until it may have `need_bytes`; the answer is "" or the reason why not."""
        answer: Future[str] = Future()
        reason, until_s = self._refusal
        if time.monotonic() < until_s:
            answer.set_result(reason)
        elif self._tasks.qsize() >= _REFILLS_WAITING_MAX:
            answer.set_result("busy")
        else:
            self._tasks.put(_Refill(need_bytes, answer))
        return answer

    def reset(self, epoch: str) -> None:
        """Note that `epoch` is the one from now on. Does not wait for the file system; scheduler thread.

        The keeper's thread may be waiting for the ledger, so another notes at once that there is something to write.
        """
        self._epoch = epoch
        self._resets += 1
        self._noting.ask()
        self.wake()

    def wake(self) -> None:
        """Have the directory looked at now: something in it was missing."""
        self._tasks.put(None)

    def stop(self, timeout_s: float) -> bool:
        """Have the thread close the directory and end; return whether it has in time.

        With a transfer that is late it does so once that has ended.
        """
        self._is_stopping.set()
        self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        self._noting.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # A thread for a moment.

    def _note_reset(self) -> None:
        """Note in the owner's file that a reset has been asked for, so that it outlives this process."""
        try:
            self._volume.owner.ask_for_reset(self._resets)
        except OSError as error:
            self._counters.add(f"failed_{reason_of(error)}")

    # The keeper's thread.

    def _serve(self) -> None:
        tick_at = 0.0
        while not self._is_stopping.is_set():
            try:
                task = self._tasks.get(timeout=max(0.0, tick_at - time.monotonic()))
            except Empty:
                tick_at = time.monotonic() + _TICK_S
                self._attempt(self._tick)
                continue
            if task is None:
                self._attempt(self._look_after)
            elif task.answer.set_running_or_notify_cancel():
                task.answer.set_result(self._answer(task.need_bytes))
                self._attempt(self._keep_spare)
        self._attempt(self._look_after)
        self._cancel_tasks()
        # A transfer that is late may still write: until then the owner lives on, with its grant.
        while self._allowance.in_flight_bytes:
            time.sleep(_LATE_POLL_S)
        self._attempt(self._close)
        self._cancel_tasks()

    def _cancel_tasks(self) -> None:
        while not self._tasks.empty():
            left = self._tasks.get()
            if left is not None:
                left.answer.cancel()

    def _answer(self, need_bytes: int) -> str:
        """Fill the allowance; return why not, or an empty string."""
        reason, until_s = self._refusal
        if time.monotonic() < until_s:
            return reason
        reason = self._attempt(lambda: self._refill(need_bytes))
        if reason:
            self._refusal = (reason, time.monotonic() + _REFUSAL_S)
        return reason

    def _attempt(self, work: Callable[[], str]) -> str:
        """Do something; return "" or the reason why not."""
        try:
            try:
                return work()
            except FileNotFoundError:  # somebody removed what we stand on
                self._claim_again()
                return work()
        except Exception as error:  # none of them, a mistake of ours included, may end the thread
            reason = reason_of(error) if isinstance(error, OSError) else failure_reason(error)
            self._counters.add(f"failed_{reason}")
            if reason not in self._reasons_logged:
                self._reasons_logged.add(reason)
                _log.warning("%s: %s; further ones are only counted", self._volume.path, error)
        return reason

    def _claim_again(self) -> None:
        if not self._volume.owner.is_present:
            self._allowance.take_all()  # forfeit: the ledger does not know of it any more
        self._volume.claim_again(self._epoch)

    def _refill(self, need_bytes: int) -> str:
        deadline = time.monotonic() + self._limits.room_timeout_s
        self._look_after()
        while not self._allowance.has(need_bytes) and not self._ask(need_bytes):
            outcome = self._sweeper.make_room(max(need_bytes, self._limits.grant_bytes))
            is_full = outcome is Sweep.FULL and not self._ask(need_bytes)
            is_late = time.monotonic() >= deadline
            if is_full or is_late or (outcome is Sweep.BUSY and self._is_stopping.wait(_SWEEP_POLL_S)):
                self._counters.add("room_timeouts")
                return "no_space"
        return ""

    def _ask(self, need_bytes: int) -> bool:
        """Take a grant, if there is room for what is needed."""
        name = self._volume.owner.name
        with self._volume.ledger.locked() as state:
            outstanding_bytes = self._allowance.outstanding_bytes
            state.grants[name] = outstanding_bytes  # at most what it was, and known again if the ledger was lost
            self._replaced.tell(state, self._volume.namespace)
            if state.total_bytes is None:
                return False
            self._note_totals(state)
            least_bytes = need_bytes - self._allowance.free_bytes
            room_bytes = self._room_bytes(state)
            if room_bytes is None:
                return False
            granted_bytes = min(max(least_bytes, self._limits.grant_bytes), room_bytes)
            if granted_bytes < least_bytes:
                return False
            state.add(granted_bytes, self._volume.namespace)
            state.grants[name] = outstanding_bytes + granted_bytes
            self._note_totals(state)
        self._allowance.add(granted_bytes)  # not before it is written
        return True

    def _room_bytes(self, state: LedgerState) -> int | None:
        """Return how much may be granted; None if the total, or with a quota the share, is not known."""
        if state.total_bytes is None:
            return None
        room_bytes = self._limits.capacity_bytes - state.total_bytes
        if self._limits.quota_bytes is None:
            return room_bytes
        share_bytes = state.share_bytes(self._volume.namespace)
        return None if share_bytes is None else min(room_bytes, self._limits.quota_bytes - share_bytes)

    def _note_totals(self, state: LedgerState) -> None:
        if state.total_bytes is not None:
            self.used_bytes = state.total_bytes
            self.share_bytes = state.share_bytes(self._volume.namespace) or 0

    def _keep_spare(self) -> str:
        """Make room for the next grants while nobody waits for them."""
        free_bytes = self._limits.capacity_bytes - self.used_bytes
        if self._limits.quota_bytes is not None:
            free_bytes = min(free_bytes, self._limits.quota_bytes - self.share_bytes)
        if free_bytes < self._limits.grant_bytes and self._tasks.empty():
            self._sweeper.make_room(2 * self._limits.grant_bytes)
        return ""

    def _look_after(self) -> str:
        """Write a reset down, and make anew what somebody removed: the owner's file, or the namespace's directory."""
        if not self._volume.owner.is_present or not self._volume.has_namespace():
            self._claim_again()
        while self._resets != self._resets_written:
            number, epoch = self._resets, self._epoch  # in this order: the epoch is at least as new as the number
            self._volume.owner.ask_for_reset(number)
            with self._volume.ledger.locked(), self._volume.opened_namespace() as namespace_fd:
                write_epoch(namespace_fd, epoch)
            self._volume.owner.note_epoch(epoch, number)
            self._resets_written = number
        return ""

    def _tick(self) -> str:
        self._look_after()
        stored = self._counters["stored_files"]
        if stored == self._stored_at_last_tick:
            self._give_back()
        self._stored_at_last_tick = stored
        with self._volume.ledger.locked() as state:
            self._replaced.tell(state, self._volume.namespace)
            room_bytes = self._room_bytes(state)
            is_due = (
                room_bytes is None
                or self._volume.ended_owners != self._ended_owners_counted
                or self._is_count_old(state.counted_at_s)
            )
            self._note_totals(state)
        if is_due or room_bytes is None or room_bytes < 0:
            ended_owners = self._volume.ended_owners
            if self._sweeper.make_room(self._limits.grant_bytes, must_count=is_due) is not Sweep.BUSY:
                self._ended_owners_counted = max(ended_owners, self._ended_owners_counted)
        return ""

    def _is_count_old(self, counted_at_s: float) -> bool:
        """Return whether nobody has counted for long. Clocks of hosts differ, so a time is taken for a name only."""
        now_s = time.monotonic()
        if counted_at_s != self._count_seen:
            is_first, self._count_seen, self._count_seen_s = self._count_seen is None, counted_at_s, now_s
            return is_first and abs(time.time() - counted_at_s) >= self._limits.count_interval_s
        return now_s - self._count_seen_s >= self._limits.count_interval_s

    def _give_back(self) -> None:
        """Return what has not been used for a while to those who may need it."""
        unused_bytes = self._allowance.take_all()
        if not unused_bytes:
            return
        name = self._volume.owner.name
        try:
            with self._volume.ledger.locked() as state:
                if state.total_bytes is not None:
                    state.add(-unused_bytes, self._volume.namespace)
                self._replaced.tell(state, self._volume.namespace)
                state.grants[name] = self._allowance.outstanding_bytes
        except OSError:
            self._allowance.add(unused_bytes)
            raise

    def _close(self) -> str:
        is_settled = False
        try:
            self._look_after()
            self._give_back()
            is_settled = True
        finally:
            # The owner's file stays only if others have to do what could not be done: a reset, or the grant.
            self._volume.close(gives_up=is_settled and self._resets == self._resets_written)
        return ""
