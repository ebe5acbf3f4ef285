"""Redis servers that work together, on loopback: a Redis Cluster, and a master whose replica a sentinel promotes.

A fixture skips where a program is missing.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.redis_servers import RedisServer, TlsFiles, make_tls_files, redis_program
from tiered_kv.testing.control import wait_until

SERVICE = "blocks"
"""The sentinel's name of the master."""
_TIMEOUT_S = 120.0
_SLOW_MS = 600_000
"""How long a running server may fail to answer another: a busy machine delays one for seconds."""
_KILLED_MS = 500
"""The same once the master has been killed."""
_OTHER_HOST = "127.0.0.2"


class RedisClusterServers:
    """Three masters with a replica each. With `tls` also between each other, and with client certificates."""

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        self.servers: list[RedisServer] = []
        self.tls = tls
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-config-file", "nodes"]
        options += ["--cluster-replica-validity-factor", "0"]
        options += [] if tls is None else ["--tls-cluster", "yes", "--tls-replication", "yes"]
        for number in range(6):
            self.servers.append(RedisServer(directory / str(number), options, tls=tls))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{server.port}" for server in self.servers]

    def start(self) -> None:
        """Start all servers and return when every slot has a master and every master its replica."""
        if shutil.which("redis-cli") is None:
            pytest.skip("redis-cli is not installed")
        for server in self.servers:
            server.start()
        create = ["redis-cli", "--cluster", "create", *self.addresses, "--cluster-replicas", "1", "--cluster-yes"]
        if self.tls is not None:
            create += ["--tls", "--cacert", str(self.tls.ca), "--cert", str(self.tls.cert), "--key", str(self.tls.key)]
        subprocess.run(create, check=True, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)
        self.wait_until_whole(self.servers)
        try:
            wait_until(lambda: sum(map(_follows, self.servers)) == 3, _TIMEOUT_S, what="that the replicas follow")
        except AssertionError as error:
            for server in self.servers:
                error.add_note(server.call("CLUSTER", "NODES").decode() + server.call("INFO", "replication").decode())
            raise

    def masters(self) -> list[RedisServer]:
        """Return the servers that answer and are masters now."""
        found = []
        for server in self.servers:
            with contextlib.suppress(OSError):
                if b"role:master" in server.call("INFO", "replication"):
                    found.append(server)
        return found

    def wait_until_whole(self, servers: Sequence[RedisServer]) -> None:
        """Return when each of `servers` says that every slot is served."""
        wait_until(
            lambda: all(b"cluster_state:ok" in server.call("CLUSTER", "INFO") for server in servers),
            _TIMEOUT_S,
            what="a whole cluster",
        )

    def keep_masters(self) -> None:
        """Let no replica replace a master that a busy machine delays; tests of failovers need it after two seconds."""
        for server in self.servers:
            assert server.call("CONFIG", "SET", "cluster-node-timeout", str(_SLOW_MS)) == b"+OK\r\n"

    def stop(self) -> None:
        for server in self.servers:
            server.kill()


class RedisSentinelServers:
    """A master, its replica, and one sentinel. The sentinel promotes the replica after `kill_master`."""

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        self.tls = tls
        secured = () if tls is None else ("--tls-replication", "yes")
        self.master = RedisServer(directory / "master", secured, tls=tls)
        options = ("--replicaof", f"127.0.0.1 {self.master.port}", *secured)
        self.replica = RedisServer(directory / "replica", options, tls=tls)
        self._sentinel = _Sentinel(directory / "sentinel", self.master.port, tls)

    @property
    def address(self) -> str:
        """The sentinel's host:port."""
        return f"127.0.0.1:{self._sentinel.port}"

    @property
    def other_address(self) -> str:
        """The same sentinel by an address that is not in its certificate."""
        return f"{_OTHER_HOST}:{self._sentinel.port}"

    def start(self) -> None:
        """Start all servers and return when the replica follows, and the sentinel knows of it."""
        for server in (self.master, self.replica, self._sentinel):
            server.start()
        wait_until(
            lambda: _follows(self.replica) and b",slaves=1," in self._sentinel.call("INFO", "sentinel"),
            _TIMEOUT_S,
            what="a replica that follows and that the sentinel sees",
        )

    def kill_master(self) -> None:
        """Kill the master, and let the sentinel replace it at once."""
        self.master.kill()
        self._sentinel.call("SENTINEL", "SET", SERVICE, "down-after-milliseconds", str(_KILLED_MS))

    def stop(self) -> None:
        for server in (self._sentinel, self.replica, self.master):
            server.kill()


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
        return [redis_program(), str(self._config), "--sentinel"]


def _follows(server: RedisServer) -> bool:
    return b"master_link_status:up" in server.call("INFO", "replication")


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    """A Redis Cluster of three masters and three replicas; takes seconds to start."""
    yield from _started(RedisClusterServers, tmp_path / "cluster")


@pytest.fixture
def tls_redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    yield from _started(RedisClusterServers, tmp_path / "cluster", with_tls=True)


@pytest.fixture
def redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    """A master with a replica and a sentinel; takes seconds to start."""
    yield from _started(RedisSentinelServers, tmp_path / "redis")


@pytest.fixture
def tls_redis_sentinel(tmp_path: Path) -> Iterator[RedisSentinelServers]:
    yield from _started(RedisSentinelServers, tmp_path / "redis", with_tls=True)


_Group = TypeVar("_Group", RedisClusterServers, RedisSentinelServers)


def _started(group: type[_Group], directory: Path, *, with_tls: bool = False) -> Iterator[_Group]:
    directory.mkdir()
    servers = group(directory, tls=make_tls_files(directory) if with_tls else None)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
