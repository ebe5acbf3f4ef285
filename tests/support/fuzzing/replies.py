"""Fuzzing of the replies of a Redis server: no wrong bytes, and no error but `NodeError`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import cast

from tests.support.fuzzing import Target
from tiered_kv.testing.rig import block_content, compressible_content, make_keys
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.record import encode_record
from tiered_kv_redis.blocks import Loads
from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Batch, Transfer
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import NodeError
from tiered_kv_redis.replies import Buffer, Refusal, ReplyReader, Stream

BLOCK_BYTES = 256
NAMESPACE = bytes(range(16))
KEYS = make_keys(4, "fuzz")
_READERS = _LOADS_RAW, _LOADS_ZSTD, _REPLIES, _SKIPS = range(4)
_BUFFER_BYTES_MAX = 1 << 20
_PIECES = (1, 7, 100, 1000, 1 << 20)


def make() -> Target:
    """Return the target: a byte for the reader, one for the size of the pieces, and the server's bytes."""
    raw, zstd = (b"".join(_bulk(_record(number, codec)) for number in range(4)) for codec in ("raw", "zstd"))
    mixed = _bulk(_record(0, "raw")) + b"$-1\r\n-LOADING wait\r\n" + _bulk(_record(3, "zstd"))
    replies = b"+OK\r\n:12\r\n$-1\r\n$3\r\nabc\r\n-MOVED 1 127.0.0.1:7000\r\n:-5\r\n"
    bodies = [(_LOADS_RAW, raw), (_LOADS_ZSTD, zstd), (_LOADS_RAW, mixed), (_REPLIES, replies)]
    bodies += [(_LOADS_ZSTD, mixed), (_SKIPS, b"+OK\r\n+OK\r\n-OOM no\r\n+OK\r\n")]
    seeds = tuple(bytes([reader, cut]) + body for reader, body in bodies for cut in range(len(_PIECES)))
    words = (
        b"\r\n", b"$", b"$-1\r\n", b"$0\r\n\r\n", b"-ERR x\r\n", b":1\r\n", b"*1\r\n", b"$384\r\n",
        b"$9999999999\r\n",
    )  # fmt: skip
    return Target("fuzz/replies", seeds, _run, words)


def _record(number: int, codec: str) -> bytes:
    content = block_content if codec == "raw" else compressible_content
    block = content(KEYS[number], BLOCK_BYTES)
    header, payload = encode_record(KEYS[number], memoryview(block), NAMESPACE, CodecSet(codec))
    return header + bytes(payload)


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


class _Script:
    """A stream that returns given bytes in pieces, and then ends as a closed connection does."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        self._data = memoryview(data)
        self._piece_bytes = piece_bytes

    def start(self) -> None:
        """Nothing is there to be taken over."""

    def send(self, parts: Sequence[Buffer], deadline: float) -> None:
        """Hear nothing."""

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        assert views
        assert all(views), "memory of no size is received into"
        count = 0
        for view in views:
            taken = min(len(view), len(self._data), self._piece_bytes - count)
            view[:taken] = self._data[:taken]
            self._data = self._data[taken:]
            count += taken
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def pending_bytes(self) -> int:
        return 0


class _ScriptedLink:
    """The part of a `Link` that readers use."""

    def __init__(self, script: _Script) -> None:
        self.stream = script
        self.replies = ReplyReader(cast(Stream, script))

    def heads(self, size: int) -> memoryview:
        return memoryview(bytearray(size))


def _run(data: bytes) -> None:
    data = data.ljust(2, b"\0")
    reader = data[0] % len(_READERS)
    link = _ScriptedLink(_Script(data[2:], _PIECES[data[1] % len(_PIECES)]))
    with contextlib.suppress(NodeError, ConnectionError):
        if reader == _REPLIES:
            while True:
                reply = link.replies.reply(_soon())
                assert reply is None or isinstance(reply, bytes | int | Refusal)
        elif reader == _SKIPS:
            while True:
                assert 0 <= link.replies.skip(b"+OK\r\n", 4, _soon()) <= 4
                link.replies.reply(_soon())
        else:
            _load(link, "raw" if reader == _LOADS_RAW else "zstd")
    assert len(link.replies._buffer) <= _BUFFER_BYTES_MAX, "the buffer grows with what is sent"


def _load(link: _ScriptedLink, codec: str) -> None:
    memory = [bytearray(BLOCK_BYTES) for _ in KEYS]
    loads = Loads(
        Node("nowhere:1", {"host": "127.0.0.1", "port": 1}),
        range(len(KEYS)),
        {},
        Batch(KEYS, [bytes(key) for key in KEYS], [memoryview(block) for block in memory], _soon()),
        Transfer(NAMESPACE, CodecSet(codec), pipeline_bytes=2 * BLOCK_BYTES),
    )
    try:
        loads.begin(cast(Link, link), _soon())
        loads.finish(cast(Link, link), _soon())
        assert loads.answered == len(KEYS)
    finally:
        for at in range(loads.answered):
            content, block = (each(KEYS[at], BLOCK_BYTES) for each in (block_content, compressible_content)), memory[at]
            assert at in loads.failures or bytes(block) in content, f"wrong bytes at {at}"
        assert set(loads.damaged) <= set(range(len(KEYS)))


def _soon() -> float:
    return time.monotonic() + 30.0
