"""Servers on loopback with a thread for each connection, whose answers a test writes."""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

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
