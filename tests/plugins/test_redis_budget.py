"""What a server says in lists is bounded as a whole, nested items and all, and so is what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.lying_redis import LyingRedis

pytest.importorskip("redis", reason="redis-py is not installed")

from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError

from tiered_kv_redis import administration
from tiered_kv_redis.administration import RedisAdministration
from tiered_kv_redis.budget import ITEM_BYTES, REPLIES_BYTES_MAX
from tiered_kv_redis.endpoint import pool_options
from tiered_kv_redis.exchange import Calls, converse
from tiered_kv_redis.listing import Listing, scan
from tiered_kv_redis.node import Node, NodeDownError
from tiered_kv_redis.replies import command
from tiered_kv_redis.settings import Address, RedisSettings
from tiered_kv_redis.stream import PlainStream

MIB = 1 << 20
DIGEST = bytes(range(16))
PREFIX = b"tkv1:" + DIGEST.hex().encode() + b":"
ITEMS_MAX = REPLIES_BYTES_MAX // ITEM_BYTES
OK = b"+OK\r\n"

Answer = Callable[[list[bytes]], Iterable[bytes]]
Start = Callable[[Answer], tuple[LyingRedis, Node]]


def soon() -> float:
    return time.monotonic() + 60.0


def settings_of(server: LyingRedis) -> RedisSettings:
    return RedisSettings.model_validate({"url": f"redis://{server.address}", "connect_timeout": "15s"})


def text(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


def page(cursor: bytes, names: Iterable[bytes]) -> bytes:
    listed = [text(name) for name in names]
    return b"*2\r\n%b*%d\r\n%b" % (text(cursor), len(listed), b"".join(listed))


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[tuple[LyingRedis, Node]] = []

    def start_one(answer: Answer) -> tuple[LyingRedis, Node]:
        server = LyingRedis(lambda command: [OK] if command[0] == b"CLIENT" else answer(command))
        node = Node(server.address, pool_options(settings_of(server), Address("127.0.0.1", server.port)))
        started.append((server, node))
        return started[-1]

    yield start_one
    for server, node in started:
        node.close()
        server.close()


TOO_MUCH = {
    "texts": (b"*64\r\n", text(bytes(MIB)), 64),
    "texts in lists": (b"*64\r\n", b"*1\r\n" + text(bytes(MIB)), 64),
    "small texts": (b"*%d\r\n" % (ITEMS_MAX + 1), b"$0\r\n\r\n", ITEMS_MAX + 1),
    "empty lists": (b"*60000\r\n", b"*10000\r\n" + b":1\r\n" * 10_000, 60_000),
    "short lists": (b"*40000\r\n", b"*2\r\n:1\r\n:1\r\n", 40_000),
    "lines": (b"*60000\r\n", b"+" + b"x" * 4_000 + b"\r\n", 60_000),
}


@pytest.mark.parametrize("form", TOO_MUCH)
def test_a_list_that_is_too_much_in_sum_is_refused_before_it_is_received(
    form: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    received_bytes = 0
    receive = PlainStream.receive

    def counted(stream: PlainStream, views: Sequence[memoryview], deadline: float) -> int:
        nonlocal received_bytes
        count = receive(stream, views, deadline)
        received_bytes += count
        return count

    monkeypatch.setattr(PlainStream, "receive", counted)
    head, piece, count = TOO_MUCH[form]

    def answer(_: list[bytes]) -> Iterator[bytes]:
        yield head
        for _number in range(count):
            yield piece

    _, node = start(answer)
    listing = Listing(node, [command(b"ANY")])
    converse([listing], soon())
    assert (listing.trouble, listing.replies) == ("too_long", [])
    assert received_bytes < REPLIES_BYTES_MAX + MIB  # the buffer may hold what comes next


def test_the_replies_to_one_batch_have_one_budget(start: Start) -> None:
    _, node = start(lambda _: [text(bytes(MIB))])
    listing = Listing(node, [command(b"ANY")] * 8)
    converse([listing], soon())
    assert listing.trouble == "too_long"
    assert len(listing.replies) == REPLIES_BYTES_MAX // MIB - 1
    again = Listing(node, [command(b"ANY")] * 3)
    converse([again], soon())
    assert len(again.replies) == 3
    assert not again.trouble


def test_short_replies_have_one_budget_too(start: Start) -> None:
    _, node = start(lambda _: [b"+" + b"x" * 4_000 + b"\r\n"])
    calls = Calls(node, [command(b"ANY")] * 2_000)
    converse([calls], soon())
    assert calls.trouble == "too_long"
    assert len(calls.replies) == REPLIES_BYTES_MAX // 4_000


def test_what_an_honest_server_says_fits(start: Start) -> None:
    names = [PREFIX + b"%016x:" % 7 + b"%0200d" % number for number in range(10_000)]
    _, node = start(lambda command: [page(b"0", names) if command[0] == b"SCAN" else b":65664\r\n"])
    assert scan(node, b"0", b"*", 500, soon()).names == names
    lengths = Calls(node, [command(b"STRLEN", name) for name in names * 10])
    converse([lengths], soon())
    assert lengths.replies == [65_664] * 100_000


@pytest.mark.parametrize(
    "reply",
    [
        b"*2\r\n$1\r\nx\r\n*0\r\n",
        b"*2\r\n" + text(b"1" * 21) + b"*0\r\n",
        b"*2\r\n$-1\r\n*0\r\n",
        b"*2\r\n$1\r\n0\r\n:3\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n:3\r\n",
        b"*1\r\n$1\r\n0\r\n",
        b"+OK\r\n",
    ],
)
def test_what_is_no_page_of_names_is_refused(reply: bytes, start: Start) -> None:
    _, node = start(lambda _: [reply])
    with pytest.raises(NodeDownError) as refused:
        scan(node, b"0", b"*", 500, soon())
    assert refused.value.reason == "protocol"


def test_foreign_names_are_counted_and_not_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "_FOREIGN_MAX", 100)
    kept: list[administration._Removed] = []

    class Watched(administration._Removed):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    monkeypatch.setattr(administration, "_Removed", Watched)

    def answer(command: list[bytes]) -> Iterator[bytes]:
        at = int(command[1])
        yield page(b"%d" % ((at + 1) % 5), [PREFIX + b"%d:%d" % (at, number) + bytes(10_000) for number in range(60)])

    server, _ = start(answer)
    tier = RedisAdministration(settings_of(server))
    try:
        purged = tier.purge(DIGEST.hex(), soon())
    finally:
        tier.close()
    assert purged.left == ("at least 100 names that are not of this tool were left",)
    assert len(kept[0].foreign) == 100
    assert all(isinstance(each, int) for each in kept[0].foreign)


def test_namespaces_without_number_are_an_error(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "_NAMESPACES_BYTES_MAX", MIB)
    pages = 0

    def answer(command: list[bytes]) -> Iterator[bytes]:
        nonlocal pages
        pages += 1
        at = int(command[1])
        yield page(b"%d" % (at + 1), [b"tkv1:%032x:namespace" % (500 * at + number) for number in range(500)])

    refuse_to_list(start, answer)
    assert pages == MIB // 128 // 500 + 1


def test_readable_forms_are_bounded_in_sum(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "_NAMESPACES_BYTES_MAX", MIB)
    read: list[bytes] = []

    def answer(command: list[bytes]) -> Iterator[bytes]:
        if command[0] == b"SCAN":
            yield page(b"0", [b"tkv1:%032x:namespace" % number for number in range(9)])
        else:
            read.append(command[1])
            yield text(b"x" * (MIB // 2))

    refuse_to_list(start, answer)
    assert len(read) == 2


def refuse_to_list(start: Start, answer: Answer) -> None:
    server, _ = start(answer)
    tier = RedisAdministration(settings_of(server))
    try:
        with pytest.raises(TierUnavailableError, match="too_long"):
            tier.namespaces(soon())
    finally:
        tier.close()


@pytest.mark.parametrize("piece", [b"*0\r\n", b":1\r\n", b"*1\r\n:1\r\n"])
def test_items_count_in_what_redis_py_reads(piece: bytes, start: Start) -> None:
    """Four bytes on the wire make an object, so bytes alone would let a connection take twenty times as much."""
    many = ITEMS_MAX + 1
    server, _ = start(lambda _: [b"*%d\r\n" % many, piece * many])
    pool = ConnectionPool(**pool_options(settings_of(server), Address("127.0.0.1", server.port)))
    try:
        connection = pool.get_connection()
        connection.send_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]  # redis-py annotates some only
        with pytest.raises(ConnectionError, match="more than an answer"):
            connection.read_response()
    finally:
        pool.disconnect()


def test_the_slots_of_a_cluster_in_pieces_fit(start: Start) -> None:
    replica = b"*4\r\n$15\r\n255.255.255.255\r\n:65535\r\n" + text(b"i" * 40) + b"*0\r\n"
    ranges = b"".join(b"*5\r\n:%d\r\n:%d\r\n%b" % (slot, slot, replica * 3) for slot in range(2_900))
    server, _ = start(lambda _: [b"*2900\r\n" + ranges])
    pool = ConnectionPool(**pool_options(settings_of(server), Address("127.0.0.1", server.port)))
    try:
        connection = pool.get_connection()
        connection.send_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]  # as above
        assert len(connection.read_response()) == 2_900
    finally:
        pool.disconnect()
