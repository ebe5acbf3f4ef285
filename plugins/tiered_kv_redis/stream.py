"""Bytes in and out of a connected socket, gathered and scattered, by a deadline."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence

IOV_MAX = os.sysconf("SC_IOV_MAX")
"""Buffers that one system call takes."""

_TIMEVAL = struct.Struct("ll")
_ARMED_SLACK_US = 10_000
"""By how much the kernel's limit for one call may exceed what is left until the deadline: setting it is a call too."""

Buffer = bytes | bytearray | memoryview


class PlainStream:
    """A connected socket as it is; one thread at a time.

    The kernel keeps the time, so that a call is one system call and needs no poll before it. Every method raises
    `TimeoutError` when `deadline` (seconds of `time.monotonic()`) has passed, and another `OSError` when the connection
    is gone. Either leaves the stream in doubt.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._armed_us: dict[int, int] = {}  # what the kernel was last told, by socket option

    def start(self) -> None:
        """Take the socket over from redis-py, which leaves its timeouts on it."""
        self._sock.settimeout(None)
        self._armed_us.clear()

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        """Send all of them, one after the other."""
        rest, at = list(parts), 0
        while at < len(rest):
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._sock.sendmsg(rest[at : at + IOV_MAX])
            except BlockingIOError:
                raise TimeoutError("nothing was sent in time") from None
            while at < len(rest) and sent >= len(rest[at]):
                sent -= len(rest[at])
                at += 1
            if sent:  # a part was cut in two, which happens only when the socket is slow
                rest[at] = memoryview(rest[at])[sent:]

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        """Fill the beginning of `views`, none of which is empty, with what is there; return how many bytes."""
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            count = self._sock.recvmsg_into(views[:IOV_MAX])[0]
        except BlockingIOError:
            raise TimeoutError("nothing was received in time") from None
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        """Return how many bytes have left the socket and have not been received."""
        return 0

    def _arm(self, option: int, deadline: float) -> None:
        left_us = int((deadline - time.monotonic()) * 1e6)
        if left_us <= 0:
            raise TimeoutError("the deadline has passed")
        if not left_us <= self._armed_us.get(option, 0) <= left_us + _ARMED_SLACK_US:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
            self._armed_us[option] = left_us


class TlsStream:
    """A connected socket under TLS, which takes and gives one buffer at a time; otherwise as `PlainStream`."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def start(self) -> None:
        return

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        for part in parts:
            rest = memoryview(part)
            while rest:
                self._arm(deadline)
                rest = rest[self._sock.send(rest) :]

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        self._arm(deadline)
        count = self._sock.recv_into(views[0])
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        return self._sock.pending()

    def _arm(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left_s)


Stream = PlainStream | TlsStream


def stream_of(sock: socket.socket) -> Stream:
    """Return the stream over a socket that redis-py has connected."""
    return TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)
