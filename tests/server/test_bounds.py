"""What clients can make a server keep is bounded, and a mistake in one place does not end the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.host_server import WAIT_S, Served, keys_of, packet, raw_client, serving
from tiered_kv.errors import TieredKVError
from tiered_kv.hints import HINTS_KEY
from tiered_kv.server import acceptor, protocol, server
from tiered_kv.server.channel import Channel
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.process import Process, open_pidfd
from tiered_kv.server.protocol import Hello
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.testing.control import wait_until

KEYS = keys_of(12)


def refusal_of(sock: socket.socket) -> str:
    """Return why a client loses its connection."""
    while True:
        try:
            received = sock.recv(1 << 17)
        except ConnectionResetError:  # the server left our messages unread; its last one follows (unix(7))
            received = sock.recv(1 << 17)
        assert received, "the connection ended without a word"
        for message in protocol.messages_of(memoryview(received)):
            if message.code == protocol.REFUSED:
                return bytes(message.body).decode()


def begin(sock: socket.socket, number: int, hints: object = None) -> None:
    more = b"" if hints is None else json.dumps(hints).encode()
    sock.send(packet(protocol.BEGIN, number, body=protocol.BEGUN.pack(0, 1) + b"r" + more))


def test_hints_that_are_too_long_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, raw_client(served, "verbose") as sock:
        begin(sock, 1, {"x": ["y" * protocol.HINTS_BYTES_MAX]})
        assert f"at most {protocol.HINTS_BYTES_MAX} bytes" in refusal_of(sock)


def test_a_server_keeps_of_hints_what_they_mean(tmp_path: Path) -> None:
    with serving(tmp_path) as served, raw_client(served, "hints") as sock:
        begin(sock, 1, {"priority": 1, "skip": ["store"] * 50})
        begin(sock, 2, {"unknown": [[]] * 1000})
        wait_until(lambda: served.count(lambda host: host.requests) == 2)
        (session,) = served.host.sessions.values()
        kept = [(each.context.kv_transfer_params or {})[HINTS_KEY] for each in session.requests.values()]
        assert kept[0] == {"priority": 1, "ttl": None, "expect_return": None, "skip": ["store"]}
        assert len(json.dumps(kept[1])) < 20
        sock.send(packet(protocol.END, 1) + packet(protocol.ACQUIRE, 2, 1, KEYS[0], protocol.ONLY_KNOWN))
        refused = "refused_hints_total"
        wait_until(lambda: served.count(lambda host: host.stack.counters()["cpu"][refused]) == 1)


@pytest.mark.parametrize("limit", ["REQUESTS_MAX", "REQUESTS_ALL_MAX", "KEYS_MAX", "KEYS_ALL_MAX"])
def test_requests_and_their_keys_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"tiered_kv.server.session.{limit}", 8)
    with serving(tmp_path) as served, raw_client(served, "greedy") as sock:
        for number in range(1, 10):
            with suppress(BrokenPipeError, ConnectionResetError):
                begin(sock, number)
                sock.send(packet(protocol.ACQUIRE, number, 1, KEYS[0]))
        assert "expected at most" in refusal_of(sock)
        wait_until(lambda: not served.host.sessions)
        wait_until(lambda: (served.host.requests, served.host.keys) == (0, 0))


def test_what_all_clients_leave_unread_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_ALL_BYTES_MAX", 1 << 16)
    with serving(tmp_path) as served, raw_client(served, "deaf") as sock:
        honest = served.engine()
        honest.store(KEYS)
        with suppress(BrokenPipeError, ConnectionResetError):
            for number in range(1, 2000):
                begin(sock, number)
                sock.send(packet(protocol.ACQUIRE, number, 512, b"".join(keys_of(512, 10_000))))
        wait_until(lambda: len(served.server._processes.connected) == 1)
        assert honest.load(KEYS) == len(KEYS)


def test_connections_beyond_the_limit_are_refused_with_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connections_max", lambda _: 3)
    with serving(tmp_path) as served, ExitStack() as stack:
        for number in range(3):
            stack.enter_context(raw_client(served, f"idle-{number}"))
        with pytest.raises(TieredKVError, match="3 processes are connected, and there can be no more"):
            served.engine()
        stack.pop_all().close()
        wait_until(lambda: not served.server._processes.connected)
        assert served.engine().store(KEYS) == KEYS


def test_connections_leave_descriptors_to_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiered_kv.server.descriptors import CONNECTIONS_MAX, CONNECTIONS_MIN, OF_A_CONNECTION, connections_max
    from tiered_kv.system.limits import Limit, Limits

    for limit, taken in ((1024, 16), (1024, 900), (64, 60), (1 << 20, 16)):
        monkeypatch.setattr(Limits, "descriptors", lambda _, limit=limit: Limit(limit, "ulimit -n"))
        most = connections_max(taken)
        assert CONNECTIONS_MIN <= most <= CONNECTIONS_MAX
        assert most == CONNECTIONS_MIN or OF_A_CONNECTION * most + taken < limit
        assert most == CONNECTIONS_MIN or OF_A_CONNECTION * most < limit / 2


def test_a_server_without_descriptors_takes_connections_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    accept = socket.socket.accept

    def fails_twice(sock: socket.socket) -> tuple[socket.socket, object]:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(24, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(acceptor, "ACCEPT_PAUSE_S", 0.2)
    monkeypatch.setattr(socket.socket, "accept", fails_twice)
    with serving(tmp_path) as served:
        assert served.engine().store(KEYS) == KEYS
        assert len(calls) < 8, "it tries again at once"


def test_connections_without_rows_that_a_living_process_has_left_are_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        for number in range(20):
            with raw_client(served, f"left-{number}"):
                pass
        wait_until(lambda: not served.server._processes and not served.host.sessions)


def test_processes_of_another_pid_namespace_are_not_taken_for_each_other(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pidfds = [os.eventfd(0), os.eventfd(0), os.pidfd_open(os.getpid()), os.pidfd_open(child.pid)]
        channel, hello = Channel(ours, 1), Hello("engine", "scheduler")
        unseen = [Process(channel, 0, pidfd, 0.0, hello) for pidfd in pidfds]
        assert not any(each.is_same_as(other) for each in unseen for other in unseen if other is not each)
        seen = [Process(channel, 7, pidfd, 0.0, hello) for pidfd in pidfds[:2]]
        assert seen[0].is_same_as(seen[1])
        for fd in pidfds:
            os.close(fd)
        child.communicate(b"\n")


def test_the_end_of_a_process_that_nobody_can_see_is_not_waited_for(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pidfd = open_pidfd(ours, 0)
        if pidfd >= 0:  # Linux 6.5 knows the peer without its number
            os.close(pidfd)


def asks_and_ends(served: Served, program: str) -> None:
    """Let a process send what `program` says, and end, before the server reads any of it."""
    start = f"""
import os, socket
from tests.support.host_server import keys_of, packet
from tiered_kv.server import protocol
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect({served.address.removeprefix("unix:")!r})
sock.send(packet(protocol.HELLO, body=protocol.to_json(protocol.Hello("leaves", "scheduler"))))
sock.recv(1 << 16)
print("attached", flush=True)
input()
"""
    command = [sys.executable, "-c", start + program + "\nos._exit(0)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        has_ended = threading.Event()
        served.server.call_soon(partial(has_ended.wait, WAIT_S))
        process.communicate("\n")
        has_ended.set()


def test_a_server_reads_what_a_process_has_sent_before_it_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.engine().store(KEYS)
        many = "for number in range(40): sock.send(packet(protocol.PING, number))\n"
        asks_and_ends(served, many + "sock.send(packet(protocol.RESET))")
        wait_until(lambda: served.count(lambda host: host.epoch) == 1)


@pytest.mark.slow
def test_a_reset_behind_what_a_client_may_not_send_is_carried_out(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.engine().store(KEYS)
        asks_and_ends(served, "sock.send(packet(200))\nsock.send(packet(protocol.RESET))")
        wait_until(lambda: served.count(lambda host: host.epoch) == 1)


def test_a_step_that_fails_ends_the_sessions_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        with monkeypatch.context() as patch:
            patch.setattr(served.host.manager, "on_schedule_end", lambda: 1 // 0)
            engine.step_until(lambda: engine.manager.server.losses)
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.store(KEYS) == KEYS
    assert sum("a mistake of ours" in each for each in caplog.messages) == 1


def test_a_call_that_fails_does_not_end_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.server.call_soon(partial(int, "no number"))
        assert served.engine().store(KEYS) == KEYS


def test_clients_that_wait_for_a_stack_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.namespaces.WAITING_MAX", 2)
    namespaces = Namespaces({"primary": {"capacity": "1MiB"}})
    calls: list[Callable[[], None]] = []
    answers: list[ServedStack | TieredKVError] = []
    for _ in range(3):
        namespaces.open({"namespace": {"model": "m"}, "block": {"bytes": 4096}}, calls.append, answers.append)
    assert [str(each) for each in answers] == ["2 clients wait until the stack is open: try again"]
    wait_until(lambda: bool(calls))
    while calls:
        calls.pop(0)()
    assert [isinstance(each, ServedStack) for each in answers[1:]] == [True, True]
    namespaces.close()
