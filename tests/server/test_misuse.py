"""One client does what it should not do: the server and the others go on."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_server import keys_of, packet, raw_client, serving
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.testing.control import wait_until

KEYS = keys_of(12)


def begin(sock: socket.socket, number: int) -> None:
    sock.send(packet(protocol.BEGIN, number, body=protocol.BEGUN.pack(0, 1) + b"r"))


def test_a_client_that_never_reads_loses_its_connection_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.server.acceptor.UNREAD_BYTES_MAX", 1 << 16)
    with serving(tmp_path) as served:
        honest = served.engine()
        honest.store(KEYS)
        with raw_client(served, "deaf") as sock, suppress(BrokenPipeError, ConnectionResetError):
            begin(sock, 1)
            for first in range(0, 32 * 1024, 512):  # each is answered with the codes of all keys in a row
                keys = keys_of(512, 10_000 + first)
                sock.send(packet(protocol.ACQUIRE, 1, 512, b"".join(keys)))
            for number in range(2, 500):
                begin(sock, number)
                sock.send(packet(protocol.ACQUIRE, number, 512, b"".join(keys)))
        assert honest.load(KEYS) == len(KEYS)


@pytest.mark.parametrize("is_granted", [False, True])
@pytest.mark.parametrize("code", [protocol.RELEASE, protocol.COMMIT, protocol.RETURN])
def test_a_client_that_claims_rows_which_it_does_not_hold_loses_its_connection_only(
    tmp_path: Path, code: int, is_granted: bool
) -> None:
    with serving(tmp_path) as served:
        honest = served.engine()
        honest.store(KEYS)
        lease = honest.begin()
        honest.look_up(KEYS, lease)
        leased = honest.manager.prepare_load(KEYS, lease).block_ids.tolist()
        link = honest.manager.link
        assert link is not None
        row = link.free[0] if is_granted else leased[0]  # granted to the other, or leased by it
        before = served.rows_in_use()
        with raw_client(served, "thief") as sock:
            begin(sock, 1)
            sock.send(packet(code, 1, 1, (KEYS[0] if code == protocol.COMMIT else b"") + protocol.pack_rows([row])))
            wait_until(lambda: len(served.server._processes.connected) == 1)
        assert served.rows_in_use() == before
        honest.manager.complete_load(KEYS, lease)
        assert honest.load(KEYS) == len(KEYS)


def test_a_user_who_is_not_allowed_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        numbers = served.server._acceptor.users.numbers
        allowed = numbers.copy()
        numbers.clear()
        with pytest.raises(TieredKVError, match="may not use this cache; start the server with --allow-user"):
            served.engine()
        numbers |= allowed
        assert served.engine().store(KEYS) == KEYS


def test_an_engine_is_answered_beside_a_client_that_sends_without_end(tmp_path: Path) -> None:
    over = threading.Event()

    def flood(sock: socket.socket) -> None:
        number = 0
        with suppress(OSError):  # until it has too many keys
            while not over.is_set():
                number += 1
                begin(sock, number)
                for first in range(0, protocol.REQUEST_KEYS_MAX, 512):
                    sock.send(packet(protocol.ACQUIRE, number, 512, b"".join(keys_of(512, first))))
                sock.send(packet(protocol.END, number))

    with serving(tmp_path) as served, raw_client(served, "flood") as sock:
        thread = threading.Thread(target=flood, args=(sock,))
        thread.start()
        honest = served.engine()
        honest.store(KEYS)
        for _ in range(5):
            assert honest.load(KEYS) == len(KEYS)
        over.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_worker_that_connects_again_and_again_keeps_one_descriptor(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine("engine")
        for _ in range(20):
            with raw_client(served, "engine", "worker"):
                pass
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        assert len(served.server._processes) <= 3


def test_a_scheduler_that_was_started_anew_is_not_taken_for_the_last(tmp_path: Path) -> None:
    with serving(tmp_path, never_ends=True) as served:
        first = served.engine("engine")
        with raw_client(served, "engine", "worker"):
            first.store(KEYS)
            first.close()
            served.engines.clear()
            wait_until(lambda: len(served.server._processes) == 1)
            with pytest.raises(TieredKVError, match="still runs"):  # and may copy
                served.engine("engine")


def test_blocks_so_small_that_the_server_s_numbers_take_more_memory_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, {"primary": {"capacity": "64MiB"}}) as served:
        with pytest.raises(TieredKVError, match=r"block\.bytes: expected at least 128 bytes from a client, found 1"):
            served.engine(settings={"namespace": {"model": "test"}, "block": {"bytes": 1}})
        assert not served.namespaces.stacks


@pytest.mark.parametrize("odd", [math.nan, -1.0])
def test_costs_that_are_no_times_are_refused(tmp_path: Path, odd: float) -> None:
    with serving(tmp_path) as served, raw_client(served, "odd") as sock:
        begin(sock, 1)
        sock.send(packet(protocol.EXPECT, 1, body=protocol.EXPECTED.pack(1, 0, 0, 0, odd, 0.0, 0.0, 0.0)))
        codes: list[int] = []
        while protocol.REFUSED not in codes:
            received = sock.recv(1 << 16)
            assert received
            codes += [message.code for message in protocol.messages_of(memoryview(received))]


def test_questions_that_no_tier_answers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        monkeypatch.setattr(served.host.manager, "contains_many", lambda keys, _: [None] * len(keys))
        monkeypatch.setattr("tiered_kv.server.questions.QUESTIONS_MAX", 200)
        with raw_client(served, "asks") as sock:
            begin(sock, 1)
            with suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(500):
                    sock.send(packet(protocol.ACQUIRE, 1, 1, KEYS[0], protocol.ONLY_STORED))
            wait_until(lambda: not served.server._processes.connected)


def test_a_question_of_a_request_that_has_ended_asks_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        session: Any = next(iter(served.host.sessions.values()))  # has more than its namespace sees
        requests: list[int] = []

        def never(keys: Sequence[OffloadKey], _: object) -> list[None]:
            requests.append(len(session.requests))
            return [None] * len(keys)

        monkeypatch.setattr(served.host.manager, "contains_many", never)
        context = engine.begin()
        engine.manager.contains_many(KEYS, context)
        engine.step_until(lambda: requests)
        engine.end(context)
        wait_until(lambda: not session.is_waiting)
        assert 0 not in requests


@pytest.mark.parametrize("body", [b"", b"\0" * 9, protocol.BEGUN.pack(0, 5) + b"r", protocol.BEGUN.pack(0, 1) + b"r{"])
def test_a_request_that_begins_with_garbage_ends_its_connection_only(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path) as served:
        honest = served.engine()
        with raw_client(served, "odd") as sock:
            sock.send(packet(protocol.BEGIN, 1, body=body))
            wait_until(lambda: len(served.server._processes.connected) == 1)
        assert honest.store(KEYS) == KEYS
