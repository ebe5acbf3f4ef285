"""The ledger, by which processes that share a directory keep one capacity.

A process takes a *grant* before it stores: bytes that it may fill. The ledger keeps one number,

    total_bytes >= bytes in the directory + granted bytes that are not filled yet

and gives a grant only while the total stays within the capacity. A stored block turns a part of a grant into bytes of
the directory, and the total does not change. The total shrinks when a process returns unused bytes, when the sweep
removes files, and when a survey counts the directory. Errors make it too large, never too small: a block that two
processes stored at once is counted twice until the next survey.

A holder that has not renewed its grant for `LAPSE_S` is removed. Its grant stays in the total until the next survey.
Times are the file server's, so the clocks of hosts do not matter.

A ledger that is missing or damaged has no total. Then it grants nothing until the next survey.

If a lock is lost (see locks.py), the process reads the ledger again, and does not write if another process has written.
Another process may still overwrite the ledger later. So a holder compares its entry in the ledger with the entry that
it wrote last. If its entry is gone, a survey is due.

`GrantClient`, `DirectorySweeper` and the administration call it, on any thread but the scheduler's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from tiered_kv.toolkit.small_files import SMALL_FILE_BYTES_MAX, read_file, replace_file
from tiered_kv_fs.full_disk import with_room
from tiered_kv_fs.locks import LostLockError, locked
from tiered_kv_fs.names import LEDGER_NAME, LOCK_NAME

LAPSE_S: Final = 60.0  # how long after its last renewal a holder is removed
VALID_S: Final = 30.0  # how long a holder may store after its last renewal; less than the lapse
SURVEY_INTERVAL_S: Final = 600.0  # one of the processes that share the directory counts it at least this often
_LOCK_TIMEOUT_S: Final = 5.0  # how long a use of the ledger waits for its lock

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(slots=True)
class Holder:
    """An entry of the ledger: the grant of one opening of the tier."""

    namespace: str
    epoch: str
    granted_bytes: Bytes
    """Bytes of the grants that are not stored yet, or are being stored."""
    seen_s: Seconds  # the file server's time when the holder last renewed its grant


@dataclass(slots=True)
class LedgerState:
    """The ledger's content; change it while the lock is held."""

    total_bytes: Bytes | None = None  # see above; None if unknown
    pending_bytes: Bytes = 0
    """Granted bytes when the last survey began, plus the bytes granted since then, less the bytes returned since then.
    A survey adds `pending_bytes` to the bytes that it counts."""
    survey: str = ""  # random name of the running or last survey
    surveyed_s: Seconds = 0.0  # the file server's time when the last survey ended; 0 if one is due
    unit_bytes: Bytes = 0  # the file system's allocation unit, as far as known; see allocation.py
    holders: dict[str, Holder] = field(default_factory=dict)
    """The processes with grants, by their random names."""
    now_s: float = 0.0  # the file server's time when the lock was taken; not stored

    def add(self, size_bytes: int) -> None:
        """Add granted bytes to the total, or subtract returned ones (negative)."""
        self.pending_bytes = max(0, self.pending_bytes + size_bytes)
        self.take_off(-size_bytes)

    def take_off(self, size_bytes: int) -> None:
        """Subtract bytes from the total. If they are of removed files, the caller holds the sweep lock."""
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes - size_bytes)

    @property
    def is_survey_due(self) -> bool:
        """Whether a survey is due, also after the file server's clock was set back."""
        return not 0 <= self.now_s - self.surveyed_s < SURVEY_INTERVAL_S

    def drop_lapsed(self) -> None:
        """Remove lapsed holders, and request a survey: it counts the bytes that they have filled."""
        for name, holder in list(self.holders.items()):
            if abs(self.now_s - holder.seen_s) > LAPSE_S:
                del self.holders[name]
                self.surveyed_s = 0.0


class DirectoryLedger:
    """A directory's ledger, a file that is replaced as a whole. Any thread but the scheduler's may call.

    `on_lost_lock` is called, on the thread of the call, when another process is known to have held the lock too.
    """

    def __init__(self, directory: str, on_lost_lock: Callable[[], None] = lambda: None) -> None:
        self._directory = directory
        self._path = f"{directory}/{LEDGER_NAME}"
        self._lock_path = f"{directory}/{LOCK_NAME}"
        self._on_lost_lock = on_lost_lock

    @contextmanager
    def locked(self) -> Iterator[LedgerState]:
        """Yield the state with the lock held, and write it if the block raises nothing.

        Raises:
            TimeoutError: Other processes held the lock all the time.
            LostLockError: Another process has written the ledger meanwhile.
            OSError: The file system refuses.
        """
        with locked(self._lock_path, _LOCK_TIMEOUT_S) as lock:
            lock.mark()
            found = read_file(self._path, SMALL_FILE_BYTES_MAX)
            state = _parsed(found or b"")
            state.now_s = lock.now_s
            state.drop_lapsed()
            yield state
            fields = asdict(state)
            del fields["now_s"]
            written = json.dumps(fields).encode()
            if lock.is_lost():
                self._on_lost_lock()
                if read_file(self._path, SMALL_FILE_BYTES_MAX) != found:
                    raise LostLockError(self._lock_path)
            if written != found:
                with_room(self._directory, partial(replace_file, self._path, written))


_STATE: Final = TypeAdapter(LedgerState)


def _parsed(text: bytes) -> LedgerState:
    try:
        return _STATE.validate_json(text, strict=True)
    except ValidationError:
        return LedgerState()
