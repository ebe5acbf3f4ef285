"""A server that refuses every client, and repeats in its answer what it was sent, as real servers do with passwords."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_JOIN_S = 5.0


class Parrot:
    """Answers in Redis's words, or in S3's, and what is neither, such as TLS, with neither; on a port of loopback."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Close every connection and end."""
        for sock in (self._listener, *self._connections):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._connections.append(sock)
                self._threads.append(threading.Thread(target=self._answer, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _answer(self, sock: socket.socket) -> None:
        with suppress(OSError):
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
