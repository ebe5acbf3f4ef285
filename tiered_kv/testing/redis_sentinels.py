"""A Redis master with a replica, and a sentinel that watches both, for tests: real ones on loopback.

    from tiered_kv.testing.redis_sentinels import redis_sentinel

A test module that imports the fixture has it; it skips, with the reason, where `redis-server` is not installed.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import RedisServer, free_port

SERVICE = "blocks"
"""What the sentinel calls the master."""
SENTINEL_TIMEOUT_S = 60.0
_POLL_S = 0.05
_ADDRESS = re.compile(rb"address=127\.0\.0\.1:(\d+),slaves=(\d+)")


class RedisSentinelServers:
    """A master, its replica, and one sentinel, which makes the replica the master when that has ended.

    Args:
        directory: An empty directory for them.
    """

    def __init__(self, directory: Path) -> None:
        own = [directory / name for name in ("master", "replica", "sentinel")]
        for each in own:
            each.mkdir()
        self.master = RedisServer(own[0], port=free_port())
        self.replica = RedisServer(own[1], ("--replicaof", f"127.0.0.1 {self.master.port}"), port=free_port())
        self._sentinel = _Sentinel(own[2], self.master.port)

    @property
    def address(self) -> str:
        """The sentinel's host:port."""
        return f"127.0.0.1:{self._sentinel.port}"

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
        """Kill the master, and return when the replica is the one that the sentinel names, and takes writes."""
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
        """Return the port of the master that the sentinel names, and of how many replicas it knows."""
        found = _ADDRESS.search(self._sentinel.call("INFO", "sentinel"))
        return (int(found[1]), int(found[2])) if found else (0, 0)


class _Sentinel(RedisServer):
    def __init__(self, directory: Path, master_port: int) -> None:
        super().__init__(directory, port=free_port())
        self._config = directory / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nlogfile log\ndir {directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
        )

    def _command(self) -> list[str]:
        return ["redis-server", str(self._config), "--sentinel"]


@pytest.fixture
def redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """A master with a replica and a sentinel; takes seconds to start."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    directory = tmp_path / "redis"
    directory.mkdir()
    servers = RedisSentinelServers(directory)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
