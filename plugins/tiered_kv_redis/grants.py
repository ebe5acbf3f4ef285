"""Grants: the bytes of a namespace's quota that this process may fill without asking the others."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from tiered_kv_redis.account import Account, LostAccountError
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.reasons import NO_SPACE, TIMEOUT

GRANTS_MIN: Final = 16
"""The least number of grants in a quota."""
_GRANT_BYTES_MAX: Final = 64 << 20
_REFUSAL_S: Final = 1.0
"""For how long a failure stands for those who ask next, so that a queue of stores does not wait one after the other."""


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """What a quota goes by.

    Args:
        quota_bytes: What the records of the namespace's blocks may take, by whatever processes.
        record_bytes_max: How long a record can be.
        room_wait_s: How long a store waits for room.
        transfer_s: How long a transfer may take once it has begun.
        tick_s: How often this process tells that it lives.
        valid_s: For how long grants may be used after the server was reached last. Others take an owner for dead only
            when it has not been heard of for `dead_s`.
        survey_interval_s: The blocks are counted, by one of those who share the quota, at least so often.
        fresh_s: Blocks are evicted by what a survey has found for so long.
    """

    quota_bytes: int
    record_bytes_max: int
    room_wait_s: float
    transfer_s: float
    tick_s: float = 5.0
    valid_s: float = 30.0
    survey_interval_s: float = 600.0
    fresh_s: float = 60.0

    @property
    def grant_bytes(self) -> int:
        """How much is asked for at once."""
        return max(self.record_bytes_max, min(_GRANT_BYTES_MAX, self.quota_bytes // GRANTS_MIN))

    @property
    def dead_s(self) -> float:
        """See `valid_s`; what was taken then has been sent, or given up, before."""
        return 2 * self.valid_s + self.transfer_s

    @property
    def full_bytes(self) -> int:
        """From which total on room is made, so that who stores need not wait for it."""
        return self.quota_bytes - 2 * self.grant_bytes

    @property
    def low_bytes(self) -> int:
        """To which total room is made."""
        return min(self.full_bytes, self.quota_bytes - self.quota_bytes // 8) - self.grant_bytes


class MakesRoom(Protocol):
    """Who surveys and evicts."""

    @property
    def round(self) -> threading.Event:
        """Set when the round that goes on now, or begins next, has ended."""

    def wake(self) -> None:
        """Have a round begin, unless one has been asked for already."""


class Grants:
    """What this process may still store. Transfer threads take and settle; the keeper's thread tells and leaves.

    Args:
        account: Where grants come from.
        limits: See there.
        counters: Where to count.
        keeper: Makes room.
    """

    def __init__(self, account: Account, limits: QuotaLimits, counters: Counters, keeper: MakesRoom) -> None:
        self.total_bytes = 0
        """Blocks and grants of the namespace, when the account was last seen."""
        self.are_in_doubt = False
        """Whether the account may have more than there is, so that a survey is wanted."""
        self._account = account
        self._limits = limits
        self._counters = counters
        self._keeper = keeper
        self._lock = threading.Lock()  # guards the four below, held for a few additions
        self._free_bytes = 0
        self._in_flight_bytes = 0
        self._confirmed_s = 0.0  # when the server was reached last
        self._was_used = False  # since the last tick
        self._refused_until_s = 0.0
        self._refusal = ""

    # Transfer threads.

    def take(self, blocks: int, deadline: float) -> int:
        """Take room for some blocks, waiting for it a little if need be; pair what is taken with `settle`.

        Args:
            blocks: For how many.
            deadline: Seconds of `time.monotonic()`.

        Returns:
            For how many there is room.
        """
        until_s = min(deadline, time.monotonic() + self._limits.room_wait_s)
        while True:
            ended = self._keeper.round  # before asking: a round that ends after we have asked is waited for
            reason = self._refill(blocks, deadline)
            taken = self._take_free(blocks)
            if taken or time.monotonic() < self._refused_until_s:
                break
            if reason != NO_SPACE or not self._wait_for_room(ended, until_s):
                self._refusal, self._refused_until_s = reason, time.monotonic() + _REFUSAL_S
                break
        if taken < blocks:
            self._counters.add("over_quota_blocks", blocks - taken)
        return taken

    @property
    def refusal(self) -> str:
        """Why there was no room when it was last asked for, in one word for the counters."""
        return self._refusal or NO_SPACE

    def settle(self, blocks: int, used_bytes: int) -> None:
        """End a store that took room for some blocks, and filled `used_bytes` of it."""
        taken_bytes = blocks * self._limits.record_bytes_max
        with self._lock:
            self._in_flight_bytes -= taken_bytes
            self._free_bytes += max(0, taken_bytes - used_bytes)

    @property
    def outstanding_bytes(self) -> int:
        """What may still be stored, and what is being stored."""
        with self._lock:
            return self._sum()

    def _take_free(self, blocks: int) -> int:
        size = self._limits.record_bytes_max
        with self._lock:
            if not self._is_confirmed():  # others may take this process for dead
                return 0
            taken = min(blocks, self._free_bytes // size)
            self._free_bytes -= taken * size
            self._in_flight_bytes += taken * size
            self._was_used = self._was_used or taken > 0
            return taken

    def _refill(self, blocks: int, deadline: float) -> str:
        """Take a grant if there are not enough; return why there is none, or an empty text."""
        limits = self._limits
        needed_bytes = blocks * limits.record_bytes_max
        if self._is_confirmed() and self._free_bytes >= needed_bytes:
            return ""
        if time.monotonic() < self._refused_until_s:
            return self._refusal
        if not self._account.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return TIMEOUT
        try:
            self._forfeit_if_stale()
            with self._lock:
                missing_bytes, outstanding_bytes = needed_bytes - self._free_bytes, self._sum()
            if missing_bytes <= 0:  # another thread was first
                return ""
            wanted_bytes = max(limits.grant_bytes, min(missing_bytes, limits.quota_bytes // 4))
            asked_s = time.monotonic()
            granted_bytes = self._account.ask(
                outstanding_bytes, limits.record_bytes_max, wanted_bytes, limits.quota_bytes, deadline
            )
            with self._lock:
                self._free_bytes += granted_bytes
                self._confirmed_s = asked_s
            self.total_bytes = self._account.total_bytes
            if self.total_bytes > limits.full_bytes:
                self._keeper.wake()
            return "" if granted_bytes else NO_SPACE
        except LostAccountError:
            self._forfeit()
            return NO_SPACE
        except NodeDownError as error:
            self.are_in_doubt = True  # it may have been noted, and not been told
            return error.reason
        finally:
            self._account.lock.release()

    def _wait_for_room(self, ended: threading.Event, until_s: float) -> bool:
        """Have the keeper make room, and wait for the end of its round; False if that takes too long."""
        self._keeper.wake()
        return ended.wait(max(0.0, until_s - time.monotonic())) and time.monotonic() < until_s

    # The keeper's thread.

    def leave(self, deadline: float) -> None:
        """Give all grants back; raises as `Account.leave` does."""
        self._forfeit_if_stale()  # others may have taken this process for dead, and its grants off
        with self._lock:
            returned_bytes, self._free_bytes = self._free_bytes, 0
            in_flight_bytes = self._in_flight_bytes
        if in_flight_bytes:  # a transfer that hangs may still store: others wait until this owner is taken for dead
            self._account.give_back(returned_bytes, in_flight_bytes, deadline)
        elif self._confirmed_s:
            self._account.leave(returned_bytes, deadline)

    def tell(self, deadline: float) -> None:
        """Tell the others that this process lives, and give back what it has not used since the last time."""
        if not self._confirmed_s:  # it has not stored anything yet
            return
        with self._account.lock:
            self._forfeit_if_stale()
            with self._lock:
                returned_bytes = 0 if self._was_used else self._free_bytes
                self._free_bytes -= returned_bytes
                self._was_used = False
                outstanding_bytes = self._sum()
            told_s = time.monotonic()
            try:
                self._account.give_back(returned_bytes, outstanding_bytes, deadline)
            except LostAccountError:
                self._forfeit()
            with self._lock:
                self._confirmed_s = told_s

    def _forfeit_if_stale(self) -> None:
        if not self._is_confirmed():
            self._forfeit()

    def _is_confirmed(self) -> bool:
        return time.monotonic() - self._confirmed_s <= self._limits.valid_s

    def _forfeit(self) -> None:
        """Forget the grants that are left: they may not be in the account any more. A survey finds what they were."""
        with self._lock:
            lost_bytes, self._free_bytes = self._free_bytes, 0
        self._account.forget()
        if lost_bytes:
            self.are_in_doubt = True

    def _sum(self) -> int:
        return self._free_bytes + self._in_flight_bytes
