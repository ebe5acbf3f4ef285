"""Fuzzing of the answers of an S3 server: heads, chunks, epoch marks, errors, dates."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import cast

from tests.support.fuzzing import Target
from tiered_kv.errors import FormatError
from tiered_kv.toolkit.epoch import EpochMark
from tiered_kv.toolkit.objects.verdict import Verdict
from tiered_kv_s3.connection import (
    EMPTY_PAYLOAD,
    ERROR_BYTES_MAX,
    HEAD_BYTES_MAX,
    Answer,
    Connection,
    Credentials,
    Endpoint,
    Patience,
    Signer,
)
from tiered_kv_s3.verdict import seconds_of, verdict_of

_ERROR = b"<Error><Code>RequestTimeTooSkewed</Code><Message>m</Message><Region>eu-west-1</Region></Error>"
_DATE = b"date: Thu, 02 Jan 2025 03:04:05 GMT\r\nlast-modified: Thu, 02 Jan 2025 03:00:00 GMT\r\n"
_MARK = EpochMark(3, "0123456789abcdef").encode()


def make() -> Target:
    """Return the target: a whole answer, or an epoch's mark."""
    seeds = (
        b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (_DATE, len(_MARK), _MARK),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 Forbidden\r\n%bcontent-length: %d\r\n\r\n%b"
        % (_DATE, len(_ERROR), _ERROR),
        b"HTTP/1.0 301 Moved\r\nx-amz-bucket-region: eu-west-1\r\n\r\n" + _ERROR,
        b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\nx-t: 1\r\n\r\n"
        % (len(_ERROR), _ERROR),
        b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n",
        _MARK,
    )
    words = (
        b"\r\n", b"\r\n\r\n", b"content-length: ", b"99999999999", b"transfer-encoding: chunked\r\n", b"FFFFFFFF\r\n",
        b"0001-01-01T00:00:00", b"9999-12-31T23:59:59.999999-23:59", b"date: Mon, 01 Jan 0001 00:00:00 -0000\r\n",
        b"date: Fri, 31 Dec 9999 23:59:59 -2359\r\n", b"last-modified: Mon, 01 Jan 0001 00:00:00 +0000\r\n", b"\xff",
        b"<Code>SlowDown</Code>", "\u0663".encode(),
    )  # fmt: skip
    return Target("fuzz/replies", seeds, _run, words)


class _ScriptedSocket:
    """A socket that returns given bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def fileno(self) -> int:
        return -1

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def recv(self, size: int) -> bytes:
        taken, self._data = self._data[:size], self._data[size:]
        return bytes(taken)

    def recv_into(self, buffer: memoryview) -> int:
        assert len(buffer), "memory of no size is received into"
        assert len(buffer) <= ERROR_BYTES_MAX, "more is made room for than an error may have"
        taken = self.recv(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)


def _run(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        mark = EpochMark.decode(data)
        assert mark is None or mark.encode() == data, f"a mark comes of {data!r}"
    patience = Patience(time.monotonic() + 30.0, 30.0)
    connection = Connection(Endpoint("server", 80, False, ""), cast(socket.socket, _ScriptedSocket(data)), patience)
    with contextlib.suppress(ConnectionError):
        answer = connection.receive_head()
        _check_answer(answer)
        if answer.status != 200:
            body = connection.receive_error(answer)
            assert len(body) <= ERROR_BYTES_MAX
            verdict = verdict_of(answer, body)
            assert isinstance(verdict, Verdict)
            assert verdict is not Verdict.DONE
    assert len(connection._buffer) <= 2 * HEAD_BYTES_MAX


def _check_answer(answer: Answer) -> None:
    assert answer.body_bytes is None or answer.body_bytes >= 0
    for name in ("date", "last-modified"):
        said_s = seconds_of(answer.headers.get(name, ""))
        if said_s is None:
            continue
        # Requests are signed with the server's clock.
        Signer("r").sign("GET", "/", {"host": "h"}, EMPTY_PAYLOAD, Credentials("a", "b"), said_s)
