"""A parser of RESP2 replies, which treats every byte as hostile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tiered_kv_redis.reasons import PROTOCOL, TOO_LONG, NodeError, reason_of_code
from tiered_kv_redis.stream import Stream

LINE_BYTES_MAX = 4096
"""Limit of a line of a reply; errors are sentences."""
_CHUNK_BYTES = 64 << 10
_LENGTH_DIGITS_MAX = 12


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply."""

    reason: str  # one word for the counters


Reply = bytes | int | Refusal | None
"""A status or short string, a number, an error, or nil."""


def command(*arguments: bytes) -> bytes:
    """Return a command's bytes."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
    return b"".join(parts)


class ReplyReader:
    """Replies out of a stream, in order, through a buffer of bounded size; one thread at a time."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = bytearray(_CHUNK_BYTES)
        self._start = 0
        self._end = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes that have been received and not been read."""
        return self._end - self._start

    def put_back(self, pieces: Iterable[memoryview], size: int) -> None:
        """Let the first `size` bytes of `pieces`, received elsewhere, be read next. The buffer must be empty."""
        assert self._start == self._end, "bytes can be put back before others only"
        self._make_room(size)
        for piece in pieces:
            taken = min(len(piece), size)
            self._buffer[self._end : self._end + taken] = piece[:taken]
            self._end += taken
            size -= taken

    def skip(self, expected: bytes, count: int, deadline: float) -> int:
        """Pass over replies that are `expected`, the shortest that may come; return how many, of `count` still to come.

        Stops at the first that is another or is not there yet, which is for `reply`. Waits only if nothing at all has
        been received.
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
        """Return the next reply, which is none to a command that fetches a block.

        Raises:
            NodeError: It is of a kind or size that no such command is answered with.
        """
        line = self.line(deadline)
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b":":
            return _number(line[1:])
        length = _length(line, LINE_BYTES_MAX)
        return bytes(self.bulk(length, deadline)) if isinstance(length, int) else length

    def bulk_length(self, bytes_max: int, deadline: float) -> int | Refusal | None:
        """Return the length of the string that comes next, at most `bytes_max`, or the error or nil that comes instead.

        Raises:
            NodeError: It is anything else.
        """
        return _length(self.line(deadline), bytes_max)

    def bulk(self, length: int, deadline: float) -> memoryview:
        """Return the string whose length has been read; it is valid until the next call."""
        while self.buffered_bytes < length + 2:
            missing = length + 2 - self.buffered_bytes
            self._make_room(missing)
            # No more than is missing, so that what follows can be received where it belongs.
            self._end += self._stream.receive([memoryview(self._buffer)[self._end : self._end + missing]], deadline)
        start = self._start
        if self._buffer[start + length : start + length + 2] != b"\r\n":
            raise NodeError(PROTOCOL)
        self._start += length + 2
        return memoryview(self._buffer)[start : start + length].toreadonly()

    def line(self, deadline: float) -> bytes:
        """Return the next line, without its end."""
        searched = self._start
        while (end := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            if self.buffered_bytes > LINE_BYTES_MAX:
                raise NodeError(PROTOCOL)
            before = self._start
            self._make_room(LINE_BYTES_MAX)
            searched = max(self._start, self._end - 1) if before == self._start else self._start
            self._end += self._stream.receive([memoryview(self._buffer)[self._end :]], deadline)
        if end - self._start > LINE_BYTES_MAX:
            raise NodeError(PROTOCOL)
        line = bytes(self._buffer[self._start : end])
        self._start = end + 2
        return line

    def _make_room(self, size: int) -> None:
        """Have `size` bytes free behind what is buffered; callers bound what they ask for."""
        if self._start == self._end:
            self._start = self._end = 0
        if len(self._buffer) - self._end >= size:
            return
        kept = self._buffer[self._start : self._end]
        if len(self._buffer) < len(kept) + size:
            self._buffer = bytearray(len(kept) + size)  # a new one: views of the old may be alive
        self._buffer[: len(kept)] = kept
        self._start, self._end = 0, len(kept)


def _length(line: bytes, bytes_max: int) -> int | Refusal | None:
    """Return what a string's first line says: its length, or the error or nil that stands for it."""
    if line[:1] == b"-":
        return Refusal(reason_of_code(line[1:]))
    length = _number(line[1:]) if line[:1] == b"$" else -2
    if length == -1:
        return None
    if length < 0:
        raise NodeError(PROTOCOL)
    if length > bytes_max:
        raise NodeError(TOO_LONG)
    return length


def _number(digits: bytes) -> int:
    if len(digits) > _LENGTH_DIGITS_MAX or not digits.removeprefix(b"-").isdigit():
        raise NodeError(PROTOCOL)
    return int(digits)
