"""The path of a server's socket belongs to the server that made it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import tiered_kv
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.server import listener
from tiered_kv.server.channel import connect_in_turn
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


@pytest.mark.parametrize("target", ["nothing", "a socket of a killed server", "a server", "a file"])
def test_a_symbolic_link_at_the_path_stays(path: Path, target: str) -> None:
    place = path.with_name("other.sock")
    path.symlink_to(place)
    why = "it is a symbolic link to .*other.sock: give that path"
    with ExitStack() as undo:
        if target == "a socket of a killed server":
            left_by_a_killed_server(place)
        elif target == "a server":
            undo.enter_context(closing(listen(place)))
            why = "a server listens there already"
        elif target == "a file":
            place.touch()
        before = os.path.lexists(place)
        with pytest.raises(ConfigError, match=why):
            listen(path)
        assert (path.is_symlink(), os.path.lexists(place)) == (True, before)


def test_who_connects_waits_while_others_wait_to_be_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as undo:
        server, first, late = (undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in "123")
        server.bind(str(path))
        server.listen(0)
        first.connect(str(path))
        with monkeypatch.context() as patch:
            patch.setattr("tiered_kv.server.attach.OPEN_S", 0.02)
            with pytest.raises(TierUnavailableError, match=r"it has accepted no connection for 0\.02 s"):
                tiered_kv.connect(f"unix:{path}")
        closed = threading.Event()
        late.settimeout(60.0)
        thread = threading.Thread(target=connect_in_turn, args=(late, str(path), 60.0, closed))
        thread.start()
        undo.enter_context(server.accept()[0])
        thread.join()
        undo.enter_context(server.accept()[0])
        closed.set()
        first_again, more = (undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in "12")
        first_again.connect(str(path))
        more.settimeout(60.0)
        with pytest.raises(OSError, match="closed"):
            connect_in_turn(more, str(path), 60.0, closed)


def test_a_path_that_is_too_long_says_how_long_it_may_be(tmp_path: Path) -> None:
    long = tmp_path / ("s" * 200)
    for use in (lambda: listen(long), lambda: tiered_kv.connect(f"unix:{long}")):
        with pytest.raises(ConfigError, match=f"at most {PATH_BYTES_MAX} bytes, found one of {len(str(long))}"):
            use()
