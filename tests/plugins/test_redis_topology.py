"""The addresses of servers, as a cluster's members and sentinels report them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.lying_redis import LyingRedis, slots_reply
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.control import wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import Address
from tiered_kv_redis.topology import masters_of

SLOTS = 16_384
MEMBER = Address("10.0.0.9", 7000)
FIRST, SECOND = Address("10.0.0.1", 7001), Address("10.0.0.2", 7001)
ONE: list[object] = [b"10.0.0.1", 7001, b"id", [b"hostname", b"one"]]
TWO: list[object] = [b"10.0.0.2", 7001, b"id", []]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([[0, 8191, ONE, TWO], [8192, 16383, TWO]], {0: FIRST, 8191: FIRST, 8192: SECOND, 16383: SECOND}),
        *(([[0, 0, [unknown, 7003]]], {0: Address("10.0.0.9", 7003)}) for unknown in (None, b"", b"?")),
        ([[-(10**6), 10**6, ONE]], {0: FIRST, 16383: FIRST}),
        ([], {}),
        # A migration: slots change hands in no order, and some have no master for a while.
        ([[7, 7, ONE], [0, 0, TWO], [4, 4, ONE], [3, 3, TWO]], {0: SECOND, 3: SECOND, 4: FIRST, 7: FIRST}),
        # A master whose address another node has now (`noaddr`), as Redis 7.0.15 replies.
        ([[0, 0, ONE], [1, SLOTS - 1, [b"", 0, b"id", []]]], {0: FIRST}),
    ],
)
def test_the_map_of_a_cluster_is_read(ranges: list[Any], expected: dict[int, Address]) -> None:
    masters = masters_of(ranges, MEMBER)
    assert {slot: masters[slot] for slot in expected} == expected
    assert len(masters) == (SLOTS if SLOTS - 1 in expected else len(expected))


Start = Callable[[Callable[[list[bytes]], Iterable[bytes]]], LyingRedis]


@pytest.fixture
def start(closing: contextlib.ExitStack) -> Start:
    return lambda answer: closing.enter_context(LyingRedis(answer))


def sentinel_reply(port: int) -> bytes:
    pairs = {b"name": b"blocks", b"flags": b"master", b"ip": b"127.0.0.1", b"port": b"%d" % port}
    pairs[b"num-other-sentinels"] = b"0"
    state = b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for pair in pairs.items() for text in pair)
    return b"*1\r\n*%d\r\n%b" % (2 * len(pairs), state)


@pytest.mark.parametrize("mode", ["cluster", "sentinel"])
@pytest.mark.parametrize("reply", [b"-WRONGPASS no\r\n", b"-ERR no\r\n", b"+OK\r\n", b"*1\r\n*1\r\n:7\r\n", b"*0\r\n"])
def test_after_an_invalid_reply_another_member_or_sentinel_is_asked(
    mode: str, reply: bytes, start: Start, open_redis: OpenRedis
) -> None:
    asked: list[bytes] = []

    def be_server(command: list[bytes]) -> Iterable[bytes]:
        asked.append(command[0])
        yield b"+OK\r\n"

    def answering(reply: bytes) -> LyingRedis:
        return start(lambda command: [reply if command[0].upper() in (b"CLUSTER", b"SENTINEL") else b"+OK\r\n"])

    port = start(be_server).port
    useful = slots_reply([(0, SLOTS - 1, "127.0.0.1", port)]) if mode == "cluster" else sentinel_reply(port)
    service = {} if mode == "cluster" else {"service": "blocks"}
    open_redis(mode=mode, nodes=[answering(reply).address, answering(useful).address], **service)
    wait_until(lambda: b"SET" in asked or b"GET" in asked)


def test_sentinels_that_refuse_the_password_are_said_to(start: Start, open_redis: OpenRedis) -> None:
    server = start(lambda command: [b"-WRONGPASS no\r\n" if command[0] == b"AUTH" else b"+OK\r\n"])
    with pytest.raises(TierUnavailableError, match="refuses the user or password"):
        open_redis(mode="sentinel", service="blocks", nodes=[server.address], sentinel_password="wrong")
