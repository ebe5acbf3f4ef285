"""A Redis that answers each command as a test wants it to: too much, nonsense, or what no server would say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import BinaryIO

_JOIN_S = 30.0
Answer = Callable[[list[bytes]], Iterable[bytes]]
"""From a command and its arguments to the pieces of its reply, as they are sent."""


class LyingRedis:
    """Takes commands on a port of loopback.

    Args:
        answer: Says what each is answered with; called on a thread for each connection.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """Its host:port."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Close every connection and end."""
        for sock in (self._listener, *self._connections):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(_JOIN_S)
            assert not thread.is_alive(), "it does not end"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._connections.append(sock)
                self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, ValueError), sock.makefile("rb") as heard:
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
