"""Where a cluster's slots are and who is the master, as members and sentinels say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.lying_redis import LyingRedis, slots_reply
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.waiting import wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import Address
from tiered_kv_redis.topology import masters_of

SLOTS = 16_384
MEMBER = Address("10.0.0.9", 7000)
NODE = [b"10.0.0.1", 7001, b"id", [b"hostname", b"one"]]
REPLICA = [b"10.0.0.2", 7002, b"id", []]


def node(number: int) -> list[object]:
    return [b"10.0.%d.%d" % divmod(number, 250), 7001, b"id"]


def test_a_cluster_s_map_is_read() -> None:
    masters = masters_of([[0, 8191, NODE, REPLICA], [8192, 16383, [b"db.example", 1]]], MEMBER)
    assert len(masters) == SLOTS
    assert (masters[0], masters[8191]) == (Address("10.0.0.1", 7001),) * 2
    assert (masters[8192], masters[16383]) == (Address("db.example", 1),) * 2
    for unknown in (None, b"", b"?"):  # a member that does not know its own name
        assert masters_of([[0, 0, [unknown, 7003]]], MEMBER) == {0: Address("10.0.0.9", 7003)}


def test_slots_that_no_cluster_has_take_no_memory() -> None:
    assert set(masters_of([[-(10**6), 10**6, NODE]], MEMBER)) == set(range(16_384))


@pytest.mark.parametrize(
    ("ranges", "slots"),
    [
        ([], set()),  # nobody has any slots yet
        ([[5, 5, NODE]], {5}),
        # A migration: slot after slot changes hands, in no order, and some have no master for a while.
        ([[7, 9, node(1)], [0, 2, node(2)], [4, 4, node(1)], [3, 3, node(2)]], {0, 1, 2, 3, 4, 7, 8, 9}),
        # A master whose address another node has now (`noaddr`), as Redis 7.0.15 answers.
        ([[0, 10922, node(1)], [10923, SLOTS - 1, [b"", 0, b"id", []]]], set(range(10923))),
        ([[slot, slot, node(slot % 2), REPLICA] for slot in range(0, SLOTS, 2)], set(range(0, SLOTS, 2))),
    ],
)
def test_what_a_cluster_says_while_slots_move_is_read(ranges: list[Any], slots: set[int]) -> None:
    assert set(masters_of(ranges, MEMBER)) == slots


Start = Callable[[Callable[[list[bytes]], Iterable[bytes]]], LyingRedis]


@pytest.fixture
def start(closing: contextlib.ExitStack) -> Start:
    return lambda answer: closing.enter_context(LyingRedis(answer))


@pytest.mark.parametrize("answer", [b"-ERR no\r\n", b"+OK\r\n", b"*1\r\n*1\r\n:7\r\n", b"*0\r\n"])
def test_another_member_is_asked_after_one_that_talks_nonsense(
    answer: bytes, start: Start, open_redis: OpenRedis
) -> None:
    asked: list[bytes] = []

    def be_honest(command: list[bytes]) -> Iterable[bytes]:
        asked.append(command[0])
        yield slots_reply([(0, SLOTS - 1, "127.0.0.1", honest.port)]) if command[0] == b"CLUSTER" else b"+OK\r\n"

    honest = start(be_honest)
    useless = start(lambda command: [answer if command[0] == b"CLUSTER" else b"+OK\r\n"])
    open_redis(mode="cluster", nodes=[useless.address, honest.address])
    wait_until(lambda: b"SET" in asked or b"GET" in asked)


def sentinel_that_names(start: Start, host: bytes, port: int) -> LyingRedis:
    pairs = {b"name": b"blocks", b"flags": b"master", b"ip": host, b"port": b"%d" % port, b"num-other-sentinels": b"0"}
    state = b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for pair in pairs.items() for text in pair)
    answer = b"*1\r\n*%d\r\n%b" % (2 * len(pairs), state)
    return start(lambda command: [answer if command[0].upper() == b"SENTINEL" else b"+OK\r\n"])


@pytest.mark.parametrize("answer", [b"-WRONGPASS no\r\n", b"-ERR no\r\n", b"+OK\r\n", b"*1\r\n*1\r\n:7\r\n"])
def test_another_sentinel_is_asked_after_one_that_is_of_no_use(
    answer: bytes, start: Start, open_redis: OpenRedis
) -> None:
    asked: list[bytes] = []

    def be_master(command: list[bytes]) -> Iterable[bytes]:
        asked.append(command[0])
        yield b"+OK\r\n"

    useless = start(lambda command: [answer if command[0].upper() == b"SENTINEL" else b"+OK\r\n"])
    useful = sentinel_that_names(start, b"127.0.0.1", start(be_master).port)
    open_redis(mode="sentinel", service="blocks", nodes=[useless.address, useful.address])
    wait_until(lambda: b"SET" in asked or b"GET" in asked)


def test_sentinels_that_refuse_the_password_are_said_to(start: Start, open_redis: OpenRedis) -> None:
    server = start(lambda command: [b"-WRONGPASS no\r\n" if command[0] == b"AUTH" else b"+OK\r\n"])
    with pytest.raises(TierUnavailableError, match="refuses the user or password"):
        open_redis(mode="sentinel", service="blocks", nodes=[server.address], sentinel_password="wrong")
