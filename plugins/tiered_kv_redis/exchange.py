"""Exchanges with servers: pipelined commands for each server, and the replies.

The tier's workers call it, each with connections of its own. An exchange ends by its deadline. After an error its
connection is closed, so no reply belongs to another command.
"""

from __future__ import annotations

import math
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason
from tiered_kv.toolkit.codecs import PLAIN, CodecSet
from tiered_kv.toolkit.record import encode_record
from tiered_kv.toolkit.resolver import words_of
from tiered_kv_redis.connection import Link
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import NodeError, RedisReason, ServerFailure, reason_of_error
from tiered_kv_redis.replies import Buffer, Refusal, Reply

Failures = dict[int, RedisReason]  # why blocks failed, by their position in a batch
_STORED = b"+OK\r\n"
_BLAMED_S = 0.05
_BLAMED_SHARE = 0.5
"""A server is down after a timeout if it had this long for its answer, or this share of the time of all servers."""
_LONG_BYTES = (1 << 20) - (1 << 10)
"""A server may close the connection for one value of this length: the least `client-query-buffer-limit` is 1 MiB."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one part of a job, or the keys of a lookup."""

    keys: Sequence[OffloadKey]
    names: Sequence[bytes]  # the keys' names in the servers
    blocks: Sequence[memoryview]  # empty for a lookup
    deadline: float
    """The deadline of the commands, in seconds of `time.monotonic()`."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How blocks are stored and loaded."""

    namespace_digest: bytes
    codecs: CodecSet = PLAIN  # payloads that are not raw are read through a buffer
    ttl_ms: int | None = None  # None: blocks do not expire
    send_bytes: int = 1 << 20  # records in one call to send, plus at most one block
    pipeline_bytes: int = 1 << 20
    """Bytes of replies that may be pending; two blocks are always allowed. A server buffers replies that it cannot send
    yet. For many large blocks, this is slower than sending them one by one."""


class Exchange(ABC):
    """Commands for one server, one for each block; `run` sends them and reads the replies.

    `positions` are the blocks' positions in a batch. Reasons of failed blocks go into `failures`, which the exchanges
    with other servers may share.
    """

    def __init__(self, node: Node, positions: Sequence[int], failures: Failures) -> None:
        self.node = node
        self.positions = positions
        self.failures = failures
        self.count = len(positions)
        self.failure: RedisReason | None = None  # why the exchange ended early; None if it did not
        self.waited_s = math.inf  # how long the server had for its answer, before that
        self.answered = 0  # commands, from the first on, with a reply that has been read
        self.longest_bytes = 0  # the longest value that it sends

    @abstractmethod
    def begin(self, link: Link, deadline: float) -> None:
        """Send the commands, up to the limit of pending replies."""

    @abstractmethod
    def finish(self, link: Link, deadline: float) -> None:
        """Read the replies, counting each in `answered`, and send the remaining commands."""

    def fail(self, reason: RedisReason, waited_s: float = math.inf) -> None:
        """End the exchange early. Each block without a reply fails with the first reason of the exchange.

        Before a timeout, the server had `waited_s` for its answer: little, if other servers took the time.
        """
        if self.failure is None:
            self.failure, self.waited_s = reason, waited_s
        for position in self.positions[self.answered :]:
            self.failures.setdefault(position, self.failure)

    def closing_reason(self) -> RedisReason | None:
        """Return the likely reason why a server that still answers closed the connection; None if unknown."""
        return ServerFailure.QUERY_BUFFER if self.longest_bytes >= _LONG_BYTES else None

    def refuse(self, position: int, reply: Refusal) -> None:
        """Note the server's error reply for one block."""
        self.failures[position] = reply.reason
        self.node.said[reply.reason] = reply.text

    def reasons(self) -> list[RedisReason]:
        """Return the reason of each failed block of this exchange."""
        return [self.failures[position] for position in self.positions if position in self.failures]


def run(exchanges: Sequence[Exchange], deadline: float) -> None:
    """Run exchanges with different servers in parallel: all commands are sent before the first reply is awaited.

    A server without an open connection comes last, and alone: it may not answer until the deadline.
    A connection is used again only if every reply on it has been read; otherwise it is closed.
    """
    ready = [each for each in exchanges if each.node.has_connection or each.node.is_down]
    _run_together(ready, deadline)
    for exchange in exchanges:
        if exchange not in ready:
            _run_together([exchange], deadline)


def _run_together(exchanges: Sequence[Exchange], deadline: float) -> None:
    begun: list[tuple[Exchange, Link]] = []
    blamed_s = min(_BLAMED_S, _BLAMED_SHARE * (deadline - time.monotonic()))
    try:
        for exchange in exchanges:
            if time.monotonic() >= deadline:
                exchange.fail(Reason.TIMEOUT)
                continue
            try:
                link = exchange.node.take()
            except NodeError as error:
                exchange.fail(error.reason)
                continue
            begun.append((exchange, link))
            _guarded(exchange, link, partial(_begin, exchange), deadline)
        _finish_as_they_answer([(each, link) for each, link in begun if not each.failure], deadline)
    finally:
        for exchange, link in begun:
            if exchange.answered < exchange.count or link.replies.buffered_bytes:
                exchange.fail(ServerFailure.PROTOCOL)
            if ServerFailure.READ_ONLY in exchange.reasons():
                exchange.node.renew()
            if exchange.failure:
                is_blamed = exchange.failure is not Reason.TIMEOUT or exchange.waited_s >= blamed_s
                exchange.node.drop(link, exchange.failure if is_blamed else None)
            else:
                exchange.node.give_back(link)


def _begin(exchange: Exchange, link: Link, deadline: float) -> None:
    with suppress(
        BrokenPipeError, ConnectionResetError
    ):  # the server closed the connection. It may have sent a reason, which `finish` reads
        exchange.begin(link, deadline)


def _finish_as_they_answer(begun: list[tuple[Exchange, Link]], deadline: float) -> None:
    """Finish the exchanges in the order of the servers' answers.

    A server without an answer fails at the deadline, or before it once all were silent for too long.
    """
    if len(begun) == 1:  # no poll is needed
        exchange, link = begun[0]
        _guarded(exchange, link, exchange.finish, deadline)
        return
    poll = select.poll()
    waiting = {link.fd: (exchange, link) for exchange, link in begun}
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    begun_s = time.monotonic()
    end_s = min(deadline, begun_s + begun[0][0].node.silence_s) if begun else deadline
    while waiting and (ready := poll.poll(max(0.0, end_s - time.monotonic()) * 1000)):
        for fd, _ in ready:
            poll.unregister(fd)
            exchange, link = waiting.pop(fd)
            _guarded(exchange, link, exchange.finish, deadline)
    for exchange, _ in waiting.values():
        exchange.fail(Reason.TIMEOUT, time.monotonic() - begun_s)


def _guarded(exchange: Exchange, link: Link, step: Callable[[Link, float], None], deadline: float) -> None:
    began_s = time.monotonic()
    try:
        step(link, deadline)
    except (OSError, NodeError) as error:
        reason = reason_of_error(error)
        if isinstance(error, OSError):
            exchange.node.said[reason] = words_of(error)
        if isinstance(error, ConnectionError) and (closes := exchange.closing_reason()) and exchange.node.answers():
            exchange.node.said[closes] = ""
            reason = closes
        exchange.fail(reason, time.monotonic() - began_s)


class Calls(Exchange):
    """Small commands, one for each position, with a word, a number or nil as reply."""

    def __init__(self, node: Node, positions: Sequence[int], failures: Failures, commands: Mapping[int, bytes]) -> None:
        super().__init__(node, positions, failures)
        self.replies: dict[int, Reply] = {}
        """The replies, by position of the command. Errors are in `failures` too."""
        self._commands = commands
        self.longest_bytes = max(map(len, commands.values()), default=0)

    def begin(self, link: Link, deadline: float) -> None:
        link.stream.send((b"".join([self._commands[at] for at in self.positions]),), deadline)

    def finish(self, link: Link, deadline: float) -> None:
        for position in self.positions:
            reply = self.replies[position] = link.replies.reply(deadline)
            if isinstance(reply, Refusal):
                self.refuse(position, reply)
            self.answered += 1


class Stores(Exchange):
    """Blocks to store, sent without a copy. Without `overwrite`, the server keeps an existing value."""

    def __init__(
        self,
        node: Node,
        positions: Sequence[int],
        failures: Failures,
        batch: Batch,
        transfer: Transfer,
        *,
        overwrite: bool,
    ) -> None:
        super().__init__(node, positions, failures)
        self.occupied: list[int] = []  # positions of kept values
        self._batch = batch
        self._transfer = transfer
        options = [] if overwrite else [b"NX"]
        if transfer.ttl_ms is not None:
            options += [b"PX", b"%d" % transfer.ttl_ms]
        self._opening = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        self.longest_bytes = max((len(batch.blocks[at]) for at in positions), default=0)
        self._ending = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)

    def begin(self, link: Link, deadline: float) -> None:
        keys, names, blocks = self._batch.keys, self._batch.names, self._batch.blocks
        digest, codecs = self._transfer.namespace_digest, self._transfer.codecs
        parts: list[Buffer] = []
        size = 0
        ending = b""
        room = link.room
        room.clear()
        for at in self.positions:
            name = names[at]
            header, payload = encode_record(keys[at], blocks[at], digest, codecs, room.take)
            length = len(header) + len(payload)
            parts.append(b"%b%b$%d\r\n%b\r\n$%d\r\n%b" % (ending, self._opening, len(name), name, length, header))
            parts.append(payload)
            ending = self._ending
            size += length
            if size >= self._transfer.send_bytes:
                parts.append(ending)
                link.stream.send(parts, deadline)
                parts, size, ending = [], 0, b""
                room.clear()
        if parts:
            parts.append(ending)
            link.stream.send(parts, deadline)

    def finish(self, link: Link, deadline: float) -> None:
        while self.answered < self.count:
            done = link.replies.skip(_STORED, self.count - self.answered, deadline)
            self.answered += done
            if not done:
                self._note(link.replies.reply(deadline))
                self.answered += 1

    def _note(self, reply: Reply) -> None:
        position = self.positions[self.answered]
        if reply is None:
            self.occupied.append(position)
        elif isinstance(reply, Refusal):
            self.refuse(position, reply)
        elif reply != b"OK":
            raise NodeError(ServerFailure.PROTOCOL)
