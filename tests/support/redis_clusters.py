"""A Redis Cluster for tests: real servers on loopback. A fixture skips where a program is missing."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.redis_servers import RedisServer, TlsFiles, make_tls_files
from tiered_kv.testing.waiting import wait_until

CLUSTER_TIMEOUT_S = 120.0


class RedisClusterServers:
    """Three masters with a replica each; with TLS for each other too, and for clients that have a certificate."""

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        self.servers: list[RedisServer] = []
        self.tls = tls
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-config-file", "nodes"]
        options += ["--cluster-replica-validity-factor", "0"]
        options += [] if tls is None else ["--tls-cluster", "yes", "--tls-replication", "yes"]
        for number in range(6):
            own = directory / str(number)
            own.mkdir()
            self.servers.append(RedisServer(own, options, tls=tls))

    @property
    def addresses(self) -> list[str]:
        """Each member's host:port."""
        return [f"127.0.0.1:{server.port}" for server in self.servers]

    def start(self) -> None:
        """Start all of them and return when every slot has a master and every master its replica."""
        for server in self.servers:
            server.start()
        create = ["redis-cli", "--cluster", "create", *self.addresses, "--cluster-replicas", "1", "--cluster-yes"]
        if self.tls is not None:
            create += ["--tls", "--cacert", str(self.tls.ca), "--cert", str(self.tls.cert), "--key", str(self.tls.key)]
        subprocess.run(create, check=True, timeout=CLUSTER_TIMEOUT_S, stdout=subprocess.DEVNULL)
        self.wait_until_whole(self.servers)
        wait_until(lambda: self._followers() == 3, CLUSTER_TIMEOUT_S, what="that the replicas follow")

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
            CLUSTER_TIMEOUT_S,
            what="a whole cluster",
        )

    def keep_masters(self) -> None:
        """From now on no replica replaces a slow master: a busy machine delays servers.

        Without it a member that does not answer for two seconds is replaced, as tests of failovers need it.
        """
        for server in self.servers:
            assert server.call("CONFIG", "SET", "cluster-node-timeout", "600000") == b"+OK\r\n"

    def stop(self) -> None:
        """End all of them."""
        for server in self.servers:
            server.kill()

    def _followers(self) -> int:
        return sum(b"master_link_status:up" in server.call("INFO", "replication") for server in self.servers)


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    """A Redis Cluster of three masters and three replicas; takes seconds to start."""
    yield from _clustered(tmp_path / "cluster", with_tls=False)


@pytest.fixture
def tls_redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    """The same with TLS, which wants a client's certificate."""
    yield from _clustered(tmp_path / "cluster", with_tls=True)


def _clustered(directory: Path, *, with_tls: bool) -> Iterator[RedisClusterServers]:
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    directory.mkdir()
    cluster = RedisClusterServers(directory, tls=make_tls_files(directory) if with_tls else None)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
