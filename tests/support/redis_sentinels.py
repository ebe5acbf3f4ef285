"""A Redis master with a replica, and a sentinel that watches both, for tests: real ones on loopback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_servers import RedisServer, TlsFiles, make_tls_files
from tiered_kv.testing.waiting import wait_until

SERVICE = "blocks"
"""The sentinel's name of the master."""
SENTINEL_TIMEOUT_S = 120.0
_SLOW_MS = 600_000
"""How long a running server may fail to answer the sentinel: a busy machine delays one for a second."""
_ENDED_MS = 500
"""The same once the master has been ended."""
_OTHER_HOST = "127.0.0.2"
"""Another address of loopback."""
_ADDRESS = re.compile(rb"address=127\.0\.0\.1:(\d+),slaves=(\d+)")


class RedisSentinelServers:
    """A master, its replica, and one sentinel. It promotes the replica after `kill_master`."""

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        own = [directory / name for name in ("master", "replica", "sentinel")]
        for each in own:
            each.mkdir()
        self.tls = tls
        secured = () if tls is None else ("--tls-replication", "yes")
        self.master = RedisServer(own[0], secured, tls=tls)
        self.replica = RedisServer(own[1], ("--replicaof", f"127.0.0.1 {self.master.port}", *secured), tls=tls)
        self._sentinel = _Sentinel(own[2], self.master.port, tls)

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
        for server in (self.master, self.replica, self._sentinel):
            server.start()
        wait_until(
            lambda: b"master_link_status:up" in self.replica.call("INFO", "replication") and self._watched()[1],
            SENTINEL_TIMEOUT_S,
            what="a replica that follows and that the sentinel sees",
        )

    def kill_master(self) -> None:
        """Kill the master, and have the sentinel replace it at once."""
        self.master.kill()
        self._sentinel.call("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(_ENDED_MS))

    def fail_over(self) -> None:
        """Kill the master, and return when the sentinel names the replica as master, and it accepts writes."""
        self.kill_master()
        wait_until(
            lambda: (
                self._watched()[0] == self.replica.port and b"role:master" in self.replica.call("INFO", "replication")
            ),
            SENTINEL_TIMEOUT_S,
            what="a new master",
        )

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
        super().__init__(directory, tls=tls)
        self._config = directory / "sentinel.conf"
        listen = f"port {self.port}\n"
        if tls is not None:
            listen = f"port 0\ntls-port {self.port}\ntls-replication yes\ntls-ca-cert-file {tls.ca}\n"
            listen += f"tls-cert-file {tls.cert}\ntls-key-file {tls.key}\n"
        self._config.write_text(
            f"{listen}bind 127.0.0.1 {_OTHER_HOST}\ndir {directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {_SLOW_MS}\nsentinel failover-timeout {SERVICE} 2000\n"
        )

    def command(self) -> list[str]:
        return ["redis-server", str(self._config), "--sentinel"]


@pytest.fixture
def redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """A master with a replica and a sentinel; takes seconds to start."""
    yield from _started(tmp_path / "redis", with_tls=False)


@pytest.fixture
def tls_redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """The same with TLS, which wants a client's certificate."""
    yield from _started(tmp_path / "redis", with_tls=True)


def _started(directory: Path, *, with_tls: bool) -> Iterator[RedisSentinelServers]:
    directory.mkdir()
    servers = RedisSentinelServers(directory, tls=make_tls_files(directory) if with_tls else None)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
