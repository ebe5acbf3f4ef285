"""The path of a server's socket belongs to the server that made it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

import tiered_kv
from tiered_kv.errors import ConfigError
from tiered_kv.server import listener
from tiered_kv.server.listener import listen
from tiered_kv.server.protocol import PATH_BYTES_MAX


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


def left_by_a_killed_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))


def test_a_server_takes_the_place_of_one_that_was_killed(path: Path) -> None:
    left_by_a_killed_server(path)
    with closing(listen(path)) as first, pytest.raises(ConfigError, match="a server listens there already"):
        listen(path)
    first.remove()
    assert not path.exists()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_server_changes_nothing_while_another_one_looks_at_the_path(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    flock = fcntl.flock

    def ask(fd: int, operation: int) -> None:
        try:
            flock(fd, operation)
        except BlockingIOError:
            raise OSError(code, os.strerror(code)) from None

    monkeypatch.setattr(listener, "LOCK_S", 0.02)
    monkeypatch.setattr(fcntl, "flock", ask)
    left_by_a_killed_server(path)
    before = path.stat().st_ino
    other = os.open(path.parent, os.O_RDONLY)
    try:
        flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another server begins or ends in"):
            listen(path)
        assert path.stat().st_ino == before
    finally:
        os.close(other)
    with closing(listen(path)) as sock:
        sock.remove()


def test_a_server_that_ends_leaves_the_path_of_its_successor(path: Path) -> None:
    with closing(listen(path)) as first:
        path.unlink()
        with closing(listen(path)) as second:
            first.remove()
            assert path.is_socket()
            second.remove()
            assert not path.exists()


def test_a_path_that_is_too_long_says_how_long_it_may_be(tmp_path: Path) -> None:
    long = tmp_path / ("s" * 200)
    for use in (lambda: listen(long), lambda: tiered_kv.connect(f"unix:{long}")):
        with pytest.raises(ConfigError, match=f"at most {PATH_BYTES_MAX} bytes, found one of {len(str(long))}"):
            use()
