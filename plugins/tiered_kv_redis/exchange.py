"""Exchanges with servers: pipelined commands for each of them, and their replies."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import PLAIN, CodecSet
from tiered_kv.toolkit.record import encode_record
from tiered_kv_redis.connection import Link, WireConnection
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import PROTOCOL, TIMEOUT, NodeError, reason_of_error
from tiered_kv_redis.replies import Refusal, Reply
from tiered_kv_redis.stream import Buffer

Failures = dict[int, str]
"""Why blocks failed, by their position in a batch."""
_STORED = b"+OK\r\n"


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one part of a job, or the names of a lookup."""

    keys: Sequence[OffloadKey]
    names: Sequence[bytes]  # in the servers
    blocks: Sequence[memoryview]  # empty for a lookup
    deadline: float  # for all work with them, in seconds of `time.monotonic()`


@dataclass(frozen=True, slots=True)
class Transfer:
    """How blocks are stored and loaded."""

    namespace_digest: bytes
    codecs: CodecSet = PLAIN  # payloads that are not raw are read through a buffer
    ttl_ms: int | None = None  # None for ever
    send_bytes: int = 1 << 20  # of records in one call to send, at most one block more
    pipeline_bytes: int = 1 << 20
    """Of replies that may be pending; two blocks may exceed it. A server buffers unsent replies, which for many large
    blocks is slower than sending them one by one."""


class Exchange(ABC):
    """Commands for one server, one for each block; `converse` runs it.

    `positions` are those of its blocks in a batch. It puts the reasons of failed ones into `failures`, which exchanges
    may share.
    """

    def __init__(self, node: Node, positions: Sequence[int], failures: Failures) -> None:
        self.node = node
        self.positions = positions
        self.failures = failures
        self.count = len(positions)
        self.trouble = ""
        """Why the whole exchange ended early; empty if it did not."""
        self.answered = 0
        """Commands, from the first on, whose reply has been read."""

    @abstractmethod
    def begin(self, link: Link, deadline: float) -> None:
        """Send the commands, or as many as may be pending."""

    @abstractmethod
    def finish(self, link: Link, deadline: float) -> None:
        """Read the replies, raising `answered` with each, and send the remaining commands."""

    def end(self, trouble: str) -> None:
        """Count commands without a reply as failed, if the exchange failed."""
        self.trouble = self.trouble or trouble
        if self.trouble:
            for position in self.positions[self.answered :]:
                self.failures.setdefault(position, self.trouble)

    def reasons(self) -> list[str]:
        """Return why blocks of this exchange failed, one word for each."""
        return [self.failures[position] for position in self.positions if position in self.failures]


def converse(exchanges: Sequence[Exchange], deadline: float) -> None:
    """Run exchanges with different servers in parallel: all commands are sent before the first reply is awaited.

    A server without an open connection comes last, and alone: it may not answer, and use up the time.
    A connection is used again only if every reply on it has been read; otherwise it is closed.
    """
    ready = [each for each in exchanges if each.node.has_connection or each.node.is_down]
    _run(ready, deadline)
    for exchange in exchanges:
        if exchange not in ready:
            _run([exchange], deadline)


def _run(exchanges: Sequence[Exchange], deadline: float) -> None:
    open_ones: list[tuple[Exchange, WireConnection]] = []
    try:
        for exchange in exchanges:
            if time.monotonic() >= deadline:
                exchange.end(TIMEOUT)
                continue
            try:
                connection = exchange.node.take()
            except NodeError as error:
                exchange.end(error.reason)
                continue
            open_ones.append((exchange, connection))
            _guarded(exchange, connection.link, exchange.begin, deadline)
        _finish_as_they_answer([(each, taken.link) for each, taken in open_ones if not each.trouble], deadline)
    finally:
        for exchange, connection in open_ones:
            clean = exchange.answered == exchange.count and not connection.link.replies.buffered_bytes
            if exchange.trouble or not clean:
                exchange.end(PROTOCOL)
                exchange.node.drop(connection, exchange.trouble)
            else:
                exchange.node.give_back(connection)


def _finish_as_they_answer(begun: list[tuple[Exchange, Link]], deadline: float) -> None:
    """Finish the exchanges with servers that answer; those with servers that do not end at the deadline."""
    if len(begun) == 1 or time.monotonic() >= deadline:
        for exchange, link in begun:
            _guarded(exchange, link, exchange.finish, deadline)
        return
    poll = select.poll()
    waiting = {link.fd: (exchange, link) for exchange, link in begun}
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting and (ready := poll.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for fd, _ in ready:
            poll.unregister(fd)
            exchange, link = waiting.pop(fd)
            _guarded(exchange, link, exchange.finish, deadline)
    for exchange, _ in waiting.values():
        exchange.end(TIMEOUT)


def _guarded(exchange: Exchange, link: Link, step: Callable[[Link, float], None], deadline: float) -> None:
    try:
        step(link, deadline)
    except (OSError, NodeError) as error:
        exchange.end(reason_of_error(error))


class Calls(Exchange):
    """Small commands, one for each position, whose replies are a word, a number, or nothing."""

    def __init__(self, node: Node, positions: Sequence[int], failures: Failures, commands: Mapping[int, bytes]) -> None:
        super().__init__(node, positions, failures)
        self.replies: dict[int, Reply] = {}
        """By position; an error is in `failures`, too."""
        self._commands = commands

    def begin(self, link: Link, deadline: float) -> None:
        link.stream.send((b"".join([self._commands[at] for at in self.positions]),), deadline)

    def finish(self, link: Link, deadline: float) -> None:
        for position in self.positions:
            reply = self.replies[position] = link.replies.reply(deadline)
            if isinstance(reply, Refusal):
                self.failures[position] = reply.reason
            self.answered += 1


class Stores(Exchange):
    """Blocks to store, sent without a copy. Without `overwrite` the server says where a value exists, and keeps it."""

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
        self.occupied: list[int] = []
        """Positions with an existing value, which was left."""
        self._batch = batch
        self._transfer = transfer
        options = [] if overwrite else [b"NX"]
        if transfer.ttl_ms is not None:
            options += [b"PX", b"%d" % transfer.ttl_ms]
        self._opening = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
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
            self.failures[position] = reply.reason
        elif reply != b"OK":
            raise NodeError(PROTOCOL)
