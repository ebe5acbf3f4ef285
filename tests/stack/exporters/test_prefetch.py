"""Prefetches over HTTP: what a router says, what it gets, and what a hostile caller costs."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiered_kv
from tests.support.host_server import serving
from tests.support.host_server import stack_of as served_stack_of
from tests.support.stacks import forget_memory, manager_of, stack_of
from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.history.names import KEY_BYTES_MAX, KeyNames
from tiered_kv.stack.exporters.event_messages import hashes_of
from tiered_kv.stack.exporters.prefetch import BODY_BYTES_MAX
from tiered_kv.stack.exporters.server import StatusServer
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.order import KEYS_MAX, ORDER_BLOCKS_MAX, ORDERS_MAX

BLOCK_BYTES = 4096
TOKEN = "a-token-of-a-test"
HASHES = [bytes(24) + number.to_bytes(8, "big") for number in range(1, 9)]
NAMES = list(range(1, 9))
"""The last 64 bits of `HASHES`."""


def disk_of(directory: Path) -> dict[str, object]:
    return {"type": "nvme", "name": "disk", "path": str(directory / "kv"), "capacity": "8MiB"}


def filled(stack: Stack) -> Stack:
    """Return a stack whose disk has `HASHES`, and whose memory has nothing."""
    assert stack.put(HASHES, np.zeros((8, BLOCK_BYTES), np.uint8)) == 8
    assert stack.flush(60.0)
    forget_memory(manager_of(stack))
    return stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with open_stack(stack_of(disk_of(tmp_path), blocks=64, metrics={"listen": "127.0.0.1:0"})) as stack:
        yield filled(stack)


def ask(
    server: StatusServer | None, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    assert server is not None
    with closing(http.client.HTTPConnection(server.host, server.port, timeout=60.0)) as connection:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        about = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        connection.request(method, path, data, about)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text else {}


def begun(server: StatusServer | None, **asked: object) -> str:
    status, answer = ask(server, "POST", "/prefetch", asked)
    assert status == 202, answer
    name: str = answer["id"]
    return name


def counts(server: StatusServer | None, name: str) -> dict[str, int]:
    status, answer = ask(server, "GET", f"/prefetch/{name}")
    assert status == 200, answer
    return {each: answer[each] for each in ("in_memory", "used", "coming", "absent", "refused") if answer[each]}


def settled(server: StatusServer | None, name: str) -> dict[str, int]:
    wait_until(lambda: "coming" not in counts(server, name))
    return counts(server, name)


def test_a_router_brings_blocks_to_memory_that_a_get_then_uses(stack: Stack) -> None:
    name = begun(stack.server, block_hashes=[each.hex() for each in HASHES], until=60)
    assert settled(stack.server, name) == {"in_memory": 8}
    received = tiered_kv.Received()
    assert len(stack.get(HASHES[:3], received=received)) == 3
    assert received.blocks == {"cpu": 3}
    assert counts(stack.server, name) == {"in_memory": 5, "used": 3}
    assert ask(stack.server, "DELETE", f"/prefetch/{name}")[0] == 200
    assert ask(stack.server, "GET", f"/prefetch/{name}")[0] == 404
    wait_until(lambda: stack.counters()["cpu"].get("prefetched_blocks_total") == {"used": 3, "unused": 5})
    assert stack.counters()["cpu"]["promotion_blocks"] == 0


def test_the_names_of_events_are_understood(stack: Stack) -> None:
    keys = [make_offload_key(each, 0) for each in HASHES]
    assert hashes_of(keys)[0].tolist() == NAMES
    name = begun(stack.server, block_hashes=[*NAMES, 99, HASHES[0].hex()])
    assert settled(stack.server, name) == {"in_memory": 8, "absent": 1}


def test_the_field_s_action_means_the_same(stack: Stack) -> None:
    payload = {"block_hashes": NAMES[:2], "until": 5}
    name = begun(stack.server, action_type="kv.prefetch", action_version="1.0", payload=payload)
    assert settled(stack.server, name) == {"in_memory": 2}
    for other in ({"action_type": "kv.evict", "action_version": "1.0"}, {"action_version": "2.0"}):
        asked = {"action_type": "kv.prefetch", "payload": payload, **other}
        assert ask(stack.server, "POST", "/prefetch", asked)[0] == 400


def test_an_order_ends_by_itself(stack: Stack) -> None:
    name = begun(stack.server, block_hashes=NAMES, until=0.5)
    wait_until(lambda: ask(stack.server, "GET", f"/prefetch/{name}")[0] == 404)
    wait_until(lambda: not manager_of(stack).orders.exist)
    assert stack.counters()["cpu"]["promotion_blocks"] == 0


def test_a_stack_closes_while_orders_run(tmp_path: Path) -> None:
    with open_stack(stack_of(disk_of(tmp_path), blocks=64, metrics={"listen": "127.0.0.1:0"})) as stack:
        for _ in range(3):
            begun(filled(stack).server, block_hashes=NAMES, until=60)
    with pytest.raises(OSError, match=r"refused|reset"):
        ask(stack.server, "GET", "/prefetch/none")


def test_a_server_brings_blocks_of_its_engines(tmp_path: Path) -> None:
    settings = served_stack_of(secondary=[{**disk_of(tmp_path)}], metrics={"listen": "127.0.0.1:0"})
    with serving(tmp_path, settings) as served, tiered_kv.connect(served.address) as program:
        row_bytes = program.region.block_bytes
        assert program.put(HASHES, np.zeros((8, row_bytes), np.uint8), timeout=60.0) == 8
        assert program.flush(60.0)
    with serving(tmp_path, settings) as served:
        pages = served.namespaces.open_pages()
        assert pages is not None
        with closing(pages), tiered_kv.connect(served.address) as program:
            name = begun(pages, block_hashes=[each.hex() for each in HASHES], until=60)
            assert settled(pages, name) == {"in_memory": 8}
            received = tiered_kv.Received()
            assert len(program.get(HASHES[:5], timeout=60.0, received=received)) == 5
            assert received.blocks == {"cpu": 5}
            wait_until(lambda: counts(pages, name) == {"in_memory": 3, "used": 5})  # the answer was sent before


# Who is heard.


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer another-token-of-it"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer \xe9"}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 404),
    ],
)
def test_with_a_token_only_its_bearers_are_heard(headers: dict[str, str], status: int) -> None:
    with open_stack(stack_of(metrics={"listen": "127.0.0.1:0", "token": TOKEN})) as stack:
        assert ask(stack.server, "GET", "/prefetch/x", **headers)[0] == status
        assert TOKEN not in repr(stack.config)


def test_off_loopback_nobody_is_heard_without_a_token() -> None:
    with open_stack(stack_of(metrics={"listen": "0.0.0.0:0"})) as stack:
        assert stack.server is not None
        stack.server.host = "127.0.0.1"
        status, answer = ask(stack.server, "POST", "/prefetch", {"block_hashes": [1]})
        assert status == 403
        assert "metrics.token" in answer["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:9464"}, 403),
        ({"Host": "localhost:9464"}, 202),
        ({"Host": "[::1]:9464"}, 202),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_a_page_in_a_browser_is_not_heard(stack: Stack, headers: dict[str, str], status: int) -> None:
    assert ask(stack.server, "POST", "/prefetch", {"block_hashes": [1]}, **headers)[0] == status


@pytest.mark.parametrize("token", ["short", f"{TOKEN}\n", f"{TOKEN} and more", f"{TOKEN}-ä"])
def test_a_token_that_is_short_or_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.token") as raised:
        open_stack(stack_of(metrics={"listen": "127.0.0.1:0", "token": token}))
    assert token.strip() not in str(raised.value)


# What is refused.


@pytest.mark.one_quick(3)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        {},
        {"block_hashes": []},
        {"block_hashes": [1] * (ORDER_BLOCKS_MAX + 1)},
        {"block_hashes": "ff"},
        {"block_hashes": ["zz"]},
        {"block_hashes": [""]},
        {"block_hashes": ["ff" * 65]},
        {"block_hashes": [-1]},
        {"block_hashes": [1 << 64]},
        {"block_hashes": [True]},
        {"block_hashes": [None]},
        {"block_hashes": [[1]]},
        {"block_hashes": [1], "until": 0},
        {"block_hashes": [1], "until": 61},
        {"block_hashes": [1], "until": True},
        {"block_hashes": [1], "until": float("nan")},
        {"block_hashes": [1], "until": float("inf")},
        {"block_hashes": [1], "group": 1 << 32},
        {"block_hashes": [1], "namespace": "zz"},
        {"block_hashes": [1], "namespace": 5},
        {"block_hashes": [1], "more": 5},
        [1],
    ],
)
def test_what_is_no_call_is_refused_by_name(stack: Stack, body: object) -> None:
    status, answer = ask(stack.server, "POST", "/prefetch", body)
    assert status == 400
    assert "expected" in answer["error"]
    assert not manager_of(stack).orders.exist


@pytest.mark.parametrize("path", ["/prefetch", "/limits"])
def test_a_namespace_that_is_not_open_is_named_as_the_field_that_it_is(stack: Stack, path: str) -> None:
    body = {"block_hashes": [1]} if path == "/prefetch" else {"tenant": "a", "limit": "10%"}
    _, answer = ask(stack.server, "POST", path, {**body, "namespace": "zz"})
    assert answer["error"].startswith("namespace: expected the first characters of one of the open namespaces: ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/prefetch", 405),
        ("PUT", "/prefetch/x", 405),
        ("DELETE", "/prefetch/x", 404),
        ("POST", "/prefetch/x", 405),
        ("POST", "/prefetches", 405),
        ("POST", "/status", 405),
    ],
)
def test_other_calls_are_refused(stack: Stack, method: str, path: str, status: int) -> None:
    assert stack.server is not None
    with closing(http.client.HTTPConnection(stack.server.host, stack.server.port, timeout=60.0)) as connection:
        connection.request(method, path)
        assert connection.getresponse().status in ({status, 404} if path == "/prefetches" else {status})


@pytest.mark.parametrize("length", [str(BODY_BYTES_MAX + 1), "9" * 30, "-1", "x"])
def test_a_long_body_is_not_read(stack: Stack, length: str) -> None:
    assert stack.server is not None
    head = f"POST /prefetch HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((stack.server.host, stack.server.port), timeout=60.0) as connection:
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(65536).partition(b"\r\n")[0]


def test_a_body_that_does_not_come_costs_its_own_connection_only(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.server._Handler.timeout", 0.1)
    assert stack.server is not None
    head = b"POST /prefetch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection((stack.server.host, stack.server.port), timeout=60.0) as connection:
        connection.sendall(head)
        begun(stack.server, block_hashes=[1])
        assert connection.recv(65536) == b""


def test_a_flood_ends_at_a_limit_and_goes_on_once_orders_have_ended(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered_kv.stack.exporters.prefetch.ORDERS_MAX", 3)
    names = [begun(stack.server, block_hashes=NAMES, until=60) for _ in range(3)]
    status, answer = ask(stack.server, "POST", "/prefetch", {"block_hashes": NAMES})
    assert (status, "at most 3 of" in answer["error"]) == (429, True)
    assert len(stack.get(HASHES, timeout=60.0)) == 8
    ask(stack.server, "DELETE", f"/prefetch/{names[0]}")
    begun(stack.server, block_hashes=NAMES)
    assert ORDERS_MAX * 64 == KEYS_MAX


def test_without_a_history_only_whole_hashes_are_known(tmp_path: Path) -> None:
    settings = stack_of(disk_of(tmp_path), blocks=64, metrics={"listen": "127.0.0.1:0"}, history=0)
    with open_stack(settings) as stack:
        status, answer = ask(filled(stack).server, "POST", "/prefetch", {"block_hashes": NAMES})
        assert (status, "history" in answer["error"]) == (400, True)
        name = begun(stack.server, block_hashes=[each.hex() for each in HASHES])
        assert settled(stack.server, name) == {"in_memory": 8}


# Names.

KEYS = st.lists(
    st.tuples(st.binary(max_size=KEY_BYTES_MAX + 4), st.integers(0, (1 << 32) - 1)).map(
        lambda pair: make_offload_key(*pair)
    ),
    max_size=40,
)


@given(st.lists(KEYS, max_size=4), st.sampled_from([1, 16, 1024]))
def test_a_name_finds_its_key_or_nothing(batches: list[list[OffloadKey]], entries: int) -> None:
    names = KeyNames(entries)
    for batch in batches:
        names.note(batch)
    for key in {key for batch in batches for key in batch if len(key) >= 12}:
        group, name = int.from_bytes(key[-4:], "big"), int.from_bytes(key[-12:-4], "big")
        (found,) = names.find([name], group)
        assert found is None or found[-12:] == key[-12:]
        assert names.find([name], group ^ 1)[0] in (None, *(each for batch in batches for each in batch))


def test_names_of_a_table_that_is_half_full_are_nearly_all_known() -> None:
    random = np.random.default_rng(1)
    keys = [OffloadKey(random.bytes(32) + bytes(4)) for _ in range(4096)]
    names = KeyNames(8192)
    for first in range(0, len(keys), 500):
        names.note(keys[first : first + 500])
    found = names.find([int.from_bytes(key[-12:-4], "big") for key in keys], 0)
    assert all(each in (None, key) for each, key in zip(found, keys, strict=True))
    assert found.count(None) < 0.1 * len(keys)
