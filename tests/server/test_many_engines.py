"""With many engines and rows, one waits for another no longer: each pass of the server does a limited part."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.host_server import WAIT_S, keys_of, packet, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.server import protocol
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.protocol import Hello
from tiered_kv.server.questions import Questions
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.server import CacheServer, listen
from tiered_kv.server.session import Session
from tiered_kv.server.session_request import SessionRequest

KEYS = keys_of(8)
ROWS = 256


class Passes:
    """A server that makes a pass when the test says so, and clients of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        namespaces = Namespaces(stack_of(ROWS))
        namespaces.open_own()
        self.host: ServedStack = namespaces.stacks[0]
        self.server = CacheServer(listen(path), namespaces, pidfd_of=self._pidfd_of)
        self._ends: list[int] = []
        self.clients: list[Client] = []

    def _pidfd_of(self, sock: socket.socket, pid: int) -> int:
        self._ends.append(os.eventfd(0))
        return self._ends[-1]

    def client(self, name: str) -> Client:
        client = Client(self, name)
        self.clients.append(client)
        return client

    def last_end(self) -> int:
        return os.dup(self._ends[-1])

    def until(self, is_over: Callable[[], object]) -> int:
        """Make passes until `is_over()`; return how many."""
        for count in range(1000):
            if is_over():
                return count
            self.server.serve_once(0)
        raise AssertionError("it takes too many passes")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


class Client:
    """A process of its own, for the server."""

    def __init__(self, passes: Passes, name: str) -> None:
        self._passes = passes
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(passes.path))
        self.send(protocol.HELLO, body=protocol.to_json(Hello(name, "scheduler")))
        passes.until(lambda: name in passes.host.sessions)
        self.session = passes.host.sessions[name]
        self._end_fd = passes.last_end()
        passes.server.serve_once(0)
        _, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 3)
        for fd in fds:
            os.close(fd)
        self.sock.setblocking(False)
        self.received: list[tuple[int, int]] = []
        """Codes and numbers of all messages."""

    def send(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        self.sock.send(packet(code, number, count, body, flags))

    def count(self, code: int) -> int:
        """Return how many messages of a kind have come."""
        with suppress(BlockingIOError):
            while received := self.sock.recv(1 << 17):
                self.received += [(each.code, each.number) for each in protocol.messages_of(memoryview(received))]
        return sum(each == code for each, _ in self.received)

    def store(self) -> None:
        """Store `KEYS`."""
        self.send(protocol.GRANT, len(KEYS))
        self._passes.until(lambda: len(self.session.granted) >= len(KEYS))
        rows = [*self.session.granted][: len(KEYS)]
        self.begin(1)
        self.send(protocol.COMMIT, 1, len(KEYS), b"".join(KEYS) + protocol.pack_rows(rows))
        self.send(protocol.END, 1)
        self._passes.until(lambda: len(self._passes.host.manager.primary.blocks) == len(KEYS))

    def ask_rows(self) -> None:
        """Have `ROWS` // 4 more rows granted."""
        before = len(self.session.granted)
        self.send(protocol.GRANT, ROWS // 4)
        self._passes.until(lambda: len(self.session.granted) == before + ROWS // 4)

    def begin(self, number: int) -> None:
        self.send(protocol.BEGIN, number, body=protocol.pack_begun(0, "request", None))

    def lease(self, number: int) -> None:
        """Lease the rows of `KEYS` for a request."""
        before = self.count(protocol.ANSWER)
        self.begin(number)
        self.send(protocol.ACQUIRE, number, len(KEYS), b"".join(KEYS), protocol.AHEAD)
        self._passes.until(lambda: self.count(protocol.ANSWER) > before)

    def die(self) -> None:
        """End, as a process that is killed."""
        self.sock.close()
        os.eventfd_write(self._end_fd, 1)

    def close(self) -> None:
        self.sock.close()
        os.close(self._end_fd)


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    for limit in ("READ_S", "TURN_S", "LEAVE_S"):
        monkeypatch.setattr(f"tiered_kv.server.server.{limit}", WAIT_S)  # a busy machine takes no part of a pass
    made = Passes(tmp_path / "cache.sock")
    yield made
    made.close()


def test_one_who_sends_much_waits_for_the_others(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, calm = passes.client("busy"), passes.client("calm")
    monkeypatch.setattr("tiered_kv.server.server.TURN_S", 0.0)  # a message a turn
    busy.sock.send(b"".join(packet(protocol.PING, number) for number in range(1, 101)))
    calm.send(protocol.PING, 1)
    passes.server.serve_once(0)
    assert calm.count(protocol.PONG) == 1
    assert busy.count(protocol.PONG) == 1
    assert passes.until(lambda: busy.count(protocol.PONG) == 100) >= 99
    assert [number for code, number in busy.received if code == protocol.PONG] == [*range(1, 101)]


def test_all_are_read_though_a_pass_has_no_time_for_all(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [passes.client(f"engine-{number}") for number in range(8)]
    monkeypatch.setattr("tiered_kv.server.server.READ_S", 0.0)
    for each in clients:
        each.send(protocol.PING, 1)
    passes.server.serve_once(0)
    assert sum(each.count(protocol.PONG) for each in clients) == 1
    assert passes.until(lambda: all(each.count(protocol.PONG) for each in clients)) == 7


def test_a_step_looks_at_no_idle_engine(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    active, *idle = [passes.client(f"engine-{number}") for number in range(20)]
    active.store()
    for each in idle:
        each.lease(2)
    seen: list[str] = []
    answer_changed, answer_waiting = Session.answer_changed, Session.answer_waiting

    def answer(session: Session, call: Callable[[Session], None]) -> None:
        seen.append(session.name)
        call(session)

    monkeypatch.setattr(Session, "answer_changed", lambda session: answer(session, answer_changed))
    monkeypatch.setattr(Session, "answer_waiting", lambda session: answer(session, answer_waiting))
    active.lease(3)
    for _ in range(3):
        passes.server.serve_once(0)
    assert set(seen) == {"engine-0"}
    assert not passes.host.is_busy


def test_ends_of_many_engines_are_spread_over_passes(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.server.LEAVE_S", 0.0)  # an end a pass
    calm, *others = [passes.client(f"engine-{number}") for number in range(20)]
    calm.store()
    for each in others:
        each.lease(2)
    assert passes.host.leases == len(KEYS) * len(others)
    for each in others:
        each.die()
    for number in range(1, 10):
        calm.send(protocol.PING, number)
        passes.server.serve_once(0)
        assert calm.count(protocol.PONG) == number
        assert len(passes.host.sessions) >= 20 - number
    passes.until(lambda: not passes.host.leases)
    assert [*passes.host.sessions] == ["engine-0"]


def test_the_rows_of_an_ended_engine_become_free_in_parts(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.ended.SWEEP_ROWS", 5)
    calm, other = passes.client("calm"), passes.client("other")
    calm.store()
    other.send(protocol.GRANT, 7)
    other.lease(2)
    granted = passes.host.granted
    other.die()
    passes.until(lambda: "other" not in passes.host.sessions)
    left = []
    while passes.host.ended:
        left.append(passes.host.leases + passes.host.granted)
        passes.server.serve_once(0)
    assert max(before - after for before, after in pairwise(left)) <= 5
    assert (passes.host.leases, passes.host.granted) == (0, granted - 7)


def test_who_needs_rows_gets_those_of_an_ended_engine_at_once(passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.ended.SWEEP_ROWS", 1)
    calm, other, third = passes.client("calm"), passes.client("other"), passes.client("third")
    for each in (calm, third):
        each.ask_rows()
    for session in (calm.session, third.session):  # the others are somewhere else, such as in a promotion
        session.granted.clear()
    passes.host.granted = 0
    for each in (other, third):
        each.ask_rows()
    assert not passes.host.manager.primary.backend.get_num_free_blocks()
    other.die()
    passes.until(lambda: "other" not in passes.host.sessions)
    calm.ask_rows()


def test_an_engine_may_use_the_id_of_a_request_that_is_being_swept(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.server.ended.SWEEP_ROWS", 1)
    calm = passes.client("calm")
    calm.store()
    for _ in range(4):
        calm.lease(7)
        assert passes.host.leases == len(KEYS)
        assert passes.host.requests == 1
        calm.send(protocol.END, 7)
    passes.until(lambda: not passes.host.ended and not passes.host.requests)
    assert not passes.host.leases


def test_a_step_asks_the_tiers_a_limited_number_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.questions.KEYS_A_STEP", 4)
    questions, seen = Questions(), list[int]()
    requests = [SessionRequest(number, ReqContext(f"request-{number}"), 0) for number in range(4)]
    for each in requests:
        questions.ask(each, KEYS[:2])

    def tell(request: SessionRequest, keys: list[OffloadKey]) -> bool:
        seen.append(request.number)
        return request.number != 1  # a tier is slow

    questions.answer(tell)
    assert seen == [0, 1]
    questions.answer(tell)
    assert seen == [0, 1, 1, 2]
    questions.answer(tell)
    assert seen == [0, 1, 1, 2, 1, 3]
    assert questions
