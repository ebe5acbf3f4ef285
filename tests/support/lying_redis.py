"""A Redis server with scripted replies: too long, malformed, or valid."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import BinaryIO

from tests.support.loopback import LoopbackServer

Answer = Callable[[list[bytes]], Iterable[bytes]]
"""From a command and its arguments to the pieces of its reply, as they are sent."""


class LyingRedis(LoopbackServer):
    """A Redis server with scripted replies.

    Args:
        answer: Called on the thread of a connection. An `OSError` closes the connection.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with suppress(ValueError), sock.makefile("rb") as received:
            while command := _command(received):
                for piece in self._answer(command):
                    sock.sendall(piece)


class Storage:
    """Replies of an honest server to the commands of a tier."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def reply(self, command: list[bytes]) -> bytes:
        verb, name = command[0].upper(), b"".join(command[1:2])
        value = self.values.get(name)
        if verb == b"GET":
            return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
        if verb == b"STRLEN":
            return b":%d\r\n" % len(value or b"")
        if verb == b"UNLINK":
            return b":%d\r\n" % (self.values.pop(name, None) is not None)
        if verb == b"SET":
            if value is not None and b"NX" in command[3:]:
                return b"$-1\r\n"
            self.values[name] = command[2]
        return b"+OK\r\n"


Slots = tuple[int, int, str, int]
"""The first and the last of a master's slots, its host and its port."""


def slots_reply(ranges: Sequence[Slots]) -> bytes:
    """Return the reply to CLUSTER SLOTS with each master."""
    masters = (
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (first, last, len(host), host.encode(), port)
        for first, last, host, port in ranges
    )
    return b"*%d\r\n" % len(ranges) + b"".join(masters)


def _command(received: BinaryIO) -> list[bytes]:
    """Return the next command with its arguments; [] at the end of the connection."""
    head = received.readline()
    arguments = []
    for _ in range(int(head[1:] or b"0")):
        length = int(received.readline()[1:])
        arguments.append(received.read(length + 2)[:length])
    return arguments
