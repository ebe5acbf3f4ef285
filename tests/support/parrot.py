"""A server that refuses every client, and repeats in its answer what it was sent, as real servers do with passwords."""

from __future__ import annotations

import socket

from tests.support.loopback import LoopbackServer


class Parrot(LoopbackServer):
    """Answers in Redis's words, or in S3's, and what is neither, such as TLS, with neither."""

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
