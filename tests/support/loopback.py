"""Servers on loopback with a thread for each connection, whose answers a test writes."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import BinaryIO, Self

_JOIN_S = 30.0


class LoopbackServer(ABC):
    """Listens from the start; any thread may close it, and so does the end of the context."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        _shut(self._listener)
        self._end(self._threads[0])  # from here on there is no new connection
        for sock in self._connections:
            _shut(sock)
        for thread in self._threads:
            self._end(thread)

    @abstractmethod
    def serve(self, sock: socket.socket) -> None:
        """Talk to a client until it has gone; the connection is closed then, and at an `OSError`."""

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or pieces of an answer wait 40 ms
                self._connections.append(sock)
                self._threads.append(threading.Thread(target=self._guarded, args=(sock,), daemon=True))
                self._threads[-1].start()

    @staticmethod
    def _end(thread: threading.Thread) -> None:
        thread.join(_JOIN_S)
        assert not thread.is_alive(), "it does not end"

    def _guarded(self, sock: socket.socket) -> None:
        with suppress(OSError), sock:
            self.serve(sock)


class Parrot(LoopbackServer):
    """Refuses every client, and repeats the request in its answer, as real servers do with passwords.

    It answers in the words of Redis or S3; on anything else, such as TLS, it closes the connection after one answer.
    """

    def serve(self, sock: socket.socket) -> None:
        while received := sock.recv(1 << 16):
            words = b" ".join(received.split())
            if received.startswith(b"*"):
                sock.sendall(b"-ERR unknown command, with args beginning with: %b\r\n" % words)
            elif b"HTTP/1.1" in received:
                body = b"<Error><Code>InvalidAccessKeyId</Code><Message>%b</Message></Error>" % words
                sock.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            else:  # TLS, which this is not
                sock.sendall(b"-ERR %b\r\n" % words)
                return


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


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
