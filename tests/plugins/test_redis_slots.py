"""Where a cluster's slots are, as somebody says who may lie: believed as a whole, or refused as a whole and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.lying_redis import LyingRedis
from tiered_kv.testing.redis_servers import PATIENT, free_port
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.base import TierSpec

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.reasons import WireError
from tiered_kv_redis.settings import Address, RedisSettings
from tiered_kv_redis.slots import MASTERS_MAX, SLOTS, believed_address, masters_of
from tiered_kv_redis.tier import RedisTier

MEMBER = Address("10.0.0.9", 7000)
NODE = [b"10.0.0.1", 7001, b"id", [b"hostname", b"one"]]
REPLICA = [b"10.0.0.2", 7002, b"id", []]


def node(number: int) -> list[object]:
    return [b"10.0.%d.%d" % divmod(number, 250), 7001, b"id"]


def test_a_cluster_s_map_is_believed() -> None:
    masters = masters_of([[0, 8191, NODE, REPLICA], [8192, 16383, [b"db.example", 1]]], MEMBER)
    assert len(masters) == SLOTS
    assert (masters[0], masters[8191]) == (Address("10.0.0.1", 7001),) * 2
    assert (masters[8192], masters[16383]) == (Address("db.example", 1),) * 2


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
        ([[slot, slot, node(slot % MASTERS_MAX)] for slot in range(SLOTS)], set(range(SLOTS))),
    ],
)
def test_what_a_cluster_may_say_while_slots_move_is_believed(ranges: list[Any], slots: set[int]) -> None:
    assert set(masters_of(ranges, MEMBER)) == slots


@pytest.mark.parametrize("host", [None, b"", b"?"])
def test_a_member_that_does_not_know_its_name_is_called_as_it_was_reached(host: object) -> None:
    assert masters_of([[0, 0, [host, 7003]]], MEMBER) == {0: Address("10.0.0.9", 7003)}


@pytest.mark.parametrize(
    "ranges",
    [
        None,
        b"OK",
        7,
        [7],
        [[]],
        [[0, 1]],
        [[0, 1, []]],
        [[0, 1, [b"10.0.0.1"]]],
        [[b"0", 1, NODE]],
        [[0, b"1", NODE]],
        [[None, 1, NODE]],
        [[0, 20_000_000, NODE]],
        [[0, 10**15, NODE]],
        [[0, SLOTS, NODE]],
        [[-1, 5, NODE]],
        [[6, 5, NODE]],
        [[0, 5, NODE], [5, 9, node(1)]],
        [[0, 5, NODE], [0, 5, NODE]],
        [[0, 1, b"10.0.0.1"]],
        [[0, 1, [b"10.0.0.1", b"7001"]]],
        [[0, 1, [b"10.0.0.1", 65_536]]],
        [[0, 1, [b"10.0.0.1", -7001]]],
        [[0, 1, [7, 7001]]],
        [[0, 1, [[], 7001]]],
        [[0, 1, [b"x" * 256, 7001]]],
        [[0, 1, [b"\xff\xfe", 7001]]],
        [[0, 1, [b"a host", 7001]]],
        [[0, 1, [b"host\n", 7001]]],
        [[slot, slot, node(slot)] for slot in range(MASTERS_MAX + 1)],
    ],
)
def test_a_map_that_no_cluster_has_is_refused(ranges: object) -> None:
    with pytest.raises(WireError) as refused:
        masters_of(ranges, MEMBER)
    assert refused.value.reason == "protocol"


@pytest.mark.parametrize(("host", "port"), [("a.example", "26379"), ("", 1), ("x" * 256, 1), (None, 1), ("a/b", 1)])
def test_what_is_no_address_is_not_believed_of_a_sentinel_either(host: object, port: object) -> None:
    with pytest.raises(WireError):
        believed_address(host, port)


def test_addresses_of_every_kind_are_believed() -> None:
    for host in ("10.0.0.1", "::1", "fe80::1%eth0", "redis-1.db_a.example"):
        assert believed_address(host, 6379) == Address(host, 6379)


Start = Callable[[Callable[[list[bytes]], Iterable[bytes]]], LyingRedis]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[LyingRedis] = []

    def start_one(answer: Callable[[list[bytes]], Iterable[bytes]]) -> LyingRedis:
        servers.append(LyingRedis(answer))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def open_rig(**settings: object) -> TierRig:
    checked = RedisSettings.model_validate({**PATIENT, **settings})
    return TierRig(
        lambda spec, view: RedisTier(spec, view, "redis", checked),
        num_blocks=64,
        block_bytes=4096,
        wait_s=60.0,
        spec=TierSpec("redis", 4096, bytes(16)),
    )


def range_of(first: int, last: int, port: int) -> bytes:
    return b"*1\r\n*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (first, last, port)


@pytest.mark.parametrize("last", [20_000_000, -1])
def test_a_lying_cluster_is_a_counted_failure(last: int, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(lambda command: [range_of(0, last, 7000) if command[0] == b"CLUSTER" else b"+OK\r\n"])
    rig = open_rig(mode="cluster", nodes=[server.address])
    try:
        assert "no server can be used yet (protocol)" in caplog.text
        result = rig.store(make_keys(4))
        assert (result.success, result.reason) == (False, "protocol")
        assert not rig.lookup(make_keys(1)[0])
        assert rig.tier.stats()["failed_stores_protocol"] == 4
    finally:
        rig.close()


def test_a_member_that_lies_does_not_keep_another_from_being_asked(start: Start) -> None:
    asked: list[bytes] = []

    def be_honest(command: list[bytes]) -> Iterable[bytes]:
        asked.append(command[0])
        yield range_of(0, SLOTS - 1, honest.port) if command[0] == b"CLUSTER" else b"+OK\r\n"

    honest = start(be_honest)
    liar = start(lambda command: [range_of(5, 4, 7000) if command[0] == b"CLUSTER" else b"+OK\r\n"])
    rig = open_rig(mode="cluster", nodes=[liar.address, honest.address])
    try:
        wait_until(lambda: b"SET" in asked or b"GET" in asked)
    finally:
        rig.close()


def sentinel_that_names(start: Start, host: bytes, port: int) -> LyingRedis:
    pairs = {b"name": b"blocks", b"flags": b"master", b"ip": host, b"port": b"%d" % port, b"num-other-sentinels": b"0"}
    state = b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for pair in pairs.items() for text in pair)
    answer = b"*1\r\n*%d\r\n%b" % (2 * len(pairs), state)
    return start(lambda command: [answer if command[0].upper() == b"SENTINEL" else b"+OK\r\n"])


def test_a_sentinel_that_names_no_address_is_a_counted_failure(start: Start) -> None:
    server = sentinel_that_names(start, b"no host", free_port())
    rig = open_rig(mode="sentinel", service="blocks", nodes=[server.address])
    try:
        result = rig.store(make_keys(4))
        assert (result.success, result.reason) == (False, "protocol")
    finally:
        rig.close()


@pytest.mark.parametrize("answer", [b"-WRONGPASS no\r\n", b"-ERR no\r\n", b"+OK\r\n", b"*1\r\n*1\r\n:7\r\n"])
def test_a_sentinel_that_is_of_no_use_does_not_keep_another_from_being_asked(answer: bytes, start: Start) -> None:
    asked: list[bytes] = []

    def be_master(command: list[bytes]) -> Iterable[bytes]:
        asked.append(command[0])
        yield b"+OK\r\n"

    useless = start(lambda command: [answer if command[0].upper() == b"SENTINEL" else b"+OK\r\n"])
    useful = sentinel_that_names(start, b"127.0.0.1", start(be_master).port)
    rig = open_rig(mode="sentinel", service="blocks", nodes=[useless.address, useful.address])
    try:
        wait_until(lambda: b"SET" in asked or b"GET" in asked)
    finally:
        rig.close()


def test_sentinels_that_refuse_the_password_are_said_to(start: Start) -> None:
    server = start(lambda command: [b"-WRONGPASS no\r\n" if command[0] == b"AUTH" else b"+OK\r\n"])
    with pytest.raises(TierUnavailableError, match="refuses the user or password"):
        open_rig(mode="sentinel", service="blocks", nodes=[server.address], sentinel_password="wrong")
