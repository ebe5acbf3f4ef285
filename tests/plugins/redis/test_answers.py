"""Replies of every kind, whole and broken: each block gets the bytes of its own reply, or none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from tests.plugins.conftest import OpenRedis
from tests.support.loopback import LoopbackServer, LyingRedis, Storage
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys

pytest.importorskip("redis", reason="redis-py is not installed")

BLOCK_BYTES = 1000
REPLY_BYTES = len(b"$1128\r\n") + 128 + BLOCK_BYTES + len(b"\r\n")
PREFIX_BYTES = len("tkv1:") + 33 + 17
"""Of a block's name, before its key."""
NIL = b"$-1\r\n"


@dataclass
class Liar:
    """A server with wrong replies to one command on some blocks, and correct replies otherwise."""

    verb: bytes = b"GET"
    replies: dict[OffloadKey, bytes] = field(default_factory=dict)  # wrong replies to `verb`
    hangs_up_after: OffloadKey | None = None
    piece_bytes: int = 1 << 20  # of a reply, sent at once
    hold: int = 1  # replies to `verb` that are sent together
    storage: Storage = field(default_factory=Storage)
    _held: list[bytes] = field(default_factory=list)

    def answer(self, command: list[bytes]) -> Iterable[bytes]:
        reply = self.storage.reply(command)
        key = OffloadKey(b"".join(command[1:2])[PREFIX_BYTES:])
        if command[0] == self.verb and key:
            self._held.append(self.replies.get(key, reply))
            if key != self.hangs_up_after and len(self._held) < self.hold:
                return
            reply = b"".join(self._held)
            self._held.clear()
        for at in range(0, len(reply), self.piece_bytes):
            yield reply[at : at + self.piece_bytes]
        if key and key == self.hangs_up_after:
            raise ConnectionResetError

    def be_honest(self) -> None:
        self.replies, self.hangs_up_after, self.hold = {}, None, 1


@pytest.fixture
def liar() -> Liar:
    return Liar()


@pytest.fixture
def server(liar: Liar) -> Iterator[LyingRedis]:
    with LyingRedis(liar.answer) as server:
        yield server


@pytest.fixture
def open_rig(server: LyingRedis, open_redis: OpenRedis, monkeypatch: pytest.MonkeyPatch) -> OpenRedis:
    monkeypatch.setattr("tiered_kv_redis.node._PAUSE_MIN_S", 0.001)  # the server is honest again at once
    return lambda **more: open_redis(BLOCK_BYTES, url=f"redis://{server.address}", connections=1, **more)


def failures(rig: TierRig, operation: str = "load") -> Mapping[str, int]:
    """Return how many blocks failed, by reason."""
    counts: Mapping[str, int] = rig.tier.stats().get("failed_blocks_total", {}).get(operation, {})
    return counts


@pytest.mark.parametrize(
    ("piece_bytes", "pipeline", "hold"),
    [(1, 1 << 20, 9), (7, 3000, 1), (7, 1 << 20, 9), (100, 1, 1), (1 << 20, 3000, 1), (1 << 20, 1 << 20, 9)],
)
def test_unexpected_replies_cost_their_own_blocks_only(
    open_rig: OpenRedis, liar: Liar, piece_bytes: int, pipeline: int, hold: int
) -> None:
    rig = open_rig(pipeline=pipeline)
    keys = make_keys(9)
    rig.store(keys)
    records = {key: value for name, value in liar.storage.values.items() if (key := OffloadKey(name[PREFIX_BYTES:]))}
    short, other = records[keys[5]][:-1], records[keys[1]]
    liar.replies = {
        keys[0]: NIL,
        keys[2]: b"$0\r\n\r\n",
        keys[3]: b"-LOADING wait\r\n",
        keys[5]: b"$%d\r\n%b\r\n" % (len(short), short),
        keys[7]: b"$%d\r\n%b\r\n" % (len(other), other),
        keys[8]: NIL,
    }
    liar.piece_bytes, liar.hold = piece_bytes, hold
    assert rig.load(keys) == {keys[1], keys[4], keys[6]}
    assert failures(rig) == {"absent": 2, "truncated": 2, "loading": 1, "wrong_key": 1}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 3


@pytest.mark.parametrize("cut", [0, 1, 5, 100, 130, 1000, REPLY_BYTES - 2, REPLY_BYTES - 1])
def test_a_connection_that_ends_within_a_reply_fails_what_was_not_answered(
    open_rig: OpenRedis, liar: Liar, cut: int
) -> None:
    rig = open_rig()
    keys = make_keys(3)
    rig.store(keys)
    whole = liar.storage.reply([b"GET", next(name for name in liar.storage.values if name.endswith(keys[1]))])
    liar.replies, liar.hangs_up_after = {keys[1]: whole[:cut]}, keys[1]
    assert rig.load(keys) <= {keys[0]}
    assert "unavailable" in failures(rig)
    liar.be_honest()
    wait_until(lambda: rig.load(keys) == set(keys))


LONG = b"$99999999999\r\n"
NO_REPLIES: dict[bytes, list[bytes]] = {
    b"GET": [
        *(b"*1\r\n:1\r\n", b":1\r\n", b"+OK\r\n", LONG, b"$9999999999999999\r\n", b"$x\r\n", b"\r\n", b"$-2\r\n"),
        *(b"$2\r\nabc\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"x" * (16 << 10)),
    ],
    b"SET": [b":1\r\n", b"+QUEUED\r\n", b"$2\r\nNO\r\n", b"*0\r\n", b"+OK\n\r\n", b"+OKOK\r\n"],
    b"STRLEN": [b"*1\r\n:1\r\n", b"+OK\r\n", NIL, b":-3\r\n", b":\r\n", b"$4\r\n1128\r\n", b":9x\r\n"],
}
"""What is no reply to a load, a store or a lookup."""


@pytest.mark.one_quick(4)
@pytest.mark.parametrize(
    ("verb", "reply", "position"),
    [
        (verb, reply, position)
        for verb, replies in NO_REPLIES.items()
        for reply in replies
        for position in ((0, 3, 5) if verb == b"SET" else (1,))
    ],
)
def test_what_is_no_reply_ends_the_connection_and_costs_the_blocks_from_there_on(
    open_rig: OpenRedis, liar: Liar, verb: bytes, reply: bytes, position: int
) -> None:
    rig = open_rig()
    keys, new = make_keys(6), make_keys(6, "new")
    rig.store(keys)
    wrong = (new if verb == b"SET" else keys)[position]
    liar.verb, liar.replies, liar.hold = verb, {wrong: reply}, 6 if verb == b"SET" else 1
    if verb == b"SET":
        assert list(rig.store(new).successful_keys or ()) == new[:position]
        assert failures(rig, "store") == {"protocol": 6 - position}
    elif verb == b"GET":
        others = set(keys) - {wrong} if reply == LONG else set(keys[:position])  # which are requested again
        assert rig.load(keys) == others
        assert set(failures(rig)) <= {"protocol", "too_long"}
    else:
        assert not rig.lookup(wrong)
    liar.be_honest()
    wait_until(lambda: rig.store([*keys, *new]).success)
    assert rig.load([*keys, *new]) == {*keys, *new}


@pytest.mark.parametrize("piece_bytes", [1, 3, 5, 7, 1 << 20])
@pytest.mark.parametrize("hold", [1, 11])
def test_each_reply_to_a_store_is_its_own_blocks(open_rig: OpenRedis, liar: Liar, piece_bytes: int, hold: int) -> None:
    rig = open_rig()
    keys = make_keys(11)
    rig.store([keys[2], keys[7]])
    refused = {keys[4]: b"-OOM no\r\n", keys[6]: b"-WHATEVER is this\r\n", keys[9]: b"-LOADING wait\r\n"}
    liar.verb, liar.replies, liar.piece_bytes, liar.hold = b"SET", refused, piece_bytes, hold
    assert set(rig.store(keys).successful_keys or ()) == set(keys) - set(refused)
    assert failures(rig, "store") == {"no_space": 1, "server_error": 1, "loading": 1}
    assert rig.tier.stats()["present_blocks_total"] == 2


@pytest.mark.parametrize("verb", [b"GET", b"SET"])
def test_a_reply_too_many_is_not_left_for_the_next_job(open_rig: OpenRedis, liar: Liar, verb: bytes) -> None:
    rig = open_rig()
    keys, new = make_keys(8), make_keys(4, "new")
    rig.store(keys)
    liar.verb, liar.hold = verb, 4
    if verb == b"GET":
        record = next(value for name, value in liar.storage.values.items() if name.endswith(keys[3]))
        liar.replies = {keys[3]: b"$1128\r\n%b\r\n+OK\r\n" % record}
        rig.load(keys[:4])
    else:
        liar.replies = {new[3]: b"+OK\r\n+OK\r\n"}
        rig.store(new)
    liar.be_honest()
    wait_until(lambda: rig.load(keys) == set(keys))
    assert rig.store(make_keys(4, "newer")).success


class Doorman(LoopbackServer):
    """Answers each connection with one error before any command, and closes it."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        sock.sendall(self._reply)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # so that closing resets nothing that is under way
            pass


@pytest.mark.parametrize(
    "entry",
    [{}, {"password": "hunter2"}, {"db": 3}, {"mode": "sentinel", "service": "blocks"}, {"mode": "cluster"}],
)
def test_a_server_sentinel_or_member_in_protected_mode_is_an_error_that_says_so(
    open_redis: OpenRedis, entry: dict[str, object]
) -> None:
    with Doorman(b"-DENIED Redis is running in protected mode because of reasons.\r\n") as server:
        where = {"nodes": [server.address]} if "mode" in entry else {"url": f"redis://{server.address}"}
        with pytest.raises(
            TierUnavailableError, match=r"DENIED Redis is running in protected mode.*; .* its 'protected-mode' off"
        ):
            open_redis(**where, **entry)


def test_a_server_with_too_many_clients_is_used_later(open_redis: OpenRedis, caplog: pytest.LogCaptureFixture) -> None:
    with Doorman(b"-ERR max number of clients reached\r\n") as server:
        open_redis(url=f"redis://{server.address}")
    assert "is used as soon as it can be" in caplog.text
    assert "max number of clients reached" in caplog.text
    assert "raise its 'maxclients'" in caplog.text


def test_the_first_failure_is_logged_with_the_server_s_words_and_no_secret(
    liar: Liar, open_rig: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig(password="hunter2", ttl="60s")
    keys = make_keys(8)
    liar.verb = b"SET"
    liar.replies = dict.fromkeys(keys, b"-FULL hunter2 has no \x1b[31mroom\r\n")
    for _ in range(3):
        assert rig.store(keys).reason == "server_error"
    (line,) = [record.getMessage() for record in caplog.records if "stores fail" in record.getMessage()]
    assert "answers with an error (FULL *** has no \\x1b[31mroom); check 'db'" in line
    assert "hunter2" not in caplog.text


def test_a_value_that_cannot_be_deleted_is_counted_and_logged_once(
    liar: Liar, open_rig: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    keys = make_keys(4)
    assert rig.store(keys).success
    liar.storage.values = {name: value[:-1] + b"!" for name, value in liar.storage.values.items()}
    liar.verb = b"UNLINK"
    liar.replies = dict.fromkeys(keys, b"-NOPERM this user has no permissions to run the 'unlink' command\r\n")
    assert rig.load(keys) == set()
    assert failures(rig, "delete") == {"permission": 4}
    (line,) = [record.getMessage() for record in caplog.records if "deletes fail" in record.getMessage()]
    assert "does not permit what this tier does (NOPERM this user has no permissions" in line


@pytest.mark.parametrize(("pipeline", "blocks"), [(1, 2), (4000, 3)])
def test_bytes_under_way_are_bounded(open_rig: OpenRedis, liar: Liar, pipeline: int, blocks: int) -> None:
    rig = open_rig(pipeline=pipeline)
    keys = make_keys(6)
    assert rig.store(keys).success
    liar.hold = blocks  # so many are requested before the first reply
    assert rig.load(keys) == set(keys)
    liar.hold = blocks + 1  # and never more
    (result,) = rig.wait([rig.submit_load(keys, deadline=time.monotonic() + 0.05)])
    assert not result.successful_keys
