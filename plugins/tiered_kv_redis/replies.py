"""Bytes that a connection receives by a deadline, and RESP2 replies parsed from them. Any byte may be wrong.

`exchange` and `blocks` call it, on the worker that uses the connection. A wrong byte raises an error and allocates
nothing: lengths are checked first.
"""

from __future__ import annotations

import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiered_kv_redis.reasons import NodeError, RedisReason, ServerFailure, reason_of_code

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_TIMEVAL = struct.Struct("ll")
_ARMED_SLACK_US = 10_000  # the kernel's timeout may be so much too long: to set it is a system call

Buffer = bytes | bytearray | memoryview

_LINE_BYTES_MAX = 4096
_CHUNK_BYTES = 64 << 10
_LENGTH_DIGITS_MAX = 12


class Stream:
    """A connected socket without TLS; one thread at a time.

    The kernel keeps the time (`SO_RCVTIMEO`), so a call needs no poll before it. Every method raises `TimeoutError`
    after `deadline` (seconds of `time.monotonic()`), or after `silence_s` without a byte, and another `OSError` when
    the connection is lost. After either error, the stream cannot be used.
    """

    def __init__(self, sock: socket.socket, silence_s: float = math.inf) -> None:
        self._sock = sock
        self._silence_s = silence_s
        self._sock.settimeout(None)  # redis-py has set its own
        self._armed_us: dict[int, int] = {}  # the kernel's timeout, by socket option

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
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
            if sent:  # the socket took only a piece of this part: it is slow
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
        """Return how many bytes TLS has read and `receive` has not returned. `poll` does not show them."""
        return 0

    def _wait_s(self, deadline: float) -> float:
        """Return how long the next call may wait."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return min(left_s, self._silence_s)

    def _arm(self, option: int, deadline: float) -> None:
        left_us = max(1, int(self._wait_s(deadline) * 1e6))
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
                self._sock.settimeout(self._wait_s(deadline))
                rest = rest[self._sock.send(rest) :]

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        self._sock.settimeout(self._wait_s(deadline))
        count = self._sock.recv_into(views[0])
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        return self._sock.pending()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply; `reason` is one word for the counters, `text` is the server's answer."""

    reason: RedisReason
    text: str


Reply = bytes | int | Refusal | None  # a status or short string, a number, an error, or nil


def command(*arguments: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
    return b"".join(parts)


class ReplyReader:
    """Reads replies from a stream, through a buffer of bounded size; one thread at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray(_CHUNK_BYTES)
        self._start = 0
        self._end = 0

    @property
    def buffered_bytes(self) -> int:
        return self._end - self._start

    def put_back(self, pieces: Iterable[memoryview], size: int) -> None:
        """Put the first `size` bytes of `pieces`, received elsewhere, into the buffer, which must be empty."""
        assert self._start == self._end, "the buffer has bytes"
        self._make_room(size)
        for piece in pieces:
            taken = min(len(piece), size)
            self._buffer[self._end : self._end + taken] = piece[:taken]
            self._end += taken
            size -= taken

    def skip(self, expected: bytes, count: int, deadline: float) -> int:
        """Skip replies equal to `expected`, the shortest possible reply; return how many. `count` replies are pending.

        The next `reply` returns the first reply that differs or is incomplete. Waits only if the buffer is empty.
        """
        if self._start == self._end:
            self._make_room(count * len(expected))
            free = memoryview(self._buffer)[self._end : self._end + count * len(expected)]
            self._end += self._stream.receive([free], deadline)
        done = 0
        while done < count and self._buffer.startswith(expected, self._start, self._end):
            self._start += len(expected)
            done += 1
        return done

    def reply(self, deadline: float) -> Reply:
        """Return the next reply to any command but GET of a block.

        Raises `NodeError`: no such command has a reply of this kind or size.
        """
        line = self.line(deadline)
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b":":
            return _number(line[1:])
        length = _length(line, _LINE_BYTES_MAX)
        return bytes(self.bulk(length, deadline)) if isinstance(length, int) else length

    def bulk_length(self, bytes_max: int, deadline: float) -> int | Refusal | None:
        """Return the length of the next string, at most `bytes_max`, or the error or nil in its place.

        Raises `NodeError`: the reply is anything else.
        """
        return _length(self.line(deadline), bytes_max)

    def bulk(self, length: int, deadline: float) -> memoryview:
        """Return the string after `bulk_length`; valid until the next call."""
        while self.buffered_bytes < length + 2:
            missing = length + 2 - self.buffered_bytes
            self._make_room(missing)
            # Only the missing bytes, so that the next reply can be received in place.
            self._end += self._stream.receive([memoryview(self._buffer)[self._end : self._end + missing]], deadline)
        start = self._start
        if self._buffer[start + length : start + length + 2] != b"\r\n":
            raise NodeError(ServerFailure.PROTOCOL)
        self._start += length + 2
        return memoryview(self._buffer)[start : start + length].toreadonly()

    def line(self, deadline: float) -> bytes:
        searched = self._start
        while (end := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            if self.buffered_bytes > _LINE_BYTES_MAX:
                raise NodeError(ServerFailure.PROTOCOL)
            before = self._start
            self._make_room(_LINE_BYTES_MAX)
            searched = max(self._start, self._end - 1) if before == self._start else self._start
            self._end += self._stream.receive([memoryview(self._buffer)[self._end :]], deadline)
        if end - self._start > _LINE_BYTES_MAX:
            raise NodeError(ServerFailure.PROTOCOL)
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line

    def _make_room(self, size: int) -> None:
        """Make `size` free bytes behind the buffered bytes; callers bound `size`."""
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._buffer) - self._end >= size:
            return
        kept = self._buffer[self._start : self._end]
        if len(self._buffer) < len(kept) + size:
            self._buffer = bytearray(len(kept) + size)  # a new buffer: views of the old one may exist
        self._buffer[: len(kept)] = kept
        self._start, self._end = 0, len(kept)


def _length(line: bytes, bytes_max: int) -> int | Refusal | None:
    """Return the length in a string's first line, or the error or nil in its place."""
    if line[:1] == b"-":
        return Refusal(reason_of_code(line[1:]), line[1:].decode(errors="backslashreplace"))
    length = _number(line[1:]) if line[:1] == b"$" else -2
    if length == -1:
        return None
    if length < 0:
        raise NodeError(ServerFailure.PROTOCOL)
    if length > bytes_max:
        raise NodeError(ServerFailure.TOO_LONG)
    return length


def _number(digits: bytes) -> int:
    if len(digits) > _LENGTH_DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
        raise NodeError(ServerFailure.PROTOCOL)
    return int(digits)
