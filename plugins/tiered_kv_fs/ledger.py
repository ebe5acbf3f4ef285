"""The ledger: how the processes that share a directory keep one capacity together.

A process takes a *grant* before it stores: bytes that it may fill. The ledger keeps one number,

    total_bytes = at least what the directory holds + what is granted and not filled yet

and a grant is given only while the total stays within the capacity. A block that is stored turns a part of a grant
into bytes of the directory, and the total stands. It shrinks when a process gives back what it did not use, when the
sweep removes files, and when a survey counts the directory. Errors make it too large, never too small: a block that
two processes stored at once is counted twice until the next survey.

A holder that has not renewed its grant for `LAPSE_S` is taken off the list. What it was granted stays in the total
until the next survey finds what became of it. Times are the file server's, so the clocks of hosts do not matter.

A ledger that is missing or damaged knows no total. Nothing is granted then until somebody has surveyed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.toolkit.small_files import SMALL_FILE_BYTES_MAX, read_file, replace_file
from tiered_kv_fs.files import locked

LAPSE_S: Final = 60.0
"""A holder that is silent for so long has ended, or stands still."""
VALID_S: Final = 30.0
"""How long a holder stores within its grant without having renewed it; less than the lapse, in which it is believed."""
_LOCK_TIMEOUT_S: Final = 5.0

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(slots=True)
class Holder:
    """A tier in a process that shares the directory.

    Args:
        namespace, epoch: What it works in.
        granted_bytes: What it may still fill, or is filling, at most.
        seen_s: When it was here last.
    """

    namespace: str
    epoch: str
    granted_bytes: Bytes
    seen_s: Seconds


@dataclass(slots=True)
class LedgerState:
    """What the ledger says; change it while the lock is held.

    Args:
        total_bytes: See above; None if it is not known.
        pending_bytes: What was granted when the last survey began, and what was granted since, less what was given
            back. A survey adds it to what it has counted.
        survey: The survey that is on, or was last; another random word each time.
        surveyed_s: When the last survey ended; 0 where one is due.
        holders: By their random names.
        now_s: The file server's time when the lock was taken; not stored.
    """

    total_bytes: Bytes | None = None
    pending_bytes: Bytes = 0
    survey: str = ""
    surveyed_s: Seconds = 0.0
    holders: dict[str, Holder] = field(default_factory=dict)
    now_s: float = 0.0

    def add(self, size_bytes: int) -> None:
        """Add what is granted to the total, or take off what is given back (negative)."""
        self.pending_bytes = max(0, self.pending_bytes + size_bytes)
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes + size_bytes)

    def take_off(self, size_bytes: int) -> None:
        """Take files that were removed off the total; by the holder of the sweep lock."""
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes - size_bytes)

    def drop_lapsed(self) -> None:
        """Take holders off the list that have not been here for long; a survey finds what they have filled."""
        for name, holder in list(self.holders.items()):
            if abs(self.now_s - holder.seen_s) > LAPSE_S:
                del self.holders[name]
                self.surveyed_s = 0.0


class Ledger:
    """The ledger file, which is replaced as a whole. Any thread but the scheduler's may call.

    Args:
        path: Where it is.
        lock_path: The file whose lock is held meanwhile.
    """

    def __init__(self, path: str, lock_path: str) -> None:
        self._path = path
        self._lock_path = lock_path

    @contextmanager
    def locked(self) -> Iterator[LedgerState]:
        """Yield the ledger with its lock held, and write it when the block ends without an exception.

        Raises:
            TimeoutError: Others held the lock all the time.
            OSError: The file system does not let us.
        """
        with locked(self._lock_path, _LOCK_TIMEOUT_S) as now_s:
            found = read_file(self._path, SMALL_FILE_BYTES_MAX)
            state = _parsed(found or b"")
            state.now_s = now_s
            state.drop_lapsed()
            yield state
            fields = asdict(state)
            del fields["now_s"]
            written = json.dumps(fields).encode()
            if written != found:
                replace_file(self._path, written)


_STATE: Final = TypeAdapter(LedgerState)


def _parsed(text: bytes) -> LedgerState:
    """Return what a ledger's text says; an empty state if it is damaged."""
    try:
        return _STATE.validate_json(text, strict=True)
    except ValidationError:
        return LedgerState()
