"""Redis servers on loopback, started from a plain program; import a fixture into a test module to use it.

A fixture skips if a program or library is missing. Every server has a new directory and listens on 127.0.0.1 only.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess

ANSWER_TIMEOUT_S = 30.0
"""Timeout of one command of a test, even on a busy machine. A server that has ended refuses at once."""
PATIENT: Mapping[str, object] = {"timeout": "60s", "connect_timeout": "60s", "lookup_timeout": "60s"}
"""Settings of tiers whose timeouts are not tested: a delay by a busy machine is no failure."""
PASSWORD = "a-password-for-tests"
"""The password of servers that require one."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate authority, and a certificate for 127.0.0.1 and localhost that server and client use."""

    ca: Path
    cert: Path
    key: Path


def redis_program() -> str:
    """Return the program of servers: `redis-server`, or what the environment has as TIERED_KV_REDIS_SERVER."""
    program = os.environ.get("TIERED_KV_REDIS_SERVER", "redis-server")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    return program


class RedisServer(ServerProcess):
    """A `redis-server` process; it is empty after each start.

    Args:
        directory: Empty, or made for it.
        options: Further arguments, such as `("--maxmemory", "8mb")`.
        password: Required from clients; optional.
        tls: Listen with TLS only, and require a client certificate.
    """

    def __init__(
        self, directory: Path, options: Sequence[str] = (), *, password: str = "", tls: TlsFiles | None = None
    ) -> None:
        super().__init__()
        self.password = password
        self.tls = tls
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._options = tuple(options)

    @property
    def url(self) -> str:
        """Its URL, without the password."""
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            if self.tls is not None and "Failed finding TLS support" in str(error):  # a build of Valkey
                pytest.skip(f"{redis_program()} was built without TLS")
            raise

    def restart(self, *options: str) -> None:
        """Kill it and start it again, empty, with additional options from now on."""
        self.kill()
        self._options += options
        self.start()

    def empty(self) -> None:
        """Delete all values and keep the memory, which FLUSHALL returns to the kernel or frees on another thread."""
        script = "local all = redis.call('KEYS', '*') for _, key in ipairs(all) do redis.call('DEL', key) end"
        self.call("EVAL", script, "0")

    def call(self, *arguments: str | bytes) -> bytes:
        """Send one command over a new connection, and return the raw reply."""
        with self._connect() as sock:
            if self.password:
                reply = _exchange(sock, ("AUTH", self.password))
                assert reply.startswith(b"+OK"), "the server refuses the test's own password"
            return _exchange(sock, arguments)

    def set(self, key: bytes, value: bytes) -> None:
        assert self.call("SET", key, value) == b"+OK\r\n"

    def get(self, key: bytes) -> bytes:
        """Return an existing value."""
        reply = self.call("GET", key)
        assert reply.startswith(b"$"), reply[:80]
        return reply[reply.index(b"\r\n") + 2 : -2]

    def keys(self, pattern: str = "*") -> list[bytes]:
        reply = self.call("EVAL", "return table.concat(redis.call('KEYS', ARGV[1]), '\\r\\n\\r\\n')", "0", pattern)
        joined = reply[reply.index(b"\r\n") + 2 : -2]
        return joined.split(b"\r\n\r\n") if joined else []

    def damage(self, pattern: str, longer_than_bytes: int) -> None:
        """Flip a bit in the last byte of every matching value that is longer."""
        for name in self.keys(pattern):
            value = bytearray(self.get(name))
            if len(value) > longer_than_bytes:
                value[-1] ^= 0x01
                self.set(name, bytes(value))

    def command(self) -> list[str]:
        program = redis_program()
        ports = ["--port", str(self.port)]
        if self.tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-ca-cert-file", str(self.tls.ca)]
            ports += ["--tls-cert-file", str(self.tls.cert), "--tls-key-file", str(self.tls.key)]
        password = ["--requirepass", self.password] if self.password else []
        quiet = ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        quiet += ["--repl-diskless-sync-delay", "0"]  # replicas are there at once
        return [program, *ports, "--bind", "127.0.0.1", *quiet, *password, *self._options]

    def answers(self) -> bool:
        try:
            return self.call("PING").startswith((b"+PONG", b"-MASTERDOWN"))
        except ssl.SSLCertVerificationError:  # which no waiting changes
            raise
        except (OSError, AssertionError):
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


def make_tls_files(directory: Path, *names: str) -> TlsFiles:
    """Make an authority and a certificate for `names`, by default 127.0.0.1 and localhost."""
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
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def tls_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server that requires TLS with a client's certificate, and `PASSWORD`."""
    directory = tmp_path / "redis"
    directory.mkdir()
    with RedisServer(directory, password=PASSWORD, tls=make_tls_files(directory)) as server:
        yield server


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
