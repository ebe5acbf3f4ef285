"""What an engine knows of one of its requests from the server of its host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.hints import Hints
from tiered_kv.server import protocol
from tiered_kv.server.attach import HostLink
from tiered_kv.server.protocol import ROW_MAX, Message


@dataclass(slots=True, eq=False)
class AttachedRequest:
    """A request of the engine."""

    number: int
    req_context: ReqContext
    hints: Hints
    link: HostLink | None = None
    """The connection that knows the request; None until something is sent of it."""
    epoch: int = 0
    is_outdated: bool = False
    """Whether it began before a reset: it stores and loads nothing."""
    keys: list[OffloadKey] = field(default_factory=list)
    """Those that the server was asked for, in order."""
    rows: dict[OffloadKey, int] = field(default_factory=dict)
    """The last answer for each: a row that is leased, or a code."""
    codes: list[int] = field(default_factory=list)
    """The first final answer for each of `keys`, or `WAITING`."""
    tiers: dict[OffloadKey, int] = field(default_factory=dict)
    known_asked: list[Sequence[OffloadKey]] = field(default_factory=list)
    """Keys of which the server was asked whether they are stored, message by message."""
    stored: dict[OffloadKey, bool | None] = field(default_factory=dict)
    """Blocks of which the server was asked whether any tier has them, and its answers; of programs only."""
    stored_asked: list[Sequence[OffloadKey]] = field(default_factory=list)
    unsent: int = 0
    """Keys from this one on have not been asked for."""
    asked_s: float = 0.0
    waits_for_answer: bool = False
    """Whether nothing has come since it last asked."""
    is_ahead: bool = False
    transfers: int = 0
    """Blocks that the engine's workers read or write."""
    is_finished: bool = False

    def ask(self, keys: Iterable[OffloadKey]) -> bool:
        """Note keys to be asked for, once each and `REQUEST_KEYS_MAX` at most; return whether there are new ones."""
        rows = self.rows
        new = dict.fromkeys(islice(keys, protocol.REQUEST_KEYS_MAX - len(self.keys)), protocol.WAITING)
        if rows:
            new = {key: code for key, code in new.items() if key not in rows}
        rows.update(new)
        self.keys += new
        self.codes += new.values()
        return bool(new)

    def take_answer(self, message: Message) -> tuple[Sequence[OffloadKey], list[int]]:
        """Note an ANSWER; return its keys, and their rows or codes. What was told before is left out.

        Raises:
            ProtocolError, ValueError, struct.error: It is no answer to this request.
        """
        count, size, body = message.items, protocol.START.size, message.body
        start = protocol.START.unpack_from(body)[0]
        rows = protocol.split_rows(body[size : size + 4 * count], count)
        keys: Sequence[OffloadKey] = self.keys[start : start + count]
        tiers = bytes(body[size + 4 * count :])
        before = self.codes[start : start + count]
        if before.count(protocol.WAITING) < count:  # the lease of what was told before may have ended
            news = [at for at, code in enumerate(before) if code == protocol.WAITING]
            keys, rows, tiers = [keys[at] for at in news], [rows[at] for at in news], bytes(tiers[at] for at in news)
            for at, row in zip(news, rows, strict=True):
                self.codes[start + at] = row
        else:
            self.codes[start : start + count] = rows
        self.rows.update(zip(keys, rows, strict=True))
        self.waits_for_answer = False
        if tiers.count(0) < len(keys):
            self.tiers.update((key, tier) for key, tier in zip(keys, tiers, strict=True) if tier)
        return keys, rows

    def outdate(self) -> None:
        """Let the request store and load nothing: it began before a reset."""
        self.is_outdated = True
        for key, row in self.rows.items():
            if row > ROW_MAX:
                self.rows[key] = protocol.MISSING

    def forget_answers(self) -> None:
        """Forget what a server has answered that has gone."""
        self.link, self.unsent, self.waits_for_answer = None, 0, False
        self.keys, self.codes, self.rows, self.tiers = [], [], {}, {}
        self.known_asked = []
        self.stored, self.stored_asked = {}, []


def parts_of(keys: Sequence[OffloadKey]) -> Iterable[Sequence[OffloadKey]]:
    """Yield the keys in order, for one message each: at most `KEYS_MAX`, of one length."""
    first = 0
    while first < len(keys):
        end = min(first + protocol.KEYS_MAX, len(keys))
        size = len(keys[first])
        if set(map(len, keys[first:end])) != {size}:
            end = next(at for at in range(first, end) if len(keys[at]) != size)
        yield keys[first:end]
        first = end
