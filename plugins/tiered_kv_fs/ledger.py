"""The ledger, with which processes that share a directory keep one capacity.

A process takes a *grant* before it stores: bytes that it may fill. The ledger keeps one number,

    total_bytes >= bytes in the directory + granted bytes that are not filled yet

and a grant is given only while the total stays within the capacity. A stored block turns a part of a grant
into bytes of the directory, and the total does not change. It shrinks when a process gives back unused bytes, when the
sweep removes files, and when a survey counts the directory. Errors make it too large, never too small: a block that
two processes stored at once is counted twice until the next survey.

A holder that has not renewed its grant for `LAPSE_S` is removed from the list. Its grant stays in the total
until the next survey. Times are the file server's, so the clocks of hosts do not matter.

A ledger that is missing or damaged has no total. Then it grants nothing until the next survey.
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
from tiered_kv_fs.layout import LEDGER_NAME, LOCK_NAME

LAPSE_S: Final = 60.0
"""The silence after which a holder counts as ended or stopped."""
VALID_S: Final = 30.0
"""How long a holder may store without renewing its grant; less than the lapse."""
_LOCK_TIMEOUT_S: Final = 5.0

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(slots=True)
class Holder:
    """A tier in a process that shares the directory, and the namespace and epoch of its blocks."""

    namespace: str
    epoch: str
    granted_bytes: Bytes  # that it may still fill, or is filling, at most
    seen_s: Seconds  # when it last used the ledger


@dataclass(slots=True)
class LedgerState:
    """The ledger's content; change it while the lock is held."""

    total_bytes: Bytes | None = None  # see above; None if it is not known
    pending_bytes: Bytes = 0
    """Bytes granted when the last survey began, plus those granted since, less those given back. A survey adds it to
    its count."""
    survey: str = ""  # the running or last one; another random word each time
    surveyed_s: Seconds = 0.0  # when the last survey ended; 0 if one is due
    holders: dict[str, Holder] = field(default_factory=dict)  # by their random names
    now_s: float = 0.0  # the file server's time when the lock was taken; not stored

    def add(self, size_bytes: int) -> None:
        """Add granted bytes to the total, or subtract those given back (negative)."""
        self.pending_bytes = max(0, self.pending_bytes + size_bytes)
        self.take_off(-size_bytes)

    def take_off(self, size_bytes: int) -> None:
        """Subtract from the total; for removed files only the holder of the sweep lock calls."""
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes - size_bytes)

    def drop_lapsed(self) -> None:
        """Remove silent holders from the list; a survey counts the bytes that they have filled."""
        for name, holder in list(self.holders.items()):
            if abs(self.now_s - holder.seen_s) > LAPSE_S:
                del self.holders[name]
                self.surveyed_s = 0.0


class Ledger:
    """The ledger of a directory, a file that is replaced as a whole. Any thread but the scheduler's may call."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{LEDGER_NAME}"
        self._lock_path = f"{directory}/{LOCK_NAME}"

    @contextmanager
    def locked(self) -> Iterator[LedgerState]:
        """Yield the ledger with its lock held, and write it when the block ends without an exception.

        Raises:
            TimeoutError: Others held the lock all the time.
            OSError: The file system refuses.
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
    """Return the state in a ledger's text; an empty state if it is damaged."""
    try:
        return _STATE.validate_json(text, strict=True)
    except ValidationError:
        return LedgerState()
