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


class Stream:
    """A connected socket as it is; one thread at a time.

    The kernel keeps the time, so that a call is one system call and needs no poll before it. Every method raises
    `TimeoutError` when `deadline` (seconds of `time.monotonic()`) has passed, and another `OSError` when the connection
    is gone. Either leaves the stream in doubt.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(None)  # redis-py leaves its own on it
        self._armed_us: dict[int, int] = {}  # what the kernel was last told, by socket option

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
        left_us = max(1, int(_left_s(deadline) * 1e6))
        if not left_us <= self._armed_us.get(option, 0) <= left_us + _ARMED_SLACK_US:
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(left_us, 1_000_000)))
            self._armed_us[option] = left_us


class TlsStream(Stream):
    """A connected socket under TLS, which takes and gives one buffer at a time."""

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
