"""The ledger: how the processes that share a directory keep one capacity together.

A process that wants to store takes a *grant* first: bytes that it may fill. Under the ledger's lock,

    total_bytes = an upper bound of what lies in the directory + all grants

and a grant is given only while `total_bytes` stays within the capacity. The same is kept for each namespace that has
an owner, of what lies in its directory and of its owners' grants: its share of the total, which a *quota* limits.

A file that is stored turns a part of its process's grant into bytes in the directory, so nothing needs to be told then:
the total stands. It shrinks when a process gives back what it did not use, or has taken files away that it replaced
(`Replaced`), and when the holder of the sweep lock has removed files, or counted them anew (`Sweeper`). Errors are on
the side of counting too much: a file that two processes stored at once, or that was removed as damaged, is counted
until the next count.

A ledger that is missing or damaged knows no total. Then nothing is granted until someone has counted. The same goes for
a namespace's share, where who asks has a quota. So that a ledger which is lost while somebody counts is not taken for
the one that was there before, a count begins and ends with a new random word in it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tiered_kv_fs.posix import locked, round_up, write_all

LEDGER_BYTES_MAX = 1 << 20
"""Enough for ten thousand owners."""

_MAGIC = b"tiered-kv-fs-ledger-1"


@dataclass(slots=True)
class Share:
    """What the ledger says of one namespace.

    Args:
        total_bytes: As the ledger's, of the namespace alone; None if it is not known.
        granted_bytes: Likewise.
    """

    total_bytes: int | None = None
    granted_bytes: int = 0


@dataclass(slots=True)
class LedgerState:
    """What the ledger says; change it while the lock is held.

    Args:
        total_bytes: See above; None if it is not known.
        granted_bytes: All that was ever granted, less what was given back.
        counted_at_s: When somebody counted last, in seconds of that host's `time.time()`.
        grants: For each owner, the bytes that it may still fill, at most.
        shares: Of namespaces, by their directories' names: of all that had an owner at the last count or since.
        count: A random word, another one when a count begins and when it ends; "" where there was none.
    """

    total_bytes: int | None = None
    granted_bytes: int = 0
    counted_at_s: float = 0.0
    grants: dict[str, int] = field(default_factory=dict)
    shares: dict[str, Share] = field(default_factory=dict)
    count: str = ""

    def share_bytes(self, namespace: str) -> int | None:
        """Return what is known of a namespace's part of the total."""
        share = self.shares.get(namespace)
        return None if share is None else share.total_bytes

    def mark_count(self) -> str:
        """Note that a count begins or ends here; return the word for it."""
        self.count = secrets.token_hex(8)
        return self.count

    def add(self, size_bytes: int, namespace: str) -> None:
        """Add a grant in a namespace to the totals, or take one off that is given back (negative)."""
        assert self.total_bytes is not None
        self.total_bytes += size_bytes
        self.granted_bytes += size_bytes
        share = self.shares.setdefault(namespace, Share())
        share.granted_bytes += size_bytes
        if share.total_bytes is not None:
            share.total_bytes += size_bytes

    def take_off(self, size_bytes: int, namespace: str) -> None:
        """Take files that were removed in a namespace off the totals; by who removed them."""
        if self.total_bytes is not None:
            self.total_bytes = max(0, self.total_bytes - size_bytes)
        share = self.shares.get(namespace)
        if share is not None and share.total_bytes is not None:
            share.total_bytes = max(0, share.total_bytes - size_bytes)


class Ledger:
    """The ledger file.

    Args:
        path: Where it is.
        lock_timeout_s: How long its lock is waited for.
    """

    def __init__(self, path: str, lock_timeout_s: float) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s

    @contextmanager
    def locked(self) -> Iterator[LedgerState]:
        """Yield the ledger with its lock held, and write it when the block ends without an exception.

        Opened anew each time, since that is when a network file system looks whether another host has changed it.

        Raises:
            TimeoutError: Others held the lock all the time.
            OSError: The file system does not let us.
        """
        with locked(self._path, self._lock_timeout_s) as fd:
            found = os.pread(fd, LEDGER_BYTES_MAX, 0)
            state = _parse(found)
            yield state
            written = _format(state, len(found))
            if written != found:
                os.lseek(fd, 0, os.SEEK_SET)
                write_all(fd, [written])


def _parse(text: bytes) -> LedgerState:
    """Return what a ledger's text says, and the state of an empty one if it is damaged."""
    head, _, body = text.partition(b"\n")
    if head != _head(body):
        return LedgerState()
    try:
        return _state_of(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a writer's fault: the checksum is right
        return LedgerState()


def _state_of(fields: dict[str, Any]) -> LedgerState:  # Any: whatever JSON holds
    """Return the state that a ledger's fields say.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: They say none.
    """
    shares = {name: Share(*share) for name, share in fields.get("shares", {}).items()}
    grants = dict(fields["grants"])
    count = str(fields.get("count", ""))
    state = LedgerState(fields["total_bytes"], fields["granted_bytes"], fields["counted_at_s"], grants, shares, count)
    totals = [state.total_bytes, *(share.total_bytes for share in shares.values())]
    numbers = [state.granted_bytes, *grants.values(), *(share.granted_bytes for share in shares.values())]
    if not all(type(number) is int for number in [*numbers, *(total for total in totals if total is not None)]):
        raise TypeError("a number of bytes is none")
    filled = [state.total_bytes or 0, *grants.values()]
    if min(filled) < 0 or not math.isfinite(state.counted_at_s):
        raise ValueError("a number is out of range")
    return state


def _format(state: LedgerState, size_min_bytes: int) -> bytes:
    """Return a ledger's text. It never gets shorter, so that one write replaces all of the one before."""
    fields: dict[str, object] = {
        "total_bytes": state.total_bytes,
        "granted_bytes": state.granted_bytes,
        "counted_at_s": state.counted_at_s,
        "grants": state.grants,
        "shares": {name: [share.total_bytes, share.granted_bytes] for name, share in state.shares.items()},
    }
    if state.count:
        fields["count"] = state.count
    body = json.dumps(fields).encode()
    head_bytes = len(_head(b"")) + 1
    body = body.ljust(max(size_min_bytes, round_up(head_bytes + len(body))) - head_bytes)
    return _head(body) + b"\n" + body


def _head(body: bytes) -> bytes:
    return b"%s %s" % (_MAGIC, xxhash.xxh3_64_hexdigest(body).encode())
