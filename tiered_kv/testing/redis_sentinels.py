"""A Redis master with a replica, and a sentinel that watches both, for tests: real ones on loopback.

    from tiered_kv.testing.redis_sentinels import redis_sentinel

Import the fixture into a test module to use it. It skips, with the reason, if `redis-server` is not installed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import RedisServer, TlsFiles, free_port, make_tls_files

SERVICE = "blocks"
"""The sentinel's name of the master."""
SENTINEL_TIMEOUT_S = 120.0
_PORT_ATTEMPTS = 5
_POLL_S = 0.05
_SLOW_MS = 600_000
"""How long a running server may fail to answer the sentinel: a busy machine delays one for a second."""
_ENDED_MS = 500
"""The same once the master has been ended."""
_OTHER_HOST = "127.0.0.2"
"""Another address of loopback."""
_ADDRESS = re.compile(rb"address=127\.0\.0\.1:(\d+),slaves=(\d+)")


class RedisSentinelServers:
    """A master, its replica, and one sentinel. It promotes the replica when the master was stopped or killed.

    Args:
        directory: An empty directory for them.
        tls: Listen with TLS only, for each other too, and require a client's certificate.
    """

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        own = [directory / name for name in ("master", "replica", "sentinel")]
        for each in own:
            each.mkdir()
        self.tls = tls
        secured = () if tls is None else ("--tls-replication", "yes")
        self.master = _Master(own[0], secured, tls=tls, port=free_port())
        following = ("--replicaof", f"127.0.0.1 {self.master.port}", *secured)
        self.replica = RedisServer(own[1], following, tls=tls, port=free_port())
        self._sentinel = _Sentinel(own[2], self.master.port, tls)
        self.master.sentinel = self._sentinel

    @property
    def address(self) -> str:
        """The sentinel's host:port."""
        return f"127.0.0.1:{self._sentinel.port}"

    @property
    def other_address(self) -> str:
        """The same sentinel by an address that is not in its certificate."""
        return f"{_OTHER_HOST}:{self._sentinel.port}"

    def start(self) -> None:
        """Start all of them and return when the replica follows, and the sentinel knows of it."""
        self.master.start()
        self.replica.start()
        self._sentinel.start()
        deadline = time.monotonic() + SENTINEL_TIMEOUT_S
        while b"master_link_status:up" not in self.replica.call("INFO", "replication") or self._watched()[1] < 1:
            assert time.monotonic() < deadline, "the replica does not follow, or the sentinel does not see it"
            time.sleep(_POLL_S)

    def fail_over(self) -> None:
        """Kill the master, and return when the sentinel names the replica as master, and it accepts writes."""
        self.master.kill()
        deadline = time.monotonic() + SENTINEL_TIMEOUT_S
        while self._watched()[0] != self.replica.port or b"role:master" not in self.replica.call("INFO", "replication"):
            assert time.monotonic() < deadline, "the sentinel makes nobody the master"
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End all of them."""
        for server in (self._sentinel, self.replica, self.master):
            server.kill()

    def _watched(self) -> tuple[int, int]:
        """Return the port of the sentinel's master, and how many replicas the sentinel knows."""
        found = _ADDRESS.search(self._sentinel.call("INFO", "sentinel"))
        return (int(found[1]), int(found[2])) if found else (0, 0)


class _Sentinel(RedisServer):
    def __init__(self, directory: Path, master_port: int, tls: TlsFiles | None) -> None:
        super().__init__(directory, tls=tls, port=free_port())
        self._config = directory / "sentinel.conf"
        listen = f"port {self.port}\n"
        if tls is not None:
            listen = f"port 0\ntls-port {self.port}\ntls-replication yes\ntls-ca-cert-file {tls.ca}\n"
            listen += f"tls-cert-file {tls.cert}\ntls-key-file {tls.key}\n"
        self._config.write_text(
            f"{listen}bind 127.0.0.1 {_OTHER_HOST}\nlogfile log\ndir {directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {_SLOW_MS}\nsentinel failover-timeout {SERVICE} 2000\n"
        )

    def expect_no_answer(self) -> None:
        """From now on the sentinel replaces the master as soon as it does not answer."""
        with contextlib.suppress(OSError):  # the sentinel has ended, too
            self.call("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(_ENDED_MS))

    def _command(self) -> list[str]:
        return ["redis-server", str(self._config), "--sentinel"]


class _Master(RedisServer):
    """A master that tells its sentinel when it is ended, so that the sentinel need not replace a slow one."""

    sentinel: _Sentinel | None = None

    def _end(self, number: signal.Signals) -> None:
        super()._end(number)
        if self.sentinel is not None:
            self.sentinel.expect_no_answer()


@pytest.fixture
def redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """A master with a replica and a sentinel; takes seconds to start."""
    yield from _started(tmp_path, RedisSentinelServers)


@pytest.fixture
def tls_redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """The same with TLS, which requires a client's certificate."""
    yield from _started(tmp_path, lambda own: RedisSentinelServers(own, tls=make_tls_files(own)))


def _started(tmp_path: Path, make: Callable[[Path], RedisSentinelServers]) -> Iterator[RedisSentinelServers]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (tmp_path / "redis").mkdir()
    for attempt in range(_PORT_ATTEMPTS):
        (own := tmp_path / "redis" / str(attempt)).mkdir()
        servers = make(own)
        try:
            servers.start()
        except RuntimeError:  # they know each other's ports, and another program took one
            servers.stop()
            if attempt == _PORT_ATTEMPTS - 1:
                raise
        except BaseException:
            servers.stop()
            raise
        else:
            break
    try:
        yield servers
    finally:
        servers.stop()
