"""The server of a stack: its answers and its limits."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.faulty import FourMethodTier, Gate
from tests.support.forks import fork
from tests.support.stacks import Register, ReplaceModule, stack_of
from tests.support.threads import meanwhile, no_threads
from tiered_kv.config.stack_config import MetricsSettings
from tiered_kv.errors import ConfigError, MissingExtraError
from tiered_kv.stack.exporters import server as server_module
from tiered_kv.stack.exporters.server import CONNECTIONS_MAX, LINE_BYTES_MAX, Body, StatusServer
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

BLOCK_BYTES = 4096
TIMEOUT_S = 20.0


def config_of(listen: str = "127.0.0.1:0", **others: Any) -> dict[str, object]:
    return stack_of({"type": "memory", "capacity": "1MiB"}, metrics={"listen": listen}, **others)


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(config_of()) as stack:
        yield stack


def ask(server: StatusServer | None, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    assert server is not None
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_S)
    with closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def raw(server: StatusServer, request: bytes) -> bytes:
    """Return all that comes back for some bytes."""
    with socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(request)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_a_stack_shows_its_metrics_and_its_status(stack: Stack) -> None:
    keys, blocks = make_keys(8), np.zeros((8, BLOCK_BYTES), np.uint8)
    stack.put(keys, blocks)
    stack.flush()
    status, headers, body = ask(stack.server, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert list(text_string_to_metric_families(body.decode()))
    status, headers, body = ask(stack.server, "/status?anything=else")
    assert (status, headers["content-type"]) == (200, "application/json")
    shown = json.loads(body)
    assert shown["namespace"] == stack.config.identity.digest.hex()
    cpu, memory = shown["tiers"]
    assert (cpu["name"], cpu["used_bytes"], cpu["capacity_bytes"]) == ("cpu", 8 * BLOCK_BYTES, 16 * BLOCK_BYTES)
    assert (memory["type"], memory["breaker"], memory["is_disabled"]) == ("memory", "closed", False)
    assert memory["budgets"]["store"] == {"used_bytes": 0, "limit_bytes": 4 * BLOCK_BYTES}
    assert memory["p99_seconds"]["store"] > 0
    assert memory["p99_seconds"]["load"] is None
    assert memory["counters"]["stored_blocks_total"] == memory["counters"]["tier"]["blocks"] == 8
    assert shown["notices"] == []
    assert ask(stack.server, "/healthz")[::2] == (200, b"ok\n")


def test_it_only_reads(stack: Stack) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, headers, _ = ask(stack.server, "/metrics", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert ask(stack.server, "/")[0] == ask(stack.server, "/metrics/../etc")[0] == 404
    _, _, body = ask(stack.server, "/metrics")
    status, head, nothing = ask(stack.server, "/metrics", "HEAD")
    assert (status, nothing) == (200, b"")
    assert abs(int(head["content-length"]) - len(body)) < 200


def test_it_listens_on_loopback_by_default() -> None:
    assert MetricsSettings().address == ("127.0.0.1", 9464)
    assert MetricsSettings(listen="[::1]:80").address == ("::1", 80)


@pytest.mark.parametrize(
    "listen", ["9464", ":9464", "127.0.0.1", "127.0.0.1:99999", "user:word@host:80", "a b:80", "a..b:80"]
)
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        open_stack(config_of(listen))


def test_a_port_that_is_taken_is_a_clear_error_and_nothing_is_left(stack: Stack) -> None:
    assert stack.server is not None
    taken = f"127.0.0.1:{stack.server.port}"
    with pytest.raises(ConfigError, match=rf"metrics.listen: cannot listen on {taken}: Address already in use"):
        open_stack(config_of(taken))


def test_a_stack_that_cannot_be_opened_listens_no_more() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    broken = config_of(f"127.0.0.1:{port}")
    broken["secondary"] = [{"type": "memory", "capacity": 1}]
    with pytest.raises(ConfigError, match="capacity"):
        open_stack(broken)
    open_stack(config_of(f"127.0.0.1:{port}")).close()


def test_without_the_library_the_error_names_the_extra_and_no_thread_is_left_behind(
    replace_module: ReplaceModule, register: Register
) -> None:
    """The manager has given the tier a thread by then."""
    register("four", FourMethodTier)
    before = set(threading.enumerate())
    replace_module("prometheus_client")
    with pytest.raises(MissingExtraError, match="pip install 'prometheus-client>="):
        open_stack(config_of(secondary=[{"type": "four"}]))
    assert set(threading.enumerate()) <= before


def test_a_stack_without_the_setting_listens_nowhere() -> None:
    config = config_of()
    del config["metrics"]
    before = threading.active_count()
    with open_stack(config) as stack:
        assert stack.server is None
        assert not [thread for thread in threading.enumerate() if "status" in thread.name]
    assert threading.active_count() <= before


# Its limits, with routes of the test's own.


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer("127.0.0.1", 0)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def greeting(server: StatusServer) -> StatusServer:
    """A server that says hello."""
    server.start({"/": lambda query: Body(b"hello", "text/plain")})
    return server


def test_a_ninth_connection_is_refused_and_served_once_another_has_ended(server: StatusServer, gate: Gate) -> None:
    def slow(query: Any) -> Body:
        gate.pass_through()
        return Body(b"done", "text/plain")

    server.start({"/slow": slow})
    gate.close()
    with ExitStack() as opened:
        connections = []
        for _ in range(CONNECTIONS_MAX):
            connection = socket.create_connection((server.host, server.port), timeout=TIMEOUT_S)
            connections.append(opened.enter_context(connection))
            connection.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
            wait_until(lambda: gate.waiting == len(connections))
        assert raw(server, b"") == b""
        gate.open()
        assert all(connection.recv(12) == b"HTTP/1.0 200" for connection in connections)
    wait_until(lambda: raw(server, b"GET /slow HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 200"))


def test_a_connection_for_which_there_is_no_thread_is_refused_and_the_next_one_is_served(server: StatusServer) -> None:
    server.start({"/fine": lambda query: Body(b"fine", "text/plain")})
    with no_threads():
        for _ in range(CONNECTIONS_MAX + 1):
            assert raw(server, b"") == b""
    assert raw(server, b"GET /fine HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 200 ")


def test_a_head_is_bounded(greeting: StatusServer) -> None:
    assert raw(greeting, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50 + b"\r\n").startswith(b"HTTP/1.0 200")
    assert raw(greeting, b"GET /" + b"x" * (LINE_BYTES_MAX - 5)) == b""
    assert b" 431 " in raw(greeting, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "request_bytes",
    [b"hello\r\n\r\n", b"GET / HTTP/x\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"\xff\xfe\x00 / HTTP/1.1 x\n\n"],
)
def test_what_is_no_request_is_refused(greeting: StatusServer, request_bytes: bytes) -> None:
    assert b" 400 " in raw(greeting, request_bytes)[:500]


def test_a_connection_that_has_lasted_too_long_makes_room(
    greeting: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LIFETIME_S", 0.0)
    with closing(socket.create_connection((greeting.host, greeting.port), timeout=TIMEOUT_S)) as first:
        assert ask(greeting, "/")[0] == 200
        assert first.recv(1) == b""


def test_a_request_that_never_ends_and_an_answer_that_the_client_does_not_read_time_out(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.05)
    server.start({"/": lambda query: Body(bytes(64 << 20), "text/plain")})
    assert raw(server, b"GET / HTT") == b""
    with closing(socket.create_connection((server.host, server.port), timeout=TIMEOUT_S)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_until(lambda: not [each for each in threading.enumerate() if each.name == "tiered-kv-answer"])


def test_a_route_that_fails_says_nothing_of_why(server: StatusServer, caplog: pytest.LogCaptureFixture) -> None:
    def failing(query: Any) -> Body:
        raise RuntimeError("the password is tulip")

    def picky(query: Any) -> Body:
        raise ConfigError("expected key=HEX")

    server.start({"/failing": failing, "/picky": picky})
    for _ in range(2):
        status, _, body = ask(server, "/failing")
        assert (status, b"tulip" in body) == (500, False)
    assert "tulip" not in caplog.text
    assert len(caplog.records) == 1
    assert ask(server, "/picky")[::2] == (400, b"expected key=HEX\n")
    assert ask(server, "/picky?" + "&".join(f"a={number}" for number in range(2000)))[0] == 400


def test_closing_ends_waiting_connections_in_bounded_time(greeting: StatusServer) -> None:
    with closing(socket.create_connection((greeting.host, greeting.port), timeout=TIMEOUT_S)) as connection:
        wait_until(lambda: [each for each in threading.enumerate() if each.name == "tiered-kv-answer"])
        began_s = time.monotonic()
        greeting.close(timeout=TIMEOUT_S)
        assert time.monotonic() - began_s < server_module.SILENCE_S
        assert connection.recv(100) == b""
    greeting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((greeting.host, greeting.port), timeout=1.0)


def test_a_stack_is_scraped_while_it_works(stack: Stack) -> None:
    keys, blocks = make_keys(64), np.zeros((64, BLOCK_BYTES), np.uint8)

    def work() -> None:
        stack.put(keys, blocks)
        stack.get(keys, blocks)

    totals = []
    with meanwhile(work):
        for _ in range(20):
            status, _, body = ask(stack.server, "/metrics")
            assert status == 200
            values = {each.name: each for each in text_string_to_metric_families(body.decode())}
            (loaded,) = [
                sample.value for sample in values["tiered_kv_loaded_blocks"].samples if sample.labels == {"tier": "cpu"}
            ]
            totals.append(loaded)
            assert ask(stack.server, "/status")[0] == 200
    assert totals == sorted(totals)


def test_a_forked_child_does_not_close_the_server(stack: Stack) -> None:
    child = fork()
    if not child:
        stack.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(stack.server, "/healthz")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\n", b"GET /large HTTP/1.0\r\n\r\n"])
def test_clients_that_are_waited_for_keep_nobody_out(sent: bytes) -> None:
    server = StatusServer("127.0.0.1", 0)
    server.start({"/healthz": lambda _: Body(b"ok", "text/plain"), "/large": lambda _: Body(bytes(64 << 20), "a/b")})
    with ExitStack() as slow:
        slow.callback(server.close)
        for _ in range(3 * CONNECTIONS_MAX):
            slow.enter_context(socket.create_connection((server.host, server.port), timeout=TIMEOUT_S)).sendall(sent)
        for _ in range(3):
            assert ask(server, "/healthz")[0] == 200


def test_a_connection_that_cannot_be_taken_does_not_end_the_server(
    greeting: StatusServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_RETRY_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(greeting, "handle_request", lambda: 1 // 0)
        with socket.create_connection((greeting.host, greeting.port), timeout=TIMEOUT_S):
            wait_until(lambda: "was not answered" in caplog.text)
    assert raw(greeting, b"GET / HTTP/1.0\r\n\r\n")
