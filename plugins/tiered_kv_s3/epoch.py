"""The epoch of a namespace: a word in the name of every block, so that one small object forgets all of them.

A reset of the cache makes a new epoch, in this process at once and without I/O: what was stored before has names that
nobody asks for any more. The epoch is written to the bucket before anything is stored under it, so that whoever
opens the namespace later begins where this process is.

A process never takes over an epoch that another one made while it was running: blocks of another process's epoch
may be older than its own last reset. Processes that reset at different times share no longer, until they are
opened again.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable

import xxhash

from tiered_kv.errors import TierUnavailableError
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.naming import FIRST_EPOCH, Naming
from tiered_kv_s3.verdict import Verdict

FORMAT_VERSION = 1
_FORM = re.compile(rb"tiered-kv epoch 1 ([0-9a-f]{16}) ([0-9a-f]{16})\n")
_ANY_VERSION = re.compile(rb"tiered-kv epoch (\d{1,10}) ")
_OBJECT_BYTES_MAX = 256
"""Of an epoch of any version: one of this has 52."""


class EpochError(TierUnavailableError):
    """The epoch cannot be read or written.

    Args:
        message, tier: As in `TierError`.
        verdict: Why.
    """

    def __init__(self, message: str, verdict: Verdict, *, tier: str) -> None:
        super().__init__(f"{message}: {verdict.reason}", tier=tier, operation="open")
        self.verdict = verdict


class Epoch:
    """What blocks are valid. `renew` is the scheduler's thread's, and does not wait; the rest is for other threads.

    Args:
        bucket: Where the epoch is kept.
        naming: Under which name.
        tier: The tier's name, for messages.
    """

    def __init__(self, bucket: Bucket, naming: Naming, tier: str) -> None:
        self._bucket = bucket
        self._name = naming.epoch
        self._tier = tier
        self._io_lock = threading.Lock()  # one thread at a time reads or writes the object
        self._lock = threading.Lock()  # guards the two below; held for assignments only
        self._value = ""  # empty until it has been read
        self._saved = ""
        self._was_read = False  # guarded by `_io_lock`: what is there may be written over

    def renew(self) -> None:
        """Make every block that was stored before invalid."""
        fresh = secrets.token_hex(8)
        with self._lock:
            self._value = fresh

    @property
    def is_saved(self) -> bool:
        """Whether the bucket knows of the last reset."""
        return self._saved == self._value

    def value(self, deadline: float) -> str:
        """Return the epoch of what is valid now, reading it if need be.

        Raises:
            EpochError: It cannot be read by the deadline.
        """
        return self._value or self._with_io(self._read, deadline)

    def saved_value(self, deadline: float) -> str:
        """Return the epoch of what is valid now, which the bucket knows of.

        Raises:
            EpochError: It cannot be read or written by the deadline.
        """
        with self._lock:
            if self._value and self._value == self._saved:
                return self._value
        return self._with_io(self._read_or_save, deadline)

    def _with_io(self, action: Callable[[float], str], deadline: float) -> str:
        if not self._io_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise EpochError("the epoch is being read or written", Verdict.TIMEOUT, tier=self._tier)
        try:
            return action(deadline)
        finally:
            self._io_lock.release()

    def _read(self, deadline: float) -> str:
        if self._value:
            return self._value
        found = self._look(deadline)
        with self._lock:
            if not self._value:
                self._value = found or secrets.token_hex(8)  # damaged: better to lose blocks than to bring some back
                self._saved = found or ""
            return self._value

    def _look(self, deadline: float) -> str | None:
        """Return the epoch that the bucket knows of; None if its object is damaged."""
        data = bytearray()

        def sink(size_bytes: int) -> list[memoryview] | None:
            data[:] = bytes(size_bytes if size_bytes <= _OBJECT_BYTES_MAX else 0)
            return [memoryview(data)] if data else None

        verdict = self._bucket.get(self._name, sink, deadline, expires=False)
        found: str | None = None
        if verdict is Verdict.DONE:
            found = _parse(bytes(data))
            self._refuse_other_version(bytes(data))
        elif verdict is Verdict.ABSENT:
            found = FIRST_EPOCH
        elif verdict is not Verdict.OVERSIZED:
            raise EpochError("the epoch cannot be read", verdict, tier=self._tier)
        self._was_read = True
        return found

    def _refuse_other_version(self, data: bytes) -> None:
        said = _ANY_VERSION.match(data)
        if said is not None and int(said[1]) != FORMAT_VERSION:
            message = (
                f"the object {self._name} is of format version {int(said[1])}, and this release reads version "
                f"{FORMAT_VERSION}; use the release that wrote it, give another prefix, or delete all under this one"
            )
            raise EpochError(message, Verdict.FORMAT, tier=self._tier)

    def _read_or_save(self, deadline: float) -> str:
        value = self._read(deadline)
        if not self._was_read:  # a reset came first
            self._look(deadline)
        if value != self._saved:
            verdict = self._bucket.put(self._name, [_format(value)], deadline)
            if verdict is not Verdict.DONE:
                raise EpochError("the epoch cannot be written", verdict, tier=self._tier)
            self._saved = value
        return value


def _format(value: str) -> bytes:
    return f"tiered-kv epoch 1 {value} {_check_of(value)}\n".encode()


def _parse(data: bytes) -> str | None:
    """Return the epoch that an object holds, or None if it is damaged."""
    found = _FORM.fullmatch(data)
    if found is None:
        return None
    value = found[1].decode()
    return value if _check_of(value) == found[2].decode() else None


def _check_of(value: str) -> str:
    return xxhash.xxh3_64_hexdigest(value.encode())
