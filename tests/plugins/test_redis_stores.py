"""What a store makes of its replies, whole, broken and false; and which blocks it sends at all."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.testing.rig import TierRig, block_content, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.toolkit.codecs import RAW
from tiered_kv.toolkit.record import HEADER_BYTES, encode_record

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.connection import Link
from tiered_kv_redis.exchange import Stores
from tiered_kv_redis.loads import Loads
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import WireError
from tiered_kv_redis.replies import ReplyReader
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.stream import PlainStream
from tiered_kv_redis.tier import RedisTier

__all__ = ["redis_server"]

BLOCK_BYTES = 1000
DIGEST = bytes(range(16))
OK, NIL = b"+OK\r\n", b"$-1\r\n"
OpenRig = Callable[..., TierRig]


class LyingServer:
    """Reads whatever is sent, and says what it was told to."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.link = Link(self.ours)
        self.link.stream.start()
        self.heard = bytearray()
        self._threads: list[threading.Thread] = []

    def say(self, data: bytes, piece_bytes: int = 1 << 20, *, hang_up: bool = False) -> None:
        def talk() -> None:
            with contextlib.suppress(OSError):  # the tier may have hung up first
                for at in range(0, len(data), piece_bytes):
                    self.theirs.sendall(data[at : at + piece_bytes])
                if hang_up:
                    self.theirs.shutdown(socket.SHUT_WR)

        def listen() -> None:
            with contextlib.suppress(OSError):
                while received := self.theirs.recv(1 << 16):
                    self.heard += received

        for each in (talk, listen):
            self._threads.append(threading.Thread(target=each))
            self._threads[-1].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)
        self.ours.close()
        for thread in self._threads:
            thread.join(60.0)
        self.theirs.close()


@pytest.fixture
def server() -> Iterator[LyingServer]:
    server = LyingServer()
    yield server
    server.close()


def storing(count: int, *, ttl_ms: int | None = None, overwrite: bool = False) -> Stores:
    keys = make_keys(count)
    return Stores(
        Node("nowhere:1", {"host": "127.0.0.1", "port": 1}),
        keys,
        [bytes(key) for key in keys],
        [memoryview(block_content(key, BLOCK_BYTES)) for key in keys],
        namespace_digest=DIGEST,
        codec=RAW,
        ttl_ms=ttl_ms,
        overwrite=overwrite,
        send_bytes=1 << 20,
    )


def run(stores: Stores, link: Link) -> None:
    deadline = time.monotonic() + 60.0
    stores.begin(link, deadline)
    stores.finish(link, deadline)


@pytest.mark.parametrize("piece_bytes", [1, 3, 5, 7, 1 << 20])
def test_each_reply_is_its_own_blocks(server: LyingServer, piece_bytes: int) -> None:
    replies = [OK, OK, NIL, OK, b"-OOM no\r\n", OK, b"-MOVED 1 127.0.0.1:7000\r\n", NIL, OK, b"-LOADING wait\r\n", OK]
    server.say(b"".join(replies), piece_bytes)
    stores = storing(len(replies))
    run(stores, server.link)
    assert stores.answered == len(replies)
    assert stores.occupied == [2, 7]
    assert stores.failures == {4: "no_space", 6: "moved", 9: "loading"}
    assert stores.node.store_refusal == "no_space"
    assert server.link.is_quiet()


@pytest.mark.parametrize("false", [b":1\r\n", b"+QUEUED\r\n", b"$2\r\nNO\r\n", b"*0\r\n", b"+OK\n\r\n", b"+OKOK\r\n"])
@pytest.mark.parametrize("position", [0, 3, 5])
def test_a_reply_that_no_store_has_ends_the_conversation(server: LyingServer, false: bytes, position: int) -> None:
    server.say(OK * position + false + OK * (5 - position))
    stores = storing(6)
    with pytest.raises(WireError):
        run(stores, server.link)
    stores.end("protocol")
    assert sorted(stores.failures) == list(range(position, 6))


@pytest.mark.parametrize("cut", range(21))
def test_a_connection_that_ends_fails_what_was_not_answered(server: LyingServer, cut: int) -> None:
    replies = OK + NIL + b"-OOM\r\n" + OK
    assert len(replies) == 21
    server.say(replies[:cut], hang_up=True)
    stores = storing(4)
    with pytest.raises(ConnectionError):
        run(stores, server.link)
    stores.end("unavailable")
    answered = sum(cut >= end for end in (5, 10, 16))
    assert stores.answered == answered
    assert stores.occupied == [1][: max(0, answered - 1)]
    assert sorted(stores.failures) == ([2, 3] if answered == 3 else list(range(answered, 4)))


def test_a_reply_too_many_is_not_left_for_the_next_user(server: LyingServer) -> None:
    server.say(OK * 4)
    stores = storing(3)
    run(stores, server.link)
    assert stores.answered == 3
    # The node closes such a connection when it is taken next.
    wait_until(lambda: not server.link.is_quiet(), what="the reply nobody asked for")


def test_a_missing_reply_is_waited_for_no_longer_than_the_deadline(
    server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline comes soon once nothing more is there, however long the replies took that are."""
    replies = OK * 2 + OK[:3]
    receive = PlainStream.receive
    received_bytes = 0

    def receive_all_there_is(stream: PlainStream, views: Sequence[memoryview], deadline: float) -> int:
        nonlocal received_bytes
        is_late = received_bytes == len(replies)
        count = receive(stream, views, min(deadline, time.monotonic() + 0.2) if is_late else deadline)
        received_bytes += count
        return count

    monkeypatch.setattr(PlainStream, "receive", receive_all_there_is)
    server.say(replies)
    stores = storing(3)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        run(stores, server.link)
    assert time.monotonic() - begin < 40.0, "it was waited for until the deadline of the others"
    assert stores.answered == 2


@pytest.mark.parametrize(
    ("ttl_ms", "overwrite", "opening", "ending"),
    [
        (None, True, b"*3\r\n$3\r\nSET\r\n", b"\r\n"),
        (None, False, b"*4\r\n$3\r\nSET\r\n", b"\r\n$2\r\nNX\r\n"),
        (1500, True, b"*5\r\n$3\r\nSET\r\n", b"\r\n$2\r\nPX\r\n$4\r\n1500\r\n"),
        (1500, False, b"*6\r\n$3\r\nSET\r\n", b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$4\r\n1500\r\n"),
    ],
)
def test_commands_are_what_redis_reads(
    server: LyingServer, ttl_ms: int | None, overwrite: bool, opening: bytes, ending: bytes
) -> None:
    server.say(OK)
    stores = storing(1, ttl_ms=ttl_ms, overwrite=overwrite)
    run(stores, server.link)
    server.close()
    (key,) = make_keys(1)
    assert server.heard.startswith(opening + b"$%d\r\n%b\r\n$%d\r\n" % (len(key), key, HEADER_BYTES + BLOCK_BYTES))
    assert server.heard.endswith(block_content(key, BLOCK_BYTES) + ending)


# Against a real server.


@pytest.fixture
def open_rig() -> Iterator[OpenRig]:
    """Return a callable that opens a tier on a test bench by its settings."""
    rigs: list[TierRig] = []

    def open_(**settings: object) -> TierRig:
        checked = RedisSettings.model_validate({**PATIENT, **settings})
        rig = TierRig(
            lambda spec, view: RedisTier(spec, view, "redis", checked),
            num_blocks=256,
            block_bytes=16 << 10,
            wait_s=60.0,
        )
        rigs.append(rig)
        return rig

    yield open_
    for rig in rigs:
        rig.close()


def calls(server: RedisServer, name: str) -> int:
    """Return how often the server was asked for a command."""
    statistics = server.call("INFO", "commandstats").decode()
    counts = [line for line in statistics.splitlines() if line.startswith(f"cmdstat_{name}:calls=")]
    return int(counts[0].partition("=")[2].partition(",")[0]) if counts else 0


def values(server: RedisServer) -> dict[bytes, bytes]:
    names = [name for name in server.keys("tkv1:*") if not name.endswith((b":epoch", b":namespace"))]
    return {name: server.get(name) for name in names}


def test_new_blocks_cost_no_question(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url)
    before = calls(redis_server, "strlen")
    for batch in range(4):
        assert rig.store(make_keys(8, f"batch-{batch}")).success
    assert calls(redis_server, "strlen") == before


def test_blocks_that_are_there_are_left_and_asked_about_from_then_on(
    redis_server: RedisServer, open_rig: OpenRig
) -> None:
    rig = open_rig(url=redis_server.url)
    keys = make_keys(8)
    rig.store(keys)
    marked = {name: value[:-1] + b"\x00" for name, value in values(redis_server).items()}
    for name, value in marked.items():
        redis_server.set(name, value)
    assert rig.store(keys).success
    sent = calls(redis_server, "set")
    assert rig.store(keys).success
    assert calls(redis_server, "set") == sent, "what is there was sent again"
    assert values(redis_server) == marked, "what was there was replaced"
    assert rig.tier.stats()["present_blocks_total"] == 16
    fresh = make_keys(8, "fresh")
    asked = calls(redis_server, "strlen")
    assert rig.store(fresh).success
    assert calls(redis_server, "strlen") == asked + 8
    assert rig.store(make_keys(8, "fresher")).success
    assert calls(redis_server, "strlen") == asked + 8, "it goes on asking though nothing is there"
    assert rig.load(fresh) == set(fresh)


def test_a_store_finds_its_time_to_live_unprolonged(redis_server: RedisServer, open_rig: OpenRig) -> None:
    open_rig(url=redis_server.url).store(make_keys(4))
    assert open_rig(url=redis_server.url, ttl="1h").store(make_keys(8)).success
    lifetimes = [int(redis_server.call("PTTL", name)[1:]) for name in values(redis_server)]
    assert sorted(lifetime == -1 for lifetime in lifetimes) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("damaged", [b"", b"x", b"y" * 20_000])
def test_what_cannot_be_a_block_is_replaced_by_the_store_that_finds_it(
    redis_server: RedisServer, open_rig: OpenRig, damaged: bytes
) -> None:
    rig = open_rig(url=redis_server.url)
    keys = make_keys(8)
    rig.store(keys)
    stored = values(redis_server)
    for name in sorted(stored)[2:5]:
        redis_server.set(name, damaged)
    assert rig.store(keys).success
    assert values(redis_server) == stored


def test_a_transfer_ends_with_its_jobs_deadline(redis_server: RedisServer, open_rig: OpenRig) -> None:
    # For its connection a transfer may take longer than its deadline. Nobody waits for `timeout`, the rig for a minute.
    rig = open_rig(url=redis_server.url, timeout="3600s", connect_timeout="300ms")
    keys = make_keys(8)
    wait_until(lambda: rig.store(keys).success)
    redis_server.freeze()
    soon = time.monotonic() + 0.4
    jobs = [rig.submit_load(keys, deadline=soon), rig.submit_store(make_keys(8, "new"), deadline=soon)]
    results = rig.wait(jobs)
    assert not any(result.success for result in results)
    redis_server.thaw()


class AnsweredWhenWaiting(PlainStream):
    """A server that gives one reply at a time, when the client has nothing more to read: by then it has asked for all
    that it asks for before.

    Args:
        ours, theirs: The client's end of a connection, and the server's.
        replies: What the server answers, in order.
    """

    def __init__(self, ours: socket.socket, theirs: socket.socket, replies: Sequence[bytes]) -> None:
        super().__init__(ours)
        self.most = 0
        """How many replies the client has asked for and not been given, at most."""
        self._theirs = theirs
        self._replies = replies
        self._given = 0
        self._heard = b""
        self._unread = select.poll()
        self._unread.register(ours, select.POLLIN)

    def receive(self, views: Sequence[memoryview], deadline: float) -> int:
        if not self._unread.poll(0):
            self._theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while received := self._theirs.recv(1 << 16):
                    self._heard += received
            asked = self._heard.count(b"\r\nGET\r\n")
            assert asked > self._given, "it waits for what it has not asked for"
            self.most = max(self.most, asked - self._given)
            self._theirs.settimeout(60.0)  # where a small wmem_max holds less than a reply nobody ever reads it
            self._theirs.sendall(self._replies[self._given])
            self._given += 1
        return super().receive(views, deadline)


def most_under_way(block_bytes: int, pipeline_bytes: int, count: int) -> int:
    """Return how many blocks a load has asked for and not received, at most."""
    keys = make_keys(count)
    replies = []
    for key in keys:
        record = b"".join(encode_record(key, memoryview(block_content(key, block_bytes)), DIGEST))
        replies.append(b"$%d\r\n%b\r\n" % (len(record), record))
    loads = Loads(
        Node("nowhere:1", {"host": "127.0.0.1", "port": 1}),
        keys,
        [bytes(key) for key in keys],
        [memoryview(bytearray(block_bytes)) for _ in keys],
        namespace_digest=DIGEST,
        pipeline_bytes=pipeline_bytes,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * block_bytes)  # a whole reply: nobody reads meanwhile
        link = Link(ours)
        stream = AnsweredWhenWaiting(ours, theirs, replies)
        link.stream, link.replies = stream, ReplyReader(stream)
        stream.start()
        deadline = time.monotonic() + 60.0
        loads.begin(link, deadline)
        loads.finish(link, deadline)
    assert not loads.failures
    return stream.most


@pytest.mark.parametrize(
    ("block_bytes", "pipeline_bytes", "blocks"), [(100_000, 1, 2), (100_000, 350_000, 3), (1_000, 20_000, 6)]
)
def test_bytes_under_way_are_bounded(block_bytes: int, pipeline_bytes: int, blocks: int) -> None:
    assert most_under_way(block_bytes, pipeline_bytes, 6) == blocks
