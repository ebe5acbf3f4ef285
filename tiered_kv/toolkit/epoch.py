"""The epoch of a namespace: it separates the blocks from before a reset from later blocks.

A tier owns one `Epoch`. `value` and `try_to_save` run on workers, since they may wait for the storage. `renew` runs on
the scheduler's thread, without I/O. The rules below must stay true: a block from before a reset is found by no process
that knows of the reset.

An epoch is a random *value* in the name of every block. A reset draws another value, so no process asks for the older
names again. The storage keeps a small *mark*, from which later processes learn which epoch to join.

A mark also has a *number*: how many resets came before it. Storage may return to an older mark (a failover to a lagging
replica, a restored snapshot). The smaller number shows that, and a running process repairs it (rule 4).

Rules:

1. A process joins an epoch at its first use of the storage, and keeps it until its own next reset, apart from rule 5.
   After a change of weights, other servers may still store blocks of the old ones for a while.
2. A process never joins an epoch that it has seen retired, not even after its tier was closed and opened again.
3. A missing or damaged mark is replaced by a new one. The blocks are lost, and none comes back.
4. A process writes its lost mark again, also over a mark that it has seen retired. If another process may have been
   reset since, it writes a new mark instead: later processes find no blocks, rather than invalid ones.
5. A process whose mark has the number 0 joins a newer epoch that another process drew because the mark was lost. The
   newer mark has the number 0 too, and a later time: a value's first 8 digits say when it was drawn, in seconds. A
   process does not join if it has seen its own epoch retired. A process that has been reset, or has joined the epoch of
   a reset, writes its own mark again. Processes that were opened after that reset then join its epoch.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from tiered_kv.errors import FormatError, TieredKVError
from tiered_kv.system.log_limit import LogLimit

FORMAT_VERSION = 1
MARK_BYTES_MAX = 128  # bytes of the longest mark of any version
CHECK_PAUSE_S = 10.0  # how often a process checks that the storage still has its mark
CHECK_WAIT_S = 1.0  # how long that check may delay the job that makes it

_SPARED = 10  # a failed check is followed by a pause of this many times the check's duration

SKEW_S = 30.0  # how far the clocks of two machines may differ, for rule 5

_WARNED_AT_ONCE = 6
_WARNED_PAUSE_S = 60.0
_log = logging.getLogger(__name__)

_FORM = re.compile(rb"tiered-kv epoch (\d{1,10}) (.*)", re.DOTALL)
_BODY = re.compile(rb"((\d{1,15}) ([0-9a-f]{16})) ([0-9a-f]{16})\n")
_RETIRED_MAX = 4096  # values; the oldest are forgotten


def _drawn() -> str:
    return f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class EpochMark:
    """An epoch as the storage keeps it."""

    number: int  # how many resets came before it
    value: str = field(default_factory=_drawn)  # 16 hexadecimal digits; by default a new one

    @property
    def drawn_s(self) -> int:
        """When it was drawn, in seconds of Unix time."""
        return int(self.value[:8], 16)

    def encode(self) -> bytes:
        body = f"{self.number} {self.value}"
        return f"tiered-kv epoch {FORMAT_VERSION} {body} {xxhash.xxh3_64_hexdigest(body.encode())}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> EpochMark | None:
        """Return the mark in `data`; None if it is damaged. Raises `FormatError` for another format version."""
        form = _FORM.fullmatch(data)
        if form is None:
            return None
        if int(form[1]) != FORMAT_VERSION:
            raise FormatError(
                f"the storage's epoch has format version {int(form[1])}, and this release reads version "
                f"{FORMAT_VERSION}; use the release that wrote it, or empty the storage"
            )
        body = _BODY.fullmatch(form[2])
        if body is None or xxhash.xxh3_64_hexdigest(body[1]) != body[4].decode():
            return None
        return cls(int(body[2]), body[3].decode())


class EpochStore(Protocol):
    """Keeps the mark of one namespace in a storage.

    `Epoch` calls it from any thread, one at a time. Every method ends by `deadline`, in seconds of `time.monotonic()`,
    and raises the tier's errors if the storage cannot be used.
    """

    def read(self, deadline: float) -> bytes | None:
        """Return the stored bytes, at most `MARK_BYTES_MAX`; None if there are none."""

    def create(self, data: bytes, deadline: float) -> None:
        """Store `data`, unless a mark is stored already."""

    def write(self, data: bytes, deadline: float) -> None:
        """Store `data` in place of the stored mark."""


class Epoch:
    """The epoch of this process, with its mark in `store`. Deadlines are times of `time.monotonic()`.

    The scheduler's thread calls `renew`, which does no I/O. Workers call the rest. Messages name the `tier`. If only
    one process at a time uses the storage, `is_shared` is False, and rule 5 does not apply. Stores check the mark every
    `store_pause_s`, if that is less than `CHECK_PAUSE_S`: some storage evicts a mark that is not read.
    """

    def __init__(
        self,
        store: EpochStore,
        *,
        tier: str = "",
        is_shared: bool = True,
        store_pause_s: float = CHECK_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tier = tier
        self._is_shared = is_shared
        self._store_pause_s = store_pause_s
        self._clock = clock
        self._io_lock = threading.Lock()  # held while the mark is read or written
        self._lock = threading.Lock()  # guards the two below; held for assignments only
        self._mark: EpochMark | None = None  # None before the first read of the storage and the first reset
        self._is_saved = False  # whether the storage has `_mark`
        self._opened_s = 0.0  # Unix time of the first use of the storage
        self._checked_at_s = clock()
        self._must_recheck = False  # any thread sets it
        self._limit = LogLimit(_WARNED_PAUSE_S, _WARNED_AT_ONCE, clock)
        self.has_drawn = False
        """Whether this process has found no mark that it may join, and drawn one."""
        self.repairs = 0
        """How often this process repaired a lost, damaged or older mark: it wrote a mark, or joined another epoch."""

    @property
    def is_saved(self) -> bool:
        """Whether the storage has the mark of this process's last reset; True before the first reset."""
        return self._mark is None or self._is_saved

    def renew(self) -> str:
        """Retire the epoch and return the value of a new one. The next `saved_value` writes its mark."""
        with self._lock:
            number = 1
            if self._mark is not None:
                _retire(self._mark.value)
                number = self._mark.number + 1
            self._mark = EpochMark(number)
            self._is_saved = False
            return self._mark.value

    def recheck(self) -> None:
        """Check the mark at the next use: the storage may have been restarted, or failed over."""
        self._must_recheck = True

    def save_again(self) -> None:
        """Write the mark again at the next use: the storage may have lost it, for example because a flush failed."""
        with self._lock:
            self._is_saved = False

    def value(self, deadline: float) -> str:
        """Return the epoch's value, to load with. Joins the epoch if necessary.

        Raises:
            TimeoutError: Another thread reads or writes the mark until the deadline.
            FormatError: Another version of this project wrote the mark.
            Exception: An error of the store.
        """
        mark = self._mark
        if mark is None:
            return self.saved_value(deadline)
        self._check_if_due(deadline)
        return (self._mark or mark).value

    def saved_value(self, deadline: float) -> str:
        """Return the epoch's value, to store with. Writes the mark first if necessary; raises: see `value`."""
        mark = self._saved_mark()
        if mark is not None:
            self._check_if_due(deadline, self._store_pause_s)
            return (self._saved_mark() or mark).value
        if not self._io_lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise TimeoutError("another thread is reading or writing the epoch's mark")
        try:
            return self._settle(deadline)
        finally:
            self._io_lock.release()

    def check(self, deadline: float) -> None:
        """Check the mark now, if this process has one; an error is ignored."""
        self._check_if_due(deadline, 0.0)

    def try_to_save(self, timeout_s: float) -> None:
        """Write the mark of a reset, if the storage lacks it. If that fails, the next `saved_value` writes it."""
        with suppress(OSError, TieredKVError):
            if not self.is_saved:
                self.saved_value(time.monotonic() + timeout_s)

    def _saved_mark(self) -> EpochMark | None:
        with self._lock:
            return self._mark if self._is_saved else None

    def _read(self, deadline: float) -> tuple[bytes | None, EpochMark | None]:
        data = self._store.read(deadline)
        return data, None if data is None else EpochMark.decode(data)

    def _check_if_due(self, deadline: float, pause_s: float = math.inf) -> None:
        """Check the mark if its pause has passed. Other threads do not wait, and an error does not fail the job."""
        now_s = self._clock()
        pause_s = min(pause_s, CHECK_PAUSE_S)
        if not self._must_recheck and now_s - self._checked_at_s < pause_s:
            return
        if not self._io_lock.acquire(blocking=False):
            return
        try:
            self._must_recheck, self._checked_at_s = False, now_s
            self._check(min(deadline, time.monotonic() + CHECK_WAIT_S))
        except Exception:  # the job uses the same storage, and reports the error
            # Check again soon, but a storage that does not answer must not delay each job.
            self._checked_at_s += (self._clock() - now_s) * _SPARED - pause_s
        finally:
            self._io_lock.release()

    def _check(self, deadline: float) -> None:
        """Repair the storage's mark if it is lost or older than this process's."""
        mark = self._saved_mark()
        if mark is None:
            return  # the next use joins, or writes
        data, found = self._read(deadline)
        is_over = _is_retired(mark.value)  # another process was reset after this one
        if found is not None and not _is_retired(found.value):
            if found.value == mark.value:
                return
            is_anew = self._is_shared and _is_drawn_anew(found, mark)
            if is_over and is_anew:
                return
            if self._is_shared and not is_over and self._may_join(found, mark, is_anew=is_anew):
                self._join(mark, found)
                return
            is_over = not is_anew
            if is_over and found.number >= mark.number:
                _retire(mark.value)
                return
            # The storage has an older mark, and another process may have been reset since: draw a new mark.
        repaired = EpochMark(max(mark.number, found.number if found else 0) + 1) if is_over else mark
        write = self._store.create if data is None else self._store.write
        write(repaired.encode(), deadline)
        if is_over:
            _retire(mark.value)
        self.repairs += 1
        self._warn("the storage has lost the epoch's mark, or has an older one; it was written again")

    def _may_join(self, found: EpochMark, mark: EpochMark, *, is_anew: bool) -> bool:
        """Return whether no block of the epoch `found` is from before a reset that this process has to respect."""
        if mark.number:
            return False
        opened_s = min(self._opened_s, mark.drawn_s)
        return is_anew or (found.number > 0 and found.drawn_s + SKEW_S < opened_s)

    def _join(self, mark: EpochMark, found: EpochMark) -> None:
        with self._lock:
            if self._mark is not mark:  # a reset came meanwhile
                return
            self._mark = found
        self.repairs += 1
        self._warn(
            "the storage had lost the epoch's mark; this process now uses that of another process, and the blocks of "
            "the epoch that it leaves are misses. Keep the mark from being evicted or deleted"
        )

    def _warn(self, about: str) -> None:
        if (left_out := self._limit.take(about)) is not None:
            again = f" ({left_out} such lines before it were left out)" if left_out else ""
            _log.warning("%s%s%s", f"tier '{self._tier}': " if self._tier else "", about, again)

    def _settle(self, deadline: float) -> str:
        """Join the stored epoch, or write this process's own."""
        saved, mark = self._saved_mark(), self._mark
        if saved is not None:  # another thread has saved the mark
            return saved.value
        data, found = self._read(deadline)
        if mark is None:
            self._opened_s = time.time()
            settled = self._joined(data, found, deadline)
        else:
            settled = mark
            is_another = found is not None and found.value != mark.value  # equal if an earlier write got no answer
            if found is not None:
                settled = EpochMark(max(mark.number, found.number + is_another), mark.value)
            self._store.write(settled.encode(), deadline)
            if found is not None and is_another:
                _retire(found.value)
        self._checked_at_s = self._clock()
        with self._lock:
            if self._mark is mark:  # if a reset came, the next use writes the reset's mark
                self._mark, self._is_saved = settled, True
        return settled.value

    def _joined(self, data: bytes | None, found: EpochMark | None, deadline: float) -> EpochMark:
        if found is not None and not _is_retired(found.value):
            return found
        drawn = EpochMark(found.number + 1 if found is not None else 0)
        self.has_drawn = True
        if data is not None and found is None and self._is_shared:  # a tier that alone uses its storage knows more
            self.repairs += 1
            self._warn("the epoch's mark is damaged; a new epoch begins, and the blocks from before are misses")
        if data is not None:
            self._store.write(drawn.encode(), deadline)
            return drawn
        self._store.create(drawn.encode(), deadline)
        _, found = self._read(deadline)  # another process may have been faster
        return drawn if found is None or _is_retired(found.value) else found


_retired: dict[str, None] = {}  # values that this process has seen retired, in any tier; the oldest first
_retired_lock = threading.Lock()


def _is_drawn_anew(found: EpochMark, mark: EpochMark) -> bool:
    """Return whether `found` was drawn after `mark`, because `mark` was lost, and not by a reset.

    The time may differ by `SKEW_S` only if both marks have the number 0. Otherwise `found` must be later: an older
    state of the storage has no later mark.
    """
    later_s = found.drawn_s - mark.drawn_s
    if found.drawn_s > time.time() + SKEW_S:  # no mark can have been drawn at this time
        return False
    return found.number == 0 and (later_s > 0 or (mark.number == 0 and later_s >= -SKEW_S))


def _retire(value: str) -> None:
    with _retired_lock:
        _retired[value] = None
        if len(_retired) > _RETIRED_MAX:
            del _retired[next(iter(_retired))]


def _is_retired(value: str) -> bool:
    return value in _retired
