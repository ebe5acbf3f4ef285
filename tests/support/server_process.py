"""Servers on a port of the loopback interface: one in another process, and the fixture of fakeredis in this one."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import ClassVar, Final, Self

import pytest

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 30.0
BUS_OFFSET: Final = 10_000
"""A member of a Redis Cluster has its bus on its port plus this."""

_PORTS: Final = range(10_000, 32_768 - BUS_OFFSET)
"""Below Linux's ephemeral ports, with the buses: a server that starts again finds its port free."""
_GIVEN: Final[deque[int]] = deque(maxlen=64)
"""The last ports that this process has given, with their buses'."""
_POLL_S: Final = 0.001


class ServerProcess(ABC):
    """A server on 127.0.0.1, by default on a free port. It can be killed and started again on the same port.

    As a context manager it starts, and is killed at the end.
    """

    start_s_max: ClassVar[float] = START_S_MAX
    """How long it may take until it answers."""

    def __init__(self, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments; it must run in the foreground."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it accepts requests now."""

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Return once it answers; raises `RuntimeError` if it ends or does not answer within `start_s_max`."""
        command, end = self.command(), time.monotonic() + self.start_s_max
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                while self._process.poll() is None and time.monotonic() < end:
                    if self.answers():
                        return
                    time.sleep(_POLL_S)
            except BaseException:
                self.kill()
                raise
            self.kill()
            log.seek(0)
            raise RuntimeError(f"{command[0]} did not start: {log.read()[-2000:].decode(errors='replace')}")

    def stop(self) -> None:
        """End it by SIGTERM."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Suspend it, with its connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(number)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S_MAX)
        self._process = None


def free_port() -> int:
    """Return a port that is free now, and the port of its cluster bus too.

    Servers of a group get their ports before the first one starts, so the last ports are not given again.
    """
    while True:
        with socket.socket() as sock, socket.socket() as bus, contextlib.suppress(OSError):
            port = secrets.choice(_PORTS)
            if port in _GIVEN or port + BUS_OFFSET in _GIVEN:
                continue
            sock.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS_OFFSET))
            _GIVEN.extend((port, port + BUS_OFFSET))
            return port


@pytest.fixture
def fake_redis_url() -> Iterator[str]:
    """The URL of fakeredis on loopback, in this process; skips if fakeredis is not installed."""
    fakeredis = pytest.importorskip("fakeredis", reason="fakeredis is not installed")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    server.RequestHandlerClass.disable_nagle_algorithm = True  # or replies wait 40 ms for an acknowledgement
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STOP_S_MAX)
