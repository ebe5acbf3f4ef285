"""An engine's connection to its host's server. It counts resets, notices a silent server, and keeps rows to write.

`AttachedManager` owns it. The scheduler's thread calls, or the idle poll's with the manager's lock; no call waits. No
reset is lost: a server that comes back gets it before the server may answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Final

from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment, HostLink, reason_for
from tiered_kv.server.protocol import Message, ProtocolError
from tiered_kv.tiering.spell import Lost, Spell

PACKETS_A_TURN: Final = 64
"""Packets that one `poll` reads at most."""
RESET_S: Final = 60.0
"""A server that starts anew within this time after a reset is reset again. The last server may have been killed before
its tiers had written the reset."""
SPARE_S: Final = 1.0
"""How long an engine keeps rows that its stores do not need."""
_log = logging.getLogger(__name__)
_SILENT: Final = (
    "every block is a miss until it does; see whether its process was stopped (state T or D in ps), or its machine is "
    "overloaded"
)
_ANSWERED: Final = frozenset((protocol.ACQUIRE, protocol.GRANT))
"""Messages that the server owes an answer."""
_OF_REQUESTS: Final = frozenset((protocol.ANSWER, protocol.KNOWN, protocol.STORED))
"""Messages about one request: only the manager handles them."""


class ServerConnection:
    """Sends an engine's messages and receives the server's. The manager owns it; no method waits.

    Args:
        attachment: Connects to the server; `close` closes it.
        clock: Seconds of a monotonic clock.
        on_message: Called with each message of the server.
        on_reset: Called when another engine has reset the namespace, or may have.
        on_lost: Called when the server has gone: its answers are not valid any more, except for copies that run.
        on_attached: Called with each new connection.

    Attributes:
        link: The open connection; None while the server is away.
        epoch: The number of resets of the namespace that this engine knows.
        is_silent: Whether the server does not answer.
        losses: How many connections were lost.
    """

    def __init__(
        self,
        attachment: Attachment,
        clock: Callable[[], float],
        *,
        on_message: Callable[[Message], object],
        on_reset: Callable[[], object],
        on_lost: Callable[[], object],
        on_attached: Callable[[HostLink], object],
    ) -> None:
        self.link: HostLink | None = None
        self.epoch = 0
        self.is_silent = False
        self.losses = 0
        self._attachment = attachment
        self._clock = clock
        self._on_message, self._on_reset, self._on_lost = on_message, on_reset, on_lost
        self._on_attached = on_attached
        self._instance = ""
        """The name of the last server's memory; see `Welcome`."""
        self._epochs_before = 0
        """`epoch` less the server's own number, which begins with 0 when a server starts."""
        self._resets_owed = 0
        """Resets of this engine that may not have reached the server."""
        self._reset_s = -math.inf
        """When the namespace was last reset: by this engine, or by another one while this one was attached."""
        self._lost: HostLink | None = None
        """The last connection, while copies may run."""
        head = f"the cache at {attachment.path} does not answer"
        self._silence = Spell(head, "times", lambda line: _log.warning("%s", line))
        self._heard_s: float | None = None
        """Since when the server owes an answer; None if it owes no answer."""

    @property
    def is_attached(self) -> bool:
        """Whether the server answers, and all workers have its rows."""
        link = self.link
        return link is not None and not self.is_silent and link.workers >= self._attachment.hello.workers

    def poll(self, now_s: float, *, is_copying: bool) -> None:
        """Take the server's messages, and notice that it has gone, or has come back.

        With `is_copying`, workers still copy to and from the rows of the last connection. It makes no new connection
        until they end.
        """
        link = self.link
        if link is None:
            if not is_copying:
                self._attach()
            return
        try:
            for message in link.channel.receive(PACKETS_A_TURN, is_expected=self._heard_s is not None):
                self._heard_s = None
                if self.is_silent:
                    self._end_silence(now_s)
                if message.code not in _OF_REQUESTS:
                    self._take(message, link)
                self._on_message(message)
                if self.link is not link:
                    return
            if self._heard_s is None and link.asked:
                self._heard_s = now_s  # the server owes more than one answer
            is_late = self._heard_s is not None and now_s - self._heard_s > link.welcome.answer_s
            if is_late and not self.is_silent:
                self.is_silent = True
                self._silence.begin(now_s, _SILENT, Lost(0, 0))
                link.channel.add(protocol.PING)  # a PONG ends the silence, also if the questions are lost
            elif self.is_silent:
                self._silence.go_on(now_s)
            link.channel.flush()
        except Exception as error:  # an error of any kind costs only the connection
            self.lose(reason_for(error))

    def send(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        """Queue a message for the next `flush` or `poll`."""
        if self.link is not None:
            if self._heard_s is None and code in _ANSWERED:
                self._heard_s = self._clock()
            try:
                self.link.channel.add(code, number, count, body, flags)
            except ProtocolError as error:
                self.lose(str(error))

    def flush(self) -> None:
        if self.link is not None:
            try:
                self.link.channel.flush()
            except TieredKVError as error:
                self.lose(str(error))

    def _end_silence(self, now_s: float) -> None:
        self.is_silent = False
        path = self._attachment.path
        self._silence.end(
            now_s, Lost(0, 0), lambda seconds, _: f"the cache at {path} answers again after {rounded_seconds(seconds)}"
        )

    def lose(self, why: str) -> None:
        """End the connection: the server has gone, or breaks the protocol."""
        link, self.link = self.link, None
        if link is not None:
            self._silence.is_on = False  # the attachment logs the loss
            self.losses += 1
            self._lost = link
            link.channel.close()
            self._attachment.lost(why)
            self._on_lost()

    def close(self, *, is_copying: bool) -> None:
        """End the connection. Rows that copies still use stay this engine's until its processes have ended."""
        link, self.link = self.link, None
        if link is not None:
            if not is_copying:
                link.say_bye()
            link.close()
        lost, self._lost = self._lost, None
        if lost is not None:
            lost.close()
        self._attachment.close()

    # Rows to write.

    def ask_rows(self, wanted: int) -> None:
        """Ask for rows to write if fewer than `wanted` are free or requested."""
        link = self.link
        if link is None:
            return
        coming = len(link.free) + sum(link.asked)
        if coming < min(wanted, link.welcome.grant_max):
            link.asked.append(min(max(wanted, link.welcome.grant_rows), link.welcome.grant_max) - coming)
            self.send(protocol.GRANT, link.asked[-1])

    def return_rows(self, now_s: float, *, is_unused: bool) -> None:
        """Give back the rows that no store has needed for `SPARE_S`, or all of an unused engine; keep `grant_rows`."""
        link = self.link
        if link is None:
            return
        link.spare = min(link.spare, len(link.free))
        if not is_unused and now_s - link.spare_since_s < SPARE_S:
            return
        kept = link.welcome.grant_rows + (0 if is_unused else len(link.free) - link.spare)
        while len(link.free) > kept:
            at = max(kept, len(link.free) - protocol.ROWS_MAX)
            self.send(protocol.RETURN, count=len(link.free) - at, body=protocol.pack_rows(link.free[at:]))
            del link.free[at:]
        link.spare, link.spare_since_s = len(link.free), now_s

    def release(self, number: int, rows: Sequence[int]) -> None:
        """End a request's leases of these rows."""
        for at in range(0, len(rows), protocol.ROWS_MAX):
            part = rows[at : at + protocol.ROWS_MAX]
            self.send(protocol.RELEASE, number, len(part), protocol.pack_rows(part))

    # Resets.

    def reset(self) -> None:
        """Let the server forget every block of the namespace, for all engines."""
        self.epoch += 1
        self._resets_owed += 1
        self._reset_s = self._clock()
        self._attachment.note_reset()  # first: so the reset is carried out even if this process ends now
        if self.link is not None:
            self.link.forget_known()
            self.send(protocol.RESET, self._attachment.resets.number)
            self.flush()

    def epoch_there(self, epoch: int) -> int:
        """Return the server's number for an epoch of this engine."""
        return epoch - self._epochs_before

    def _take(self, message: Message, link: HostLink) -> None:
        code = message.code
        if code == protocol.GRANTED:
            rows = protocol.split_rows(message.body, message.items)
            link.check_rows(rows)
            distinct = set(rows)
            if len(distinct) < len(rows) or not distinct.isdisjoint(link.free):
                raise ProtocolError("the server grants a row twice: two blocks would be written to it")
            if len(link.free) + len(rows) > link.welcome.grant_max:
                raise ProtocolError(f"the server grants more than {link.welcome.grant_max} rows")
            link.free += rows
            del link.asked[:1]
        elif code == protocol.EPOCH:
            if message.items and self._resets_owed:  # a reset of others is no answer to this engine's
                self._resets_owed -= 1
            if message.number + self._epochs_before > self.epoch:
                self._reset_s = self._clock()
            self._reach(message.number + self._epochs_before)
            if not self._resets_owed:  # the server may have made one reset of several, or made them before
                self._epochs_before = self.epoch - message.number
        elif code == protocol.WORKERS:
            link.workers = message.number
        elif code == protocol.PONG:
            link.pong = max(link.pong, message.number)  # 0 answers a silence
        elif code in (protocol.GOODBYE, protocol.REFUSED):
            raise ProtocolError(bytes(message.body).decode(errors="replace") or "the server ends")

    def _reach(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            if self.link is not None:
                self.link.forget_known()
            self._on_reset()

    def _attach(self) -> None:
        if self._lost is not None:
            self._attachment.discard(self._lost)
            self._lost = None
        link = self.link = self._attachment.take_link()
        if link is None:
            return
        self._heard_s, self.is_silent = None, False
        self._on_attached(link)
        if link.welcome.instance != self._instance:
            self._instance, self._epochs_before = link.welcome.instance, self.epoch
            self._resets_owed += self._clock() - self._reset_s < RESET_S
        elif self._resets_owed:  # unknown: has the server made these resets, and have others reset it
            self._reach(self.epoch + 1)
        self._resets_owed = 0 if link.resets_seen == self._attachment.resets.count else min(self._resets_owed, 1)
        count = link.welcome.epoch + self._resets_owed
        self._reach(count + self._epochs_before)  # resets of others while this engine had no connection
        self._epochs_before = self.epoch - count
        if self._resets_owed:
            self.send(protocol.RESET, self._attachment.resets.number)
