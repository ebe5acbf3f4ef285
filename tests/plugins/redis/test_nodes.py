"""Several servers: their addresses as members and sentinels report them, and a server that is down delays no other."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.loopback import LyingRedis, Slots, Storage, slots_reply
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.reasons import Reason
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

from redis.crc import key_slot

from tiered_kv_redis.administration import RedisAdministration
from tiered_kv_redis.connection import Link, pool_options
from tiered_kv_redis.exchange import Calls, Failures, run
from tiered_kv_redis.node import Node
from tiered_kv_redis.reasons import reason_of_error
from tiered_kv_redis.replies import command as encoded
from tiered_kv_redis.settings import Address, RedisSettings
from tiered_kv_redis.topology import Topology, masters_of

SLOTS = 16_384
PROBE = [b"STRLEN", b"tkv1:probe"]


class Member:
    """A server that answers correctly, or with one error to all commands on values.

    Args:
        ranges: The map that it reports: first and last slot of each master, and its address.
    """

    def __init__(self, ranges: Callable[[], list[Slots]] = list) -> None:
        self.error = b""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.heard: list[list[bytes]] = []
        self._storage = Storage()
        self._ranges = ranges
        self.server = LyingRedis(self._answer)

    def has(self, key: OffloadKey) -> bool:
        """Return whether it has a block."""
        return any(name.endswith(key) for name in self._storage.values)

    def empty(self) -> None:
        """Delete all blocks."""
        for name in [name for name in self._storage.values if not name.endswith((b":epoch", b":namespace"))]:
            del self._storage.values[name]

    def _answer(self, command: list[bytes]) -> Iterable[bytes]:
        self.heard.append(command)
        self.may_answer.wait()
        if command[0] == b"CLUSTER":
            yield slots_reply(self._ranges())
        elif self.error and command[0] in (b"GET", b"SET", b"STRLEN"):
            yield self.error
        else:
            yield self._storage.reply(command)


@pytest.fixture
def two_masters() -> Iterator[list[Member]]:
    """A cluster of two masters, each with half of the slots."""
    members: list[Member] = []

    def ranges() -> list[Slots]:
        half = SLOTS // 2
        ports = [member.server.port for member in members]
        return [(0, half - 1, "127.0.0.1", ports[0]), (half, SLOTS - 1, "127.0.0.1", ports[1])]

    members += [Member(ranges), Member(ranges)]
    yield members
    for member in members:
        member.may_answer.set()
        member.server.close()


def reason_of_load(rig: TierRig, keys: list[OffloadKey]) -> str:
    return rig.wait([rig.submit_load(keys)])[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("error", [b"-LOADING wait\r\n", b"-CLUSTERDOWN The cluster is down\r\n"])
def test_a_server_that_can_be_used_for_nothing_is_not_asked_until_it_answers(
    error: bytes, open_redis: OpenRedis
) -> None:
    member = Member()
    with member.server:
        rig = open_redis(url=f"redis://{member.server.address}")
        keys = make_keys(4)
        assert rig.store(keys).success
        member.error = error
        assert rig.load(keys) == set()
        start = len(member.heard)
        wait_until(lambda: member.heard[start:].count(PROBE) >= 3)
        assert rig.load(keys) == set()
        assert not [command for command in member.heard[start:] if command[0] == b"GET"], "it was asked for blocks"
        member.error = b""
        wait_until(lambda: rig.load(keys) == set(keys))
        rig.close()


def test_a_cluster_that_is_down_is_a_failure_of_the_tier_and_stays_one(
    two_masters: list[Member], open_redis: OpenRedis
) -> None:
    rig = open_redis(mode="cluster", nodes=[member.server.address for member in two_masters])
    keys = make_keys(8)
    assert rig.store(keys).success
    for member in two_masters:
        member.error = b"-CLUSTERDOWN The cluster is down\r\n"
    assert reason_of_load(rig, keys) == "cluster_down", "no failure for the breaker"
    starts = [len(member.heard) for member in two_masters]
    wait_until(lambda: all(PROBE in each.heard[start:] for each, start in zip(two_masters, starts, strict=True)))
    assert reason_of_load(rig, keys) == "cluster_down"
    assert rig.tier.lookup_failures == 0
    assert not rig.lookup(keys[0])
    assert rig.tier.lookup_failures == 1, "no failure for the breaker"
    for member in two_masters:
        member.error = b""
    wait_until(lambda: rig.load(keys) == set(keys))


def test_a_slot_without_a_server_is_no_failure_of_the_server_that_reports_it(
    two_masters: list[Member], open_redis: OpenRedis
) -> None:
    rig = open_redis(mode="cluster", nodes=[two_masters[0].server.address])
    keys = make_keys(8)
    assert rig.store(keys).success
    two_masters[0].error = b"-CLUSTERDOWN Hash slot not served\r\n"
    assert 0 < len(rig.load(keys)) < len(keys)
    two_masters[0].error = b""
    assert rig.load(keys) == set(keys), "a server that answered counts as down"


def test_a_slot_that_moves_costs_its_blocks_and_is_no_failure_of_the_tier(
    two_masters: list[Member], open_redis: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_redis(mode="cluster", nodes=[two_masters[0].server.address])
    keys, new = make_keys(16), make_keys(16, "new")
    assert rig.store(keys).success
    two_masters[0].error = b"-ASK 1 127.0.0.1:7000\r\n"
    before = rig.tier.lookup_failures
    assert rig.lookup_all(keys) == [two_masters[1].has(key) for key in keys]
    assert rig.tier.lookup_failures == before
    for key in keys:
        (result,) = rig.wait([rig.submit_load([key])])
        assert result.success if two_masters[1].has(key) else result.cause.is_harmless
    assert rig.store(new).cause.is_harmless
    counts = rig.tier.stats()
    assert 0 < count_of(counts, "failed_lookups_total", "ask") < len(keys)
    assert 0 < count_of(counts, "failed_blocks_total", "load", "ask") < len(keys)
    assert not caplog.records
    two_masters[0].error = b""
    assert rig.load(keys) == set(keys)


def test_a_purge_goes_on_beside_a_slot_that_moves() -> None:
    storage, digest, moving = Storage(), f"{1:032x}", [b"-ASK 1 127.0.0.1:7000\r\n"]
    storage.values[f"tkv1:{digest}:{2:016x}:key".encode()] = b"block"

    def answer(command: list[bytes]) -> Iterable[bytes]:
        if command[0] == b"SCAN":
            names = [b"$%d\r\n%b\r\n" % (len(name), name) for name in storage.values]
            yield b"*2\r\n$1\r\n0\r\n*%d\r\n%b" % (len(names), b"".join(names))
        elif command[0] == b"MEMORY":
            yield b":100\r\n"
        elif command[0] == b"UNLINK" and b":key" in command[1] and moving:
            yield moving.pop()
        else:
            yield storage.reply(command)

    with (
        LyingRedis(answer) as server,
        contextlib.closing(RedisAdministration(RedisSettings(url=f"redis://{server.address}"))) as administration,
    ):
        purged = administration.purge(digest, time.monotonic() + 60.0)
    assert (purged.blocks, purged.left) == (1, ())
    assert not storage.values


def test_slots_without_a_master_are_misses_and_the_others_are_used(open_redis: OpenRedis) -> None:
    member = Member(lambda: [(SLOTS // 2, SLOTS - 1, "127.0.0.1", member.server.port)])
    with member.server:
        digests = (bytes([number]) * 16 for number in range(64))
        digest = next(each for each in digests if key_slot(f"tkv1:{each.hex()}:epoch".encode()) >= SLOTS // 2)
        rig = open_redis(digest=digest, mode="cluster", nodes=[member.server.address])
        keys = make_keys(64)
        stored = set(rig.store(keys).successful_keys or ())
        assert 8 < len(stored) < 56
        assert rig.load(keys) == stored
        assert rig.lookup_all(keys) == [key in stored for key in keys]
        assert count_of(rig.tier.stats(), "failed_blocks_total", "load", "cluster_down") == 64 - len(stored)
        rig.close()


def test_the_look_up_of_a_name_is_bounded(open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    look_up = socket.getaddrinfo

    def hang(host: str, *more: object, **named: int) -> object:
        if host == "redis.invalid" and not named.get("flags"):
            assert may_answer.wait(60.0)
        return look_up(host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    begin = time.monotonic()
    try:
        rig = open_redis(host="redis.invalid", connect_timeout="100ms")
        assert reason_of_load(rig, make_keys(1)) == "timeout"
        assert time.monotonic() - begin < 30.0
    finally:
        may_answer.set()
    wait_until(lambda: not any("lookup" in thread.name for thread in threading.enumerate()))


def test_closing_waits_for_all_servers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s: list[float] = []

    def join(self: Node, timeout_s: float) -> None:
        waited_s.append(timeout_s)
        time.sleep(timeout_s)

    monkeypatch.setattr(Node, "join", join)
    monkeypatch.setattr("tiered_kv_redis.topology._CLOSE_WAIT_S", 0.05)
    topology = Topology(RedisSettings(mode="cluster", nodes=["127.0.0.1:7000"]))
    topology._use({slot: Address("127.0.0.1", 7000 + slot) for slot in range(24)})
    topology.close()
    assert len(waited_s) == 24
    assert sum(waited_s) < 0.1


def test_a_cycle_of_causes_has_a_reason() -> None:
    first, second = OSError("first"), TimeoutError("second")
    first.__cause__, second.__cause__ = second, first
    assert reason_of_error(first) == "timeout"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_dead_master_costs_its_own_blocks_and_opens_no_breaker(
    how: str, two_masters: list[Member], open_redis: OpenRedis
) -> None:
    living, dead = two_masters
    rig = open_redis(mode="cluster", nodes=[living.server.address], connect_timeout="2s")
    keys, new = make_keys(60), make_keys(60, "while one is dead")
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)
    if how == "killed":
        dead.server.close()
    else:
        dead.may_answer.clear()
    there = [key for key in keys if living.has(key)]
    assert 0 < len(there) < len(keys)
    assert rig.load(keys) == set(there)
    wait_until(lambda: rig.lookup_all(keys) == [living.has(key) for key in keys])
    failures = rig.tier.lookup_failures
    for key in keys:  # many jobs in a row that load nothing
        (result,) = rig.wait([rig.submit_load([key])])
        assert result.success if living.has(key) else result.cause.is_harmless
    assert rig.lookup_all(keys) == [living.has(key) for key in keys]
    assert rig.tier.lookup_failures == failures
    stored = set(rig.store(new).successful_keys or ())
    assert stored == {key for key in new if living.has(key)} != set()


@pytest.fixture
def frozen(two_masters: list[Member], open_redis: OpenRedis) -> Callable[..., tuple[TierRig, list[OffloadKey]]]:
    """Open a tier over two masters, the second of which then stops to read and to answer.

    Returned with the rig: eight keys, the first of which the first master has. The other blocks are more than the
    second one's socket takes.
    """

    def open_(**settings: object) -> tuple[TierRig, list[OffloadKey]]:
        living, dead = two_masters
        dead.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        rig = open_redis(1 << 20, mode="cluster", nodes=[living.server.address], connections=1, **settings)
        keys = make_keys(40)
        for start in range(0, len(keys), 8):
            assert rig.store(keys[start : start + 8]).success
        mine, theirs = ([key for key in keys if member.has(key)] for member in two_masters)
        dead.empty()
        dead.may_answer.clear()
        return rig, mine[:1] + theirs[:7]

    return open_


@pytest.mark.slow
def test_the_others_wait_for_a_silent_server_no_longer_than_for_a_connection(
    frozen: Callable[..., tuple[TierRig, list[OffloadKey]]],
) -> None:
    rig, keys = frozen(timeout="60s", connect_timeout="2s")
    begin = time.monotonic()
    stored = rig.store(keys)
    assert time.monotonic() - begin < 30.0
    assert stored.successful_keys == keys[:1]
    assert rig.load(keys) == set(keys[:1])


class TakesAllTime(Calls):
    """An exchange with a server that takes nothing until the deadline."""

    def begin(self, link: Link, deadline: float) -> None:
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise TimeoutError("nothing was sent in time")


def test_a_server_that_had_no_time_left_to_answer_is_not_down() -> None:
    with LyingRedis(lambda command: [b":0\r\n"]) as server, contextlib.ExitStack() as held:
        settings, failures = RedisSettings(url=f"redis://{server.address}"), Failures()
        nodes = [Node(name, pool_options(settings, settings.addresses[0])) for name in ("prompt", "silent")]
        for node in nodes:
            held.callback(node.close)
            node.give_back(node.take())
        ask = {at: encoded(b"STRLEN", b"name") for at in range(2)}
        run([Calls(nodes[0], [0], failures, ask), TakesAllTime(nodes[1], [1], failures, ask)], time.monotonic() + 0.1)
        assert failures == dict.fromkeys(range(2), Reason.TIMEOUT)
        assert [node.is_down for node in nodes] == [False, True]


def test_the_server_that_is_down_is_named(
    two_masters: list[Member], open_redis: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    living, dead = two_masters
    rig = open_redis(mode="cluster", nodes=[living.server.address])
    keys = make_keys(16)
    rig.store(keys)
    dead.server.close()
    assert rig.load(keys) == {key for key in keys if living.has(key)}
    assert f"the server {dead.server.address} cannot be reached" in caplog.text


def test_servers_that_are_down_are_the_last_to_be_asked_for_addresses() -> None:
    known = [Address("10.0.0.1", 7000 + number) for number in range(6)]
    topology = Topology(RedisSettings(mode="cluster", nodes=["memory.example:7000"]))
    topology._use(dict(enumerate(known)))
    try:
        for node in topology.nodes()[:4]:
            node._down_reason = Reason.TIMEOUT
        asked = [str(address.host) for address in topology._members()]
        assert asked == ["10.0.0.1"] * 2 + ["memory.example"] + ["10.0.0.1"] * 4
    finally:
        topology.close()


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
