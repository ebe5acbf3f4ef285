"""One side of a connection between a host's server and a client: packets that are sent and received without a wait.

The server's thread has a channel for each client, a client's thread one for its server. The bytes that wait for the
other side have a limit. What must stay true: messages travel whole, and arrive in the order in which they were added.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from tiered_kv.server.protocol import (
    HEADER,
    PACKET_BYTES_MAX,
    REFUSED,
    ClosedError,
    Message,
    ProtocolError,
    messages_of,
)

_QUEUED_S: Final = 0.01  # between two tries while others wait to be accepted


class Channel:
    """One side of a connection. It never waits. One thread calls.

    Args:
        sock: A connected socket of packets; the channel closes it.
        limit_bytes: Bytes that may wait for the other side to read. Beyond it the connection fails.
        on_unsent: Called when messages begin to wait for `flush`.
    """

    def __init__(
        self,
        sock: socket.socket,
        limit_bytes: int,
        *,
        on_unsent: Callable[[Channel], object] = lambda _: None,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._limit_bytes = limit_bytes
        self._on_unsent = on_unsent
        self._packet = bytearray()
        self._packets: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._received: deque[Message] = deque()
        """Messages of the last packet that `receive` has not yielded yet."""
        self._readable = select.poll()  # cheaper than the exception of a socket that has nothing
        self._readable.register(sock, select.POLLIN)

    @property
    def is_blocked(self) -> bool:
        """Whether packets wait for the other side to read."""
        return bool(self._packets)

    @property
    def is_readable(self) -> bool:
        """Whether the other side has sent something, or closed the connection."""
        return bool(self._readable.poll(0))

    @property
    def unread_bytes(self) -> int:
        """Bytes that wait for the other side to read."""
        return len(self._packet) + self._waiting_bytes if self._packets else 0

    @property
    def has_unsent(self) -> bool:
        """Whether messages wait for `flush`, and the other side has room as far as is known."""
        return bool(self._packet) and not self._packets

    def add(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        """Add a message to the ones that `flush` sends.

        Raises:
            ProtocolError: Too much waits. From now on `flush` raises, too.
        """
        size = len(body)
        if not self._packet or self._packets:
            self._on_unsent(self)
        if len(self._packet) + HEADER.size + size > PACKET_BYTES_MAX:
            self._close_packet()
        self._packet += HEADER.pack(code, flags, count, number, size)
        self._packet += body
        if len(self._packet) + self._waiting_bytes > self._limit_bytes:
            self._raise_overrun()

    def flush(self) -> None:
        """Send as much as the other side has room for.

        Raises:
            ClosedError: It has closed the connection.
            ProtocolError: Too much waits.
        """
        if not self._packet and not self._packets:
            return
        if len(self._packet) + self._waiting_bytes > self._limit_bytes:
            self._raise_overrun()
        if not self._packets and self._send(self._packet):
            self._packet = bytearray()
            return
        self._close_packet()
        while self._packets and self._send(self._packets[0]):
            self._waiting_bytes -= len(self._packets.popleft())

    def send_waiting(self) -> None:
        """Flush, and raise nothing if the connection has ended.

        `receive` then yields the last messages of the other side, and raises `ClosedError` after them.
        """
        with suppress(ClosedError):
            self.flush()

    def refuse(self, why: str) -> None:
        """Tell the other side why the connection ends."""
        self.add(REFUSED, body=why.encode(errors="replace"))
        self.send_waiting()

    def receive(self, packets_max: int, *, is_expected: bool = False, until_s: float = math.inf) -> Iterator[Message]:
        """Yield the messages of the packets that have come.

        With `is_expected` a packet has probably come, and the first read is tried without a `poll`. At `until_s`, in
        seconds of `time.monotonic`, the rest waits for the next call; `has_received` tells whether that has messages.

        Raises:
            ClosedError: The other side has closed the connection.
            ProtocolError: A packet has no whole messages.
        """
        received, number = self._received, 0
        while True:
            while received:
                yield received.popleft()
                if until_s < math.inf and time.monotonic() >= until_s:
                    return
            if number == packets_max or ((number or not is_expected) and not self._readable.poll(0)):
                return
            number += 1
            try:
                packet = self.sock.recv(PACKET_BYTES_MAX + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the other side left our messages unread; its last ones follow (unix(7))
                continue
            except OSError as error:
                raise ClosedError(error.strerror or "closed") from error
            if not packet:
                raise ClosedError("closed")
            received.extend(messages_of(memoryview(packet)))

    @property
    def has_received(self) -> bool:
        """Whether `receive` has messages that it has not yielded."""
        return bool(self._received)

    def close(self) -> None:
        self.sock.close()

    def _send(self, packet: bytes | bytearray) -> bool:
        try:
            self.sock.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ClosedError(error.strerror or "closed") from error
        return True

    def _raise_overrun(self) -> None:
        raise ProtocolError(f"the other side has left more than {self._limit_bytes} bytes unread")

    def _close_packet(self) -> None:
        if self._packet:
            self._packets.append(bytes(self._packet))
            self._waiting_bytes += len(self._packet)
            self._packet = bytearray()


def connect_in_turn(sock: socket.socket, path: str, wait_s: float, closed: threading.Event) -> None:
    """Connect; wait while a server has not accepted earlier clients yet. Any thread may call.

    Raises `OSError`: no server listens, it has accepted nobody for `wait_s`, or `closed` was set meanwhile.
    """
    end_s = time.monotonic() + wait_s
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:  # as many wait as its socket allows
            if time.monotonic() >= end_s:
                raise TimeoutError(f"it has accepted no connection for {wait_s:g} s") from None
        if closed.wait(_QUEUED_S):
            raise OSError("closed")
