"""A server in a process of its own, on a port of the loopback interface."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from typing import ClassVar, Final, Self

START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 30.0
BUS_OFFSET: Final = 10_000
"""The members of a Redis Cluster talk to each other on their port plus this."""

_PORTS: Final = range(10_000, 32_768 - BUS_OFFSET)
"""Linux gives these, and their buses', to nobody by itself: a server that starts again finds its port free."""
_POLL_S: Final = 0.005


class ServerProcess(ABC):
    """A server on 127.0.0.1. It may be stopped, killed, frozen and started again on the same port.

    As a context manager it is started, and killed at the end.

    Args:
        port: Where it listens; by default a free port.

    Attributes:
        start_s_max: Seconds that it may take until it answers.
    """

    start_s_max: ClassVar[float] = START_S_MAX

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
        """Return the program and its arguments; it must stay in the foreground."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether it takes requests now."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", self.port

    @property
    def pid(self) -> int:
        """The id of its process, which runs."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it and return when it answers.

        Raises:
            RuntimeError: It ended, or did not answer within `start_s_max`.
        """
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
        """End it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it from running, with its connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it run on."""
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
    """Return a port that nobody uses now, nor that of a cluster's bus, which lies above it."""
    while True:
        with socket.socket() as sock, socket.socket() as bus, contextlib.suppress(OSError):
            port = secrets.choice(_PORTS)
            sock.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS_OFFSET))
            return port
