"""One request of an attached engine: the keys that the engine asked for, and the server's answers.

`AttachedManager` owns it, on the scheduler's thread. An answer holds for the connection and the epoch in which it was
given: after a loss or a reset no row of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.hints import Hints
from tiered_kv.received import LoadCounts
from tiered_kv.server import protocol
from tiered_kv.server.attach import HostLink
from tiered_kv.server.protocol import ROW_MAX, Message, ProtocolError
from tiered_kv.tiering.requests import PAUSE_S_MAX


@dataclass(slots=True, eq=False)
class AttachedRequest:
    """A request of the engine."""

    number: int
    """The number of the request in the messages of this connection."""
    req_context: ReqContext
    hints: Hints
    link: HostLink | None = None
    """The connection that knows the request; None until something is sent of it."""
    epoch: int = 0
    """The epoch of this engine when the request began."""
    is_outdated: bool = False
    """Whether it began before a reset: it stores and loads nothing."""
    keys: list[OffloadKey] = field(default_factory=list)
    """Keys that the server was asked for, in order."""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    """ANSWER messages that `read` has not sorted yet, as (number of keys, body)."""
    is_unread: bool = False
    """Whether `read` has not sorted all of `keys` and `answers` yet."""
    _codes: list[int] = field(default_factory=list)
    """The first final answer for each of `keys`, or `WAITING`."""
    row_of: dict[OffloadKey, int] = field(default_factory=dict)
    """The last answer for each key, without the answers that `read` has not sorted: use `rows`."""
    _tiers: dict[OffloadKey, str] = field(default_factory=dict)  # of promoted blocks only
    counts: LoadCounts = field(default_factory=dict)
    """What it has loaded."""
    waited_s: float = 0.0
    """Seconds that its lookups have waited, in all."""
    _waits_since_s: float | None = None  # the last of its lookups that waited, by the manager's clock
    known_asked: list[Sequence[OffloadKey]] = field(default_factory=list)
    """Keys that the engine has, and for which the server was asked whether they are stored; one entry a message."""
    stored: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """For programs only: the server's answers whether any tier has a block; None until it answers."""
    stored_asked: list[Sequence[OffloadKey]] = field(default_factory=list)
    unsent: int = 0
    """Index in `keys` of the first key that the server was not asked for yet."""
    asked_s: float = 0.0
    """When the request last asked the server, by the manager's clock."""
    waits_for_answer: bool = False
    """Whether no answer has come since it last asked."""
    is_ahead: bool = False  # whether it is prefetched, and not scheduled yet
    is_prefix: bool = False
    """Whether blocks behind a missing one are of no use."""
    transfers: int = 0
    """Blocks that the engine's workers read or write."""
    is_finished: bool = False

    @property
    def rows(self) -> dict[OffloadKey, int]:
        """The last answer for each key: a row that is leased, or a code."""
        if self.is_unread:
            self.read()
        return self.row_of

    @property
    def sources(self) -> dict[OffloadKey, str]:
        """The tier that each promoted block came from."""
        if self.is_unread:
            self.read()
        return self._tiers

    def wait(self, now_s: float) -> None:
        """Note that a lookup waits."""
        self.end_wait(now_s)
        self._waits_since_s = now_s

    def end_wait(self, now_s: float) -> None:
        """Note that its lookups wait no more, or waited until now."""
        if self._waits_since_s is not None:
            self.waited_s += min(now_s - self._waits_since_s, PAUSE_S_MAX)
            self._waits_since_s = None

    def ask(self, keys: Iterable[OffloadKey]) -> bool:
        """Note keys to ask the server for, `REQUEST_KEYS_MAX` in all; return whether there are new ones."""
        before, room = len(self.keys), protocol.REQUEST_KEYS_MAX - len(self.keys)
        if before:
            rows = self.rows
            self.keys += [key for key in dict.fromkeys(islice(keys, room)) if key not in rows]
            rows.update(dict.fromkeys(self.keys[before:], protocol.WAITING))
            self._codes += [protocol.WAITING] * (len(self.keys) - before)
        else:  # hot path: a request that arrives makes no dictionary; a key that is there twice has one lease
            self.keys += keys[:room] if isinstance(keys, list) else islice(keys, room)
            self.is_unread = bool(self.keys)
        return len(self.keys) > before

    def take_answer(self, message: Message, link: HostLink) -> int:
        """Note an ANSWER message; return how many blocks are missing. Without codes, a later lookup sorts it.

        Raises:
            ProtocolError, struct.error: The message is no answer to this request.
        """
        count, body = message.items, bytes(message.body)
        size = protocol.START.size + count * (protocol.ROW_BYTES + 1)
        if len(body) != size or protocol.START.unpack_from(body)[0] + count > len(self.keys):
            raise ProtocolError("an answer does not fit the keys of its request")
        link.check_rows(np.frombuffer(body, np.uint32, count, protocol.START.size))
        if np.frombuffer(body, np.uint8, count, size - count).max(initial=0) >= len(link.welcome.tiers):
            raise ProtocolError("an answer names a tier that the server does not have")
        self.answers.append((count, body))
        self.is_unread, self.waits_for_answer = True, False
        return self.read() if protocol.may_have_codes(body) else 0

    def take_known(self, message: Message) -> None:
        """Note a KNOWN message.

        Raises:
            ProtocolError: It is malformed.
        """
        count = message.items
        numbers = protocol.split_rows(message.body, 2 * count)
        if self.link is not None and self.known_asked:
            self.link.check_rows(numbers[:count])
            keys = self.known_asked.pop(0)
            found = [each for each in zip(keys, numbers[:count], numbers[count:], strict=True) if each[1] <= ROW_MAX]
            self.link.know([key for key, _, _ in found], [row for _, row, _ in found], [each for _, _, each in found])

    def take_stored(self, message: Message) -> None:
        """Note a STORED message.

        Raises:
            ValueError: It does not fit the question.
        """
        if self.stored_asked:
            self.stored.update(zip(self.stored_asked.pop(0), map(bool, message.body), strict=True))

    def read(self) -> int:
        """Sort questions and answers into `rows`; return how many blocks were found to be missing."""
        codes, keys = self._codes, self.keys
        answers, self.answers, self.is_unread = self.answers, [], False
        if not codes:
            codes += [protocol.WAITING] * len(keys)
            if not answers or answers[0][0] < len(keys):
                self.row_of.update(dict.fromkeys(keys, protocol.WAITING))
        return sum(self._read(count, body) for count, body in answers)

    def _read(self, count: int, body: bytes) -> int:
        """Sort an answer. Blocks that were reported before are left out: their leases may have ended."""
        start = protocol.START.unpack_from(body)[0]
        told = np.frombuffer(body, np.uint32, count, protocol.START.size)
        keys, tiers = self.keys[start : start + count], body[len(body) - count :]
        rows: list[int] = told.tolist()
        before = self._codes[start : start + count]
        if before.count(protocol.WAITING) < count:
            news = [at for at, code in enumerate(before) if code == protocol.WAITING]
            keys, rows, tiers = [keys[at] for at in news], [rows[at] for at in news], bytes(tiers[at] for at in news)
            for at, row in zip(news, rows, strict=True):
                self._codes[start + at] = row
        else:
            self._codes[start : start + count] = rows
        self.row_of.update(zip(keys, rows, strict=True))
        if tiers.strip(b"\0") and self.link is not None:
            names = self.link.welcome.tiers
            self._tiers.update((key, names[tier]) for key, tier in zip(keys, tiers, strict=True) if tier)
        misses = 0
        if protocol.may_have_codes(body):
            misses = rows.count(protocol.MISSING)
            pairs = [(key, row) for key, row in zip(keys, rows, strict=True) if row <= ROW_MAX]
            keys, rows = [key for key, _ in pairs], [row for _, row in pairs]
        if self.link is not None:
            self.link.know(keys, rows)  # the rows are leased, so that none has changed since the answer
        return misses

    def outdate(self) -> None:
        """Let the request store and load nothing: it began before a reset."""
        self.is_outdated = True
        rows = self.rows
        for key, row in rows.items():
            if row > ROW_MAX:
                rows[key] = protocol.MISSING

    def forget_answers(self) -> None:
        """Drop all answers of a server that has gone."""
        self.link, self.unsent, self.waits_for_answer = None, 0, False
        self.keys, self.answers, self.is_unread = [], [], False
        self._codes, self.row_of, self._tiers = [], {}, {}
        self.known_asked = []
        self.stored, self.stored_asked = {}, []


def parts_of(
    keys: Sequence[OffloadKey], first: int = 0, *, are_alike: bool = False
) -> Sequence[tuple[Sequence[OffloadKey], bytes]]:
    """Return the keys from `first` on, with their bytes, one message a part: at most `KEYS_MAX` keys, of one length.

    `are_alike` says that all keys have one length, as an engine's: to measure each is a third of a request's cost.
    """
    parts = []
    while first < len(keys):
        part = keys[first : first + protocol.KEYS_MAX] if first or len(keys) > protocol.KEYS_MAX else keys
        size, packed = len(part[0]), b"".join(part)
        if len(packed) != size * len(part) or not (are_alike or set(map(len, part)) == {size}):
            part = part[: next(at for at, key in enumerate(part) if len(key) != size)]
            packed = b"".join(part)
        parts.append((part, packed))
        first += len(part)
    return parts
