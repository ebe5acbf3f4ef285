"""Bytes in and out of a connected socket, gathered and scattered, by a deadline."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
from collections.abc import Sequence

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_TIMEVAL = struct.Struct("ll")
_ARMED_SLACK_US = 10_000
"""By how much the kernel's timeout may exceed the time left: setting it is a system call too."""

Buffer = bytes | bytearray | memoryview


class Stream:
    """A connected socket without TLS; one thread at a time.

    The kernel keeps the time (`SO_RCVTIMEO`), so a call needs no poll before it. Every method raises `TimeoutError`
    after `deadline` (seconds of `time.monotonic()`), and another `OSError` when the connection is lost. The stream
    cannot be used after either.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(None)  # redis-py has set its own
        self._armed_us: dict[int, int] = {}  # the kernel's timeout, by socket option

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        """Send all parts, one after the other."""
        rest, at = list(parts), 0
        while at < len(rest):
            self._arm(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._sock.sendmsg(rest[at : at + _IOV_MAX])
            except BlockingIOError:
                raise TimeoutError("nothing was sent in time") from None
            while at < len(rest) and sent >= len(rest[at]):
                sent -= len(rest[at])
                at += 1
            if sent:  # a part of a part was sent, which happens only when the socket is slow
                rest[at] = memoryview(rest[at])[sent:]

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        """Receive available bytes into the beginning of `views`, none of which is empty; return how many."""
        self._arm(socket.SO_RCVTIMEO, deadline)
        try:
            count = self._sock.recvmsg_into(views[:_IOV_MAX])[0]
        except BlockingIOError:
            raise TimeoutError("nothing was received in time") from None
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        """Return how many bytes were read from the socket and not yet received, which `poll` does not show."""
        return 0

    def _arm(self, option: int, deadline: float) -> None:
        left_us = max(1, int(_left_s(deadline) * 1e6))
        if not left_us <= self._armed_us.get(option, 0) <= left_us + _ARMED_SLACK_US:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
            self._armed_us[option] = left_us


class TlsStream(Stream):
    """A connected socket under TLS, which sends and receives one buffer at a time."""

    _sock: ssl.SSLSocket

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        for part in parts:
            rest = memoryview(part)
            while rest:
                self._sock.settimeout(_left_s(deadline))
                rest = rest[self._sock.send(rest) :]

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        self._sock.settimeout(_left_s(deadline))
        count = self._sock.recv_into(views[0])
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        return self._sock.pending()


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline has passed")
    return left_s
