"""Addresses of processes, and requests to them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.status_server import StatusServer, response
from tiered_kv.cli.ask import ANSWER_BYTES_MAX, fetch, url_of
from tiered_kv.errors import ConfigError, TierUnavailableError

STACK = """
namespace: {model: test}
block: {bytes: 4KiB}
primary: {capacity: 1MiB}
secondary:
  - {type: redis, url: "redis://localhost", password: "${NOT_SET_HERE}"}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:9464", "http://127.0.0.1:9464"),
        ("http://host.example:80/engine-0/", "http://host.example:80/engine-0"),
        ("http://127.0.0.1:9464/status", "http://127.0.0.1:9464"),
        ("https://host.example", "https://host.example"),
        ("http://[::1]:9464", "http://[::1]:9464"),
        ("127.0.0.1:9464", "http://127.0.0.1:9464"),
        ("[::1]:9464", "http://[::1]:9464"),
    ],
)
def test_an_address_is_a_url_or_a_host_and_a_port(text: str, expected: str) -> None:
    assert url_of(text) == expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ("metrics: {}", "http://127.0.0.1:9464"),
        ('metrics: {listen: "127.0.0.1:9465"}', "http://127.0.0.1:9465"),
        ('metrics: {listen: "[::]:9465"}', "http://[::]:9465"),
        ('metrics: {listen: "127.0.0.1:946${RANK}"}', "http://127.0.0.1:9463"),
    ],
)
def test_a_stack_s_file_names_the_address_whatever_else_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, expected: str
) -> None:
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "stack.yaml").write_text(f"{STACK}{metrics}\n")
    assert url_of(str(tmp_path / "stack.yaml")) == expected


def test_a_stack_s_file_without_the_setting_says_which_line_to_add(tmp_path: Path) -> None:
    (tmp_path / "stack.yaml").write_text(STACK)
    with pytest.raises(ConfigError, match=r'add this line .*: metrics: \{listen: "127\.0\.0\.1:9464"\}'):
        url_of(str(tmp_path / "stack.yaml"))


@pytest.mark.parametrize(
    "text",
    ["ftp://host", "http://", "http://host:99999", "http://[::1", "http://user:secret@host", "http://host/?a=secret",
     "http://host/a b\r\nX: y", "127.0.0.1:0", "127.0.0.1:99999", "/does/not/exist.yaml"],
)  # fmt: skip
def test_an_invalid_address_is_an_error_that_repeats_no_secret(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        url_of(text)
    assert "secret" not in str(error.value)


def test_a_page_is_asked_for_and_its_body_returned() -> None:
    with StatusServer(lambda: response(b"{}")) as server:
        assert fetch(url_of(f"http://{server.address}/engine"), "/status") == b"{}"
    head = server.requests[0].decode()
    assert head.startswith("GET /engine/status HTTP/1.1\r\n")
    assert f"Host: {server.address}\r\n" in head


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "not HTTP"),
        (b"\x1b[2J\x00\xff\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "cut off"),
        (response(b"\x1b[2J", "HTTP/1.1 404 \x1b[2J"), "status 404"),
        (response(b"", "HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example"), "status 302"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (ANSWER_BYTES_MAX + 1), "more than"),
    ],
    ids=["nothing", "garbage", "bad chunk", "404", "redirect", "endless"],
)
def test_a_bad_answer_is_an_error_for_a_terminal(answer: bytes, expected: str) -> None:
    with (
        StatusServer(lambda: answer) as server,
        pytest.raises(TierUnavailableError, match=expected) as error,
    ):
        fetch(url_of(server.address), "/status")
    assert str(error.value).isprintable()


def test_an_answer_that_does_not_come_times_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(TierUnavailableError, match=r"no answer within 0\.2 s"),
    ):
        fetch(f"http://127.0.0.1:{listening.getsockname()[1]}", "/status", 0.2)


def test_tls_that_is_not_trusted_is_an_error() -> None:
    with StatusServer(lambda: response(b"{}")) as server, pytest.raises(TierUnavailableError, match="TLS failed"):
        fetch(url_of(f"https://{server.address}"), "/status")
