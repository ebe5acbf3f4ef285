"""A Redis that answers each command as a test wants it to: too much, nonsense, or what no server would say."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import BinaryIO

from tests.support.loopback import LoopbackServer

Answer = Callable[[list[bytes]], Iterable[bytes]]
"""From a command and its arguments to the pieces of its reply, as they are sent."""


class LyingRedis(LoopbackServer):
    """Takes commands on a port of loopback."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        with suppress(ValueError), sock.makefile("rb") as heard:
            while command := _command(heard):
                for piece in self._answer(command):
                    sock.sendall(piece)


def _command(heard: BinaryIO) -> list[bytes]:
    """Return the next command with its arguments; nothing at the end of the connection."""
    head = heard.readline()
    arguments = []
    for _ in range(int(head[1:] or b"0")):
        length = int(heard.readline()[1:])
        arguments.append(heard.read(length + 2)[:length])
    return arguments
