"""What a server says is checked where it is used: a wrong number costs the connection, and no other memory."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.host_server import BLOCK_BYTES, WAIT_S, packet, serving
from tests.support.odd_server import ROWS, files, odd_server, right_welcome, welcome
from tiered_kv.errors import ConfigError
from tiered_kv.server import attach, protocol
from tiered_kv.server.protocol import Message
from tiered_kv.testing.control import wait_until

HASHES = [b"block %d" % number for number in range(4)]
BLOCKS = np.arange(4, dtype=np.uint8).repeat(BLOCK_BYTES).reshape(4, BLOCK_BYTES)

ODD_FIELDS: dict[str, list[object]] = {
    "instance": [None, 7, "", ["x"]],
    "namespace": [None, 7, {}],
    "rows": ["4", -1, 0, 1 << 32, 1 << 70, 4.5, True, None, [16]],
    "row_bytes": [-1, 0, "4096", 1 << 60, None],
    "block_tokens": [-1, "16", None],
    "epoch": [-1, 1 << 40, "0", None, float("nan")],
    "grant_rows": [-1, 9, "4", None],
    "grant_max": [0, -1, ROWS + 1, None],
    "tiers": [None, "cpu", [], [1], {"cpu": 1}],
    "answer_s": [float("nan"), float("inf"), -1.0, "1", None, 1e300],
    "wait_s": [float("nan"), float("-inf"), -1, [], 1e300],
    "version": ["2", None, 1.5, -1, True, [], 1 << 40],
}
ODD_BODIES: list[dict[str, object]] = [
    *({name: value} for name, values in ODD_FIELDS.items() for value in values),
    {"namespace": "01"},  # another than before
    {"row_bytes": 2 * BLOCK_BYTES},  # larger than the file
]


def greet_oddly(odd: dict[str, object], sock: socket.socket) -> bool:
    return welcome(sock, right_welcome(**odd), files())


def on_disk(beside: Path) -> int:
    """Return the descriptor of a file that is long enough, and that its server may cut."""
    fd = os.open(f"{beside}-file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, ROWS * BLOCK_BYTES)
    return fd


def test_no_odd_welcome_ends_attaching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attach, "RETRY_MAX_S", attach.RETRY_MIN_S / 10)
    monkeypatch.setattr(attach, "RETRY_MIN_S", attach.RETRY_MIN_S / 10)
    monkeypatch.setattr(attach, "LOGGED_AT_ONCE", 100)  # so that every reason is logged
    path = tmp_path / "cache.sock"
    answers: list[Callable[[socket.socket], object]] = [
        lambda sock: welcome(sock, right_welcome(), []),
        lambda sock: welcome(sock, right_welcome(), [os.memfd_create("rows")]),
        lambda sock: welcome(sock, right_welcome(), files(rows_bytes=ROWS * BLOCK_BYTES - 1)),
        lambda sock: welcome(sock, right_welcome(), files(rows_bytes=0)),
        lambda sock: welcome(sock, right_welcome(), files(generations_bytes=4)),
        lambda sock: welcome(sock, right_welcome(), [*os.pipe()]),
        lambda sock: welcome(sock, right_welcome(), files(seals=fcntl.F_SEAL_GROW)),
        lambda sock: welcome(sock, right_welcome(), files(seals=fcntl.F_SEAL_SHRINK)),
        lambda sock: welcome(sock, right_welcome(), [on_disk(path), on_disk(path)]),
        lambda sock: welcome(sock, right_welcome(), [*files(), socket.socket().detach()]),
        lambda sock: welcome(sock, right_welcome(), [*files(), os.open("/dev/full", os.O_WRONLY)]),
        lambda sock: welcome(sock, b"{", files()),
        lambda sock: welcome(sock, b"[" * 30_000, files()),
        lambda sock: welcome(sock, b"\xff\xfe", files()),
        lambda sock: welcome(sock, [1], files()),
        lambda sock: sock.send(b"x"),
        lambda sock: sock.send(packet(protocol.GRANTED, 0, 1, protocol.pack_rows([1]))),
        lambda sock: sock.send(packet(protocol.GOODBYE)),
        *(partial(greet_oddly, odd) for odd in ODD_BODIES),
    ]
    left = iter(answers)
    is_over = threading.Event()

    def greet(sock: socket.socket) -> bool:
        each = next(left, None)
        if each is None:
            is_over.set()
        else:
            each(sock)
        return False

    with serving(tmp_path):
        cache = tiered_kv.connect(f"unix:{path}")
        assert cache.put(HASHES, BLOCKS) == 4
    with cache:
        with odd_server(path, greet):
            wait_until(lambda: cache.contains(HASHES) == 0 and is_over.is_set(), WAIT_S)
            assert not cache.is_attached
        with serving(tmp_path):
            wait_until(lambda: cache.put(HASHES, BLOCKS) == 4)
            assert (cache.get(HASHES, timeout=WAIT_S) == BLOCKS).all()
    for said in (
        "(rows)",
        "(wait_s)",
        "rows of a fixed size",
        "a file of resets",
        "rows from the server",
        "generations from the server",
        "has sent no memory",
    ):
        assert said in caplog.text


@pytest.mark.parametrize("odd", [{"rows": "4"}, {"version": "2"}, {"answer_s": float("nan")}])
def test_to_connect_to_an_odd_server_is_an_error_of_ours(tmp_path: Path, odd: dict[str, Any]) -> None:
    path, (name,) = tmp_path / "cache.sock", odd
    with (
        odd_server(path, lambda sock: welcome(sock, right_welcome(**odd), files())),
        pytest.raises(ConfigError, match=rf"the server says what cannot be \({name}\)"),
    ):
        tiered_kv.connect(f"unix:{path}")


def test_a_stack_opens_without_a_server_that_may_cut_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    entry = {"type": "host", "socket": f"unix:{path}"}
    stack = {"namespace": {"model": "m"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": 8 * BLOCK_BYTES}}
    with (
        odd_server(path, lambda sock: welcome(sock, right_welcome(), files(seals=fcntl.F_SEAL_GROW))),
        tiered_kv.open_stack({**stack, "secondary": [entry]}) as opened,
    ):
        assert opened.put(HASHES, BLOCKS) == 4
        assert (opened.get(HASHES, timeout=WAIT_S) == BLOCKS).all()


def test_a_field_that_a_newer_server_adds_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cache.sock"
    with (
        odd_server(path, lambda sock: welcome(sock, right_welcome(more=[1]), files())),
        tiered_kv.connect(f"unix:{path}") as cache,
    ):
        assert cache.region.num_blocks == ROWS


def granted(*rows: int) -> bytes:
    return packet(protocol.GRANTED, 0, len(rows), protocol.pack_rows(rows))


def answered(number: int, row: int, tier: int = 0) -> bytes:
    return packet(
        protocol.ANSWER,
        number,
        4,
        protocol.START.pack(0) + protocol.pack_rows([row] + 3 * [1]) + bytes([tier, 0, 0, 0]),
    )


ODD_ANSWERS: dict[str, tuple[int, Callable[[Message], Sequence[bytes]]]] = {
    "names row 16 of 16": (protocol.GRANT, lambda _: [granted(ROWS)]),
    f"names row {protocol.ROW_MAX} of 16": (protocol.GRANT, lambda _: [granted(0, protocol.ROW_MAX)]),
    "grants a row twice": (protocol.GRANT, lambda _: [granted(1, 2, 3, 1)]),
    "grants a row twice: two blocks": (protocol.GRANT, lambda _: [granted(1, 2), granted(2, 3)]),
    "grants more than 8 rows": (protocol.GRANT, lambda _: [granted(*range(9))]),
    "expected at most": (protocol.GRANT, lambda _: [packet(protocol.GRANTED, 0, 4, protocol.pack_rows([1]))]),
    "the server names row 99": (protocol.ACQUIRE, lambda asked: [answered(asked.number, 99)]),
    "names a tier that": (protocol.ACQUIRE, lambda asked: [answered(asked.number, 1, tier=1)]),
    "does not fit the keys": (protocol.ACQUIRE, lambda asked: [packet(protocol.ANSWER, asked.number, 1)]),
    "a packet ends within": (protocol.ACQUIRE, lambda _: [b"\0\0\0"]),
}


@pytest.mark.parametrize("said", ODD_ANSWERS)
def test_a_wrong_number_in_an_answer_ends_the_connection(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, (code, answers) = tmp_path / "cache.sock", ODD_ANSWERS[said]
    has_answered = threading.Event()

    def greet(sock: socket.socket) -> bool:
        return not has_answered.is_set() and welcome(sock, right_welcome(), files())

    def answer(message: Message) -> Sequence[bytes]:
        if message.code == protocol.PING:
            return [packet(protocol.PONG, message.number)]
        if message.code != code or has_answered.is_set():
            return []
        has_answered.set()
        return answers(message)

    with odd_server(path, greet, answer), tiered_kv.connect(f"unix:{path}") as cache:

        def call() -> bool:
            if code == protocol.GRANT:
                cache.put(HASHES, BLOCKS, timeout=0)
            else:
                assert len(cache.get(HASHES, timeout=WAIT_S)) == 0
            return said in caplog.text

        wait_until(call)
        assert not cache.is_attached


def test_a_thread_that_attaches_survives_what_nobody_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served:
        cache = tiered_kv.connect(served.address)
    with cache, serving(tmp_path):
        with monkeypatch.context() as patched:
            patched.setattr(attach, "welcome_of", lambda _: 1 // 0)
            wait_until(lambda: not cache.contains(HASHES) and "an unexpected error: ZeroDivisionError" in caplog.text)
        wait_until(lambda: cache.put(HASHES, BLOCKS) == 4)
