"""Replies of every kind, whole and broken, over a pair of sockets: no byte is ever taken for another reply's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.toolkit.record import encode_record

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.connection import Link
from tiered_kv_redis.loads import Loads
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import WireError
from tiered_kv_redis.replies import LINE_BYTES_MAX, Refusal, Reply, ReplyReader, command
from tiered_kv_redis.stream import PlainStream

BLOCK_BYTES = 1000
DIGEST = bytes(range(16))


class Pair:
    """Our end of a connection, and a server's end that says what it is told to."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.link = Link(self.ours)
        self.link.stream.start()
        self._talker: threading.Thread | None = None

    def say(self, data: bytes, piece_bytes: int = 1 << 20, *, hang_up: bool = False) -> None:
        """Send `data` in pieces from a thread of its own."""

        def talk() -> None:
            for at in range(0, len(data), piece_bytes):
                self.theirs.sendall(data[at : at + piece_bytes])
            if hang_up:
                self.theirs.shutdown(socket.SHUT_WR)

        self._talker = threading.Thread(target=talk)
        self._talker.start()

    def answer(self, replies: Sequence[bytes], piece_bytes: int) -> None:
        """Answer each GET with the next of `replies`, from a thread of its own."""

        def serve() -> None:
            heard, answered = b"", 0
            while answered < len(replies):
                heard += self.theirs.recv(1 << 16)
                asked = heard.count(b"\r\nGET\r\n")
                data = b"".join(replies[answered:asked])
                answered = asked
                for at in range(0, len(data), piece_bytes):
                    self.theirs.sendall(data[at : at + piece_bytes])

        self._talker = threading.Thread(target=serve)
        self._talker.start()

    def close(self) -> None:
        self.ours.shutdown(socket.SHUT_RDWR)
        self.ours.close()
        if self._talker is not None:
            self._talker.join(60.0)
        self.theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def soon() -> float:
    return time.monotonic() + 60.0


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def record(key: OffloadKey) -> bytes:
    header, payload = encode_record(key, memoryview(block_content(key, BLOCK_BYTES)), DIGEST)
    return header + bytes(payload)


class Loading:
    """One conversation that loads blocks."""

    def __init__(self, keys: Sequence[OffloadKey], pipeline_bytes: int = 1 << 20) -> None:
        self.keys = keys
        self.memory = [bytearray(BLOCK_BYTES) for _ in keys]
        self.loads = Loads(
            Node("nowhere:1", {"host": "127.0.0.1", "port": 1}),
            keys,
            [bytes(key) for key in keys],
            [memoryview(block) for block in self.memory],
            namespace_digest=DIGEST,
            pipeline_bytes=pipeline_bytes,
        )

    def run(self, link: Link) -> None:
        self.loads.begin(link, soon())
        self.loads.finish(link, soon())

    def loaded(self) -> list[int]:
        """Return the positions that succeeded; their bytes are checked."""
        found = [at for at in range(self.loads.answered) if at not in self.loads.failures]
        for at in found:
            assert self.memory[at] == block_content(self.keys[at], BLOCK_BYTES), "wrong bytes"
        return found


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":12\r\n", 12),
        (b":-3\r\n", -3),
        (b"$-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$3\r\na\r\n\r\n", b"a\r\n"),
        (b"-OOM command not allowed\r\n", Refusal("no_space")),
        (b"-MOVED 1 127.0.0.1:7000\r\n", Refusal("moved")),
        (b"-WHATEVER is this\r\n", Refusal("server_error")),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_replies_are_read_in_any_pieces(pair: Pair, sent: bytes, reply: Reply, piece_bytes: int) -> None:
    pair.say(sent + b":7\r\n", piece_bytes)
    assert pair.link.replies.reply(soon()) == reply
    assert pair.link.replies.reply(soon()) == 7


@pytest.mark.parametrize(
    "sent",
    [
        b"*1\r\n:1\r\n",
        b"$99999999999\r\n",
        b"$9999999999999999\r\n",
        b"$x\r\n",
        b":\r\n",
        b"\r\n",
        b"$-2\r\n",
        b"$2\r\nabc\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"+" + b"x" * (2 * LINE_BYTES_MAX) + b"\r\n",
        b"x" * (4 * LINE_BYTES_MAX),
    ],
)
def test_what_is_no_reply_ends_the_conversation(pair: Pair, sent: bytes) -> None:
    pair.say(sent)
    with pytest.raises(WireError):
        pair.link.replies.reply(soon())


def test_a_reader_waits_no_longer_than_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = ReplyReader(PlainStream(ours))
        theirs.sendall(b"+hal")
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            reader.reply(time.monotonic() + 0.1)
        assert time.monotonic() - begin < 30.0


def test_a_sender_waits_no_longer_than_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            PlainStream(ours).send([bytes(1 << 20)] * 64, time.monotonic() + 0.2)
        assert time.monotonic() - begin < 30.0


def test_parts_arrive_in_order_however_they_are_cut(pair: Pair) -> None:
    parts = [bytes([at % 251]) * (at % 977) for at in range(3000)]
    received = bytearray()

    def listen() -> None:
        while data := pair.theirs.recv(1000):
            received.extend(data)

    listener = threading.Thread(target=listen)
    listener.start()
    pair.link.stream.send(parts, soon())
    pair.ours.shutdown(socket.SHUT_WR)
    listener.join(60.0)
    assert bytes(received) == b"".join(parts)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1137, 1 << 20])
@pytest.mark.parametrize("pipeline_bytes", [1, 3000, 1 << 20])
def test_blocks_land_in_place_in_any_pieces(pair: Pair, piece_bytes: int, pipeline_bytes: int) -> None:
    keys = make_keys(6)
    loading = Loading(keys, pipeline_bytes)
    pair.answer([bulk(record(key)) for key in keys], piece_bytes)
    loading.run(pair.link)
    assert loading.loaded() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("pipeline_bytes", [1, 3000, 1 << 20])
def test_unexpected_replies_cost_their_own_blocks_only(pair: Pair, piece_bytes: int, pipeline_bytes: int) -> None:
    keys = make_keys(9)
    replies = [bulk(record(key)) for key in keys]
    replies[0] = b"$-1\r\n"
    replies[2] = bulk(b"")
    replies[3] = b"-LOADING wait\r\n"
    replies[5] = bulk(record(keys[5])[:-1])
    replies[7] = bulk(record(keys[1]))
    replies[8] = b"$-1\r\n"
    loading = Loading(keys, pipeline_bytes)
    pair.answer(replies, piece_bytes)
    loading.run(pair.link)
    assert loading.loaded() == [1, 4, 6]
    assert loading.loads.failures[0] == loading.loads.failures[8] == "absent"
    assert loading.loads.failures[3] == "loading"
    assert loading.loads.failures[7] == "wrong_key"
    assert loading.loads.damaged == [2, 5, 7]


@pytest.mark.parametrize("cut", [1, 5, 100, 130, 1000, 1135, 1136])
def test_a_connection_that_ends_within_a_reply_is_an_error(pair: Pair, cut: int) -> None:
    keys = make_keys(3)
    whole = bulk(record(keys[0]))
    loading = Loading(keys)
    pair.say(whole + bulk(record(keys[1]))[:cut], hang_up=True)
    with pytest.raises(ConnectionError):
        loading.run(pair.link)
    assert loading.loaded() in ([0], [])


def test_a_reply_nobody_asked_for_is_an_error(pair: Pair) -> None:
    keys = make_keys(2)
    loading = Loading(keys)
    pair.answer([b"$-1\r\n", b"$-1\r\n$-1\r\n"], 1 << 20)
    with pytest.raises(WireError):
        loading.run(pair.link)


def test_a_value_longer_than_any_block_is_not_read(pair: Pair) -> None:
    keys = make_keys(3)
    loading = Loading(keys)
    pair.say(bulk(record(keys[0])) + b"$1000000000\r\n")
    with pytest.raises(WireError, match="too_long"):
        loading.run(pair.link)
    assert loading.loads.damaged == [1]


def test_commands_are_framed_by_length() -> None:
    assert command(b"GET", b"a\r\nb") == b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n"
