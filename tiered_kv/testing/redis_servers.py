"""Redis servers for tests: real ones on loopback, started from a plain `redis-server`, and fakeredis over TCP.

    from tiered_kv.testing.redis_servers import redis_server, tls_redis_server

Import a fixture into a test module to use it. It skips, with the reason, if a program or library is missing. Every
server has a directory of its own, listens on free ports of 127.0.0.1 only, and is ended with the test.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 30.0
"""Timeout of one command of a test, even on a busy machine. A server that has ended refuses at once."""
PATIENT: Mapping[str, object] = {"timeout": "60s", "connect_timeout": "60s", "lookup_timeout": "60s"}
"""Settings of tiers whose timeouts are not tested: a delay by a busy machine is no failure."""
PASSWORD = "a-password-for-tests"
"""The password of servers that require one."""

_PORT_ATTEMPTS = 5
_BUS_OFFSET = 10_000
"""A cluster's members talk to each other on their port plus this."""
_PORTS = range(10_000, 32_768 - _BUS_OFFSET)
"""Linux gives these, and their buses', to nobody by itself: a server that starts again finds its port free."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate authority and a certificate that it signed, for 127.0.0.1 and localhost.

    Args:
        ca: The authority's certificate.
        cert, key: Of server and client.
    """

    ca: Path
    cert: Path
    key: Path


class RedisServer:
    """A `redis-server` process. It may be stopped, killed, frozen and started again on the same port.

    Args:
        directory: An empty directory for it.
        options: Further arguments, such as `("--maxmemory", "8mb")`.
        password: The password that it requires; empty for none.
        tls: Listen with TLS only, and require a client's certificate.
        port: Where to listen; by default a free port.
        has_bus: Whether it is a cluster's member, which also listens on a second, higher port.
    """

    def __init__(
        self,
        directory: Path,
        options: Sequence[str] = (),
        *,
        password: str = "",
        tls: TlsFiles | None = None,
        port: int | None = None,
        has_bus: bool = False,
    ) -> None:
        self._has_bus = has_bus
        self.port = free_port(with_bus=has_bus) if port is None else port
        self.password = password
        self.tls = tls
        self._directory = directory
        self._options = tuple(options)
        self._process: subprocess.Popen[bytes] | None = None
        self._takes_another_port = port is None

    @property
    def url(self) -> str:
        """Its URL, without the password."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of its running process."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it, empty, and return when it answers."""
        for attempt in range(_PORT_ATTEMPTS):
            self._process = subprocess.Popen(
                self._command(), cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if self._answers():
                self._takes_another_port = False
                return
            self.kill()
            if not self._takes_another_port or attempt == _PORT_ATTEMPTS - 1:
                break
            self.port = free_port(with_bus=self._has_bus)  # another program took the port
        log = self._directory / "log"
        raise RuntimeError(f"redis-server did not start: {log.read_text()[-2000:] if log.exists() else 'no log'}")

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self, *options: str) -> None:
        """Kill it and start it again, empty, with additional options from now on."""
        self.kill()
        self._options += options
        self.start()

    def freeze(self) -> None:
        """Stop the process (SIGSTOP), with its connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def call(self, *arguments: str | bytes) -> bytes:
        """Send one command, over a connection of its own, and return the raw reply."""
        with self._connect() as sock:
            reply = b""
            if self.password:
                reply = _exchange(sock, ("AUTH", self.password))
                assert reply.startswith(b"+OK"), "the server refuses the test's own password"
            return _exchange(sock, arguments)

    def set(self, key: bytes, value: bytes) -> None:
        """Store a value as any client could."""
        assert self.call("SET", key, value) == b"+OK\r\n"

    def get(self, key: bytes) -> bytes:
        """Return an existing value."""
        reply = self.call("GET", key)
        assert reply.startswith(b"$"), reply[:80]
        return reply[reply.index(b"\r\n") + 2 : -2]

    def keys(self, pattern: str = "*") -> list[bytes]:
        """Return the names of values that match."""
        reply = self.call("EVAL", "return table.concat(redis.call('KEYS', ARGV[1]), '\\r\\n\\r\\n')", "0", pattern)
        joined = reply[reply.index(b"\r\n") + 2 : -2]
        return joined.split(b"\r\n\r\n") if joined else []

    def damage(self, pattern: str, longer_than_bytes: int) -> None:
        """Flip a bit in the last byte of every matching value that is longer, as any client could."""
        for name in self.keys(pattern):
            value = bytearray(self.get(name))
            if len(value) > longer_than_bytes:
                value[-1] ^= 0x01
                self.set(name, bytes(value))

    def _command(self) -> list[str]:
        ports = ["--port", str(self.port)]
        if self.tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-ca-cert-file", str(self.tls.ca)]
            ports += ["--tls-cert-file", str(self.tls.cert), "--tls-key-file", str(self.tls.key)]
        password = ["--requirepass", self.password] if self.password else []
        quiet = ["--save", "", "--appendonly", "no", "--logfile", "log", "--dir", str(self._directory)]
        quiet += ["--repl-diskless-sync-delay", "0"]  # replicas are there at once
        return [_redis_server(), *ports, "--bind", "127.0.0.1", *quiet, *password, *self._options]

    def _answers(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.call("PING").startswith((b"+PONG", b"-MASTERDOWN")):
                    return self._process.poll() is None
            except ssl.SSLCertVerificationError:  # which no waiting changes
                raise
            except (OSError, AssertionError):
                pass
            time.sleep(_POLL_S)
        return False

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_TIMEOUT_S)
        if self.tls is None:
            return sock
        context = ssl.create_default_context(cafile=str(self.tls.ca))
        context.load_cert_chain(self.tls.cert, self.tls.key)
        try:
            return context.wrap_socket(sock, server_hostname="127.0.0.1")
        except OSError:
            sock.close()
            raise

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(number)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._process = None


def free_port(*, with_bus: bool = False) -> int:
    """Return a free port; `with_bus`, one whose cluster bus port is free too."""
    while True:
        with socket.socket() as sock, socket.socket() as bus, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", secrets.choice(_PORTS)))
            port: int = sock.getsockname()[1]
            if with_bus:
                bus.bind(("127.0.0.1", port + _BUS_OFFSET))
            return port


def make_tls_files(directory: Path, *names: str) -> TlsFiles:
    """Make an authority and a certificate for `names`, 127.0.0.1 and localhost by default, with `trustme`."""
    trustme = pytest.importorskip("trustme", reason="trustme is not installed")
    files = TlsFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    authority = trustme.CA()
    signed = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    authority.cert_pem.write_to_path(files.ca)
    signed.cert_chain_pems[0].write_to_path(files.cert)
    signed.private_key_pem.write_to_path(files.key)
    return files


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A plain redis-server."""
    yield from _served(RedisServer(_subdirectory(tmp_path)))


@pytest.fixture
def tls_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server that requires TLS with a client's certificate, and `PASSWORD`."""
    _redis_server()
    directory = _subdirectory(tmp_path)
    yield from _served(RedisServer(directory, password=PASSWORD, tls=make_tls_files(directory)))


@pytest.fixture
def fake_redis_url() -> Iterator[str]:
    """The URL of fakeredis behind a TCP socket, in this process."""
    fakeredis = pytest.importorskip("fakeredis", reason="fakeredis is not installed")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(STOP_TIMEOUT_S)


def _served(server: RedisServer) -> Iterator[RedisServer]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _redis_server() -> str:
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("redis-server is not installed")
    return path


def _subdirectory(tmp_path: Path) -> Path:
    directory = tmp_path / "redis"
    directory.mkdir()
    return directory


def _exchange(sock: socket.socket, arguments: Sequence[str | bytes]) -> bytes:
    """Send a command and return its raw reply."""
    encoded = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    parts = [b"*%d\r\n" % len(encoded)] + [b"$%d\r\n%b\r\n" % (len(each), each) for each in encoded]
    sock.sendall(b"".join(parts))
    reply = b""
    while True:
        received = sock.recv(1 << 16)
        if not received:
            raise ConnectionError("the server closed the connection")
        reply += received
        line, found, rest = reply.partition(b"\r\n")
        if found and (line[:1] != b"$" or line == b"$-1" or len(rest) >= int(line[1:]) + 2):
            return reply
