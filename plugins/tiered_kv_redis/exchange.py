"""Conversations with servers: what is sent in one go to each of them, and what they answer."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import Codec
from tiered_kv.toolkit.record import encode_record
from tiered_kv_redis.connection import Link, WireConnection
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.reasons import PROTOCOL, REFUSES_STORES, TIMEOUT, WireError, reason_of_error
from tiered_kv_redis.replies import Refusal, Reply
from tiered_kv_redis.stream import Buffer

_STORED = b"+OK\r\n"


class Exchange(ABC):
    """Commands for one server. `converse` runs it; what did not succeed is in `failures` afterwards.

    Args:
        node: The server.
        count: How many commands.
    """

    def __init__(self, node: Node, count: int) -> None:
        self.node = node
        self.count = count
        self.failures: dict[int, str] = {}
        """Why commands failed, by their position."""
        self.trouble = ""
        """Why the whole exchange ended early; empty if it did not."""
        self.is_starved = False
        """Whether it ended because another server took all the time: this one is not to blame."""
        self.answered = 0
        """Commands, from the first on, whose reply has been read."""

    @abstractmethod
    def begin(self, link: Link, deadline: float) -> None:
        """Send the commands, or as many as may be under way."""

    @abstractmethod
    def finish(self, link: Link, deadline: float) -> None:
        """Read the replies, raising `answered` with each, and send what has not been sent."""

    def end(self, trouble: str) -> None:
        """Count what has no reply as failed, if there was trouble."""
        self.trouble = self.trouble or trouble
        if self.trouble:
            for position in range(self.answered, self.count):
                self.failures.setdefault(position, self.trouble)


def converse(exchanges: Sequence[Exchange], deadline: float) -> None:
    """Run exchanges with different servers side by side: everything is sent before anything is waited for.

    A server that has to be connected to first comes last, and alone: it may not answer, and so take all the time.
    A connection goes back to its pool only if every reply on it has been read; otherwise it is closed.

    Args:
        exchanges: One a server.
        deadline: Seconds of `time.monotonic()`.
    """
    ready = [each for each in exchanges if each.node.has_connection or each.node.is_down]
    _run(ready, deadline)
    if len(ready) < len(exchanges):
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
            except NodeDownError as error:
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
                exchange.node.drop(connection, "" if exchange.is_starved else exchange.trouble)
            else:
                exchange.node.give_back(connection)


def _finish_as_they_answer(begun: list[tuple[Exchange, Link]], deadline: float) -> None:
    """Finish the exchanges with servers that answer; those with servers that do not end at the deadline."""
    if len(begun) == 1 or time.monotonic() >= deadline:
        for exchange, link in begun:
            _guarded(exchange, link, exchange.finish, deadline)
    else:
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
    if time.monotonic() >= deadline:
        exchange.is_starved = True
        exchange.end(TIMEOUT)
        return
    try:
        step(link, deadline)
    except (OSError, WireError) as error:
        exchange.end(reason_of_error(error))


class Calls(Exchange):
    """Small commands, whose replies are a word, a number, or nothing.

    Args:
        node: The server.
        commands: As `replies.command` makes them.
    """

    def __init__(self, node: Node, commands: Sequence[bytes]) -> None:
        super().__init__(node, len(commands))
        self.replies: list[Reply] = []
        self._commands = commands

    def begin(self, link: Link, deadline: float) -> None:
        link.stream.send((b"".join(self._commands),), deadline)

    def finish(self, link: Link, deadline: float) -> None:
        for position in range(self.count):
            reply = link.replies.reply(deadline)
            if isinstance(reply, Refusal):
                self.failures[position] = reply.reason
            self.replies.append(reply)
            self.answered += 1


class Stores(Exchange):
    """Blocks to be stored, sent from where they lie.

    Args:
        node: The server.
        keys: The blocks' keys.
        wire_keys: What they are called there.
        blocks: The blocks.
        namespace_digest: For the records.
        codec: For the records.
        ttl_ms: How long they shall live; None for ever.
        overwrite: Whether to replace what lies there; if not, the server says where something does.
        send_bytes: Of records in one call to send, at most one block more.
    """

    def __init__(
        self,
        node: Node,
        keys: Sequence[OffloadKey],
        wire_keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        namespace_digest: bytes,
        codec: Codec,
        ttl_ms: int | None,
        overwrite: bool,
        send_bytes: int,
    ) -> None:
        super().__init__(node, len(keys))
        self.occupied: list[int] = []
        """Positions where something lies already, which was left there."""
        self._keys = keys
        self._wire_keys = wire_keys
        self._blocks = blocks
        self._namespace_digest = namespace_digest
        self._codec = codec
        self._send_bytes = send_bytes
        options = [] if overwrite else [b"NX"]
        if ttl_ms is not None:
            options += [b"PX", b"%d" % ttl_ms]
        self._opening = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        self._ending = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(option), option) for option in options)

    def begin(self, link: Link, deadline: float) -> None:
        parts: list[Buffer] = []
        size = 0
        ending = b""
        room = link.room
        room.clear()
        for key, wire_key, block in zip(self._keys, self._wire_keys, self._blocks, strict=True):
            header, payload = encode_record(key, block, self._namespace_digest, self._codec, room.take)
            length = len(header) + len(payload)
            parts.append(
                b"%b%b$%d\r\n%b\r\n$%d\r\n%b" % (ending, self._opening, len(wire_key), wire_key, length, header)
            )
            parts.append(payload)
            ending = self._ending
            size += length
            if size >= self._send_bytes:
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
        if reply is None:
            self.occupied.append(self.answered)
        elif isinstance(reply, Refusal):
            self.failures[self.answered] = reply.reason
            if reply.reason in REFUSES_STORES:
                self.node.refuse_stores(reply.reason)
        elif reply != b"OK":
            raise WireError("protocol")
