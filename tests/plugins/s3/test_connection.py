"""The s3 tier reads HTTP in any pieces, within limits, and by a deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tiered_kv.metrics.counters import Counters
from tiered_kv.testing.control import wait_until
from tiered_kv_s3.connection import HEAD_BYTES_MAX, BadAnswerError, Connection, Endpoint, Patience
from tiered_kv_s3.metrics import METRICS
from tiered_kv_s3.pool import ConnectionPool, open_connection

STALL_S = 120.0
"""How long a connection may go without a byte: longer than any delay of a busy machine."""


@pytest.fixture
def answers() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the server's end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], False, "/b")
        connection = open_connection(endpoint, None, Patience(time.monotonic() + STALL_S, STALL_S))
        server, _ = listening.accept()
    with server:
        yield connection, server
        connection.close()


def test_an_answer_may_come_in_any_pieces(answers: tuple[Connection, socket.socket]) -> None:
    connection, server = answers
    text = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 10\r\nX-A:  b \r\n\r\n0123456789"

    def drip() -> None:
        for at in range(0, len(text), 7):
            server.sendall(text[at : at + 7])
            time.sleep(0.001)

    thread = threading.Thread(target=drip)
    thread.start()
    answer = connection.receive_head()
    assert (answer.status, answer.headers["x-a"], answer.body_bytes) == (200, "b", 10)
    parts = [bytearray(4), bytearray(6)]
    connection.receive_body([memoryview(part) for part in parts])
    thread.join()
    assert b"".join(parts) == b"0123456789"
    assert connection.is_reusable
    assert connection.is_usable()
    server.sendall(b"unexpected")
    wait_until(lambda: not connection.is_usable(), STALL_S)


def test_a_body_that_is_sent_once_the_head_is_acknowledged_comes_at_once(
    answers: tuple[Connection, socket.socket],
) -> None:
    """As Ceph's gateway sends it: with Nagle's algorithm, which waits for acknowledgements."""
    connection, server = answers
    times = []
    for _ in range(20):
        connection.send([b"GET"])
        assert server.recv(3, socket.MSG_WAITALL) == b"GET"
        begin = time.monotonic()
        server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
        server.sendall(b"body")
        connection.receive_head()
        connection.receive_body([memoryview(bytearray(4))])
        times.append(time.monotonic() - begin)
    assert sorted(times)[10] < 0.02  # Linux delays an acknowledgement by 40 ms


def test_an_unexpected_body_is_not_read_as_the_next_answer(answers: tuple[Connection, socket.socket]) -> None:
    connection, server = answers
    server.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNoSuchKey")
    assert connection.receive_head(has_body=False).status == 404
    wait_until(lambda: not (connection.is_reusable and connection.is_usable()), STALL_S)  # it may come in two pieces


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (HEAD_BYTES_MAX + 8192),
    ],
    ids=["version", "status", "negative", "huge", "colon", "interim", "endless"],
)
def test_an_invalid_answer_is_refused(answers: tuple[Connection, socket.socket], head: bytes) -> None:
    connection, server = answers
    server.sendall(head)
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(BadAnswerError):
        connection.receive_head()
    assert not connection.is_reusable


def test_the_deadline_ends_a_trickling_answer(answers: tuple[Connection, socket.socket]) -> None:
    connection, server = answers
    server.sendall(b"HTTP/1.1 200 OK\r\n")
    begin = time.monotonic()
    connection.patience = Patience(begin + 0.1, STALL_S)
    with pytest.raises(TimeoutError):
        connection.receive_head()
    assert time.monotonic() - begin < STALL_S / 2


def test_a_reused_connection_has_the_limits_of_its_next_request() -> None:
    first, second = (Patience(time.monotonic() + STALL_S, STALL_S) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], False, "/b")
        pool = ConnectionPool(endpoint, None, Counters(METRICS))
        connection = pool.take(first)
        with listening.accept()[0] as server:
            server.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            connection.receive_head()
            pool.give_back(connection)
            assert pool.take(second) is connection
            assert connection.patience is second
            connection.close()
