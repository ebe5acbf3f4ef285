"""A Redis Cluster for tests: real servers on loopback.

    from tiered_kv.testing.redis_clusters import redis_cluster

Import a fixture into a test module to use it. It skips, with the reason, if `redis-server` or `redis-cli` is not
installed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tiered_kv.testing.redis_servers import RedisServer, TlsFiles, make_tls_files

CLUSTER_TIMEOUT_S = 120.0
_POLL_S = 0.005


class RedisClusterServers:
    """Three masters with a replica each.

    Args:
        directory: An empty directory for them.
        tls: Listen with TLS only, for each other too, and require a client's certificate.
    """

    def __init__(self, directory: Path, *, tls: TlsFiles | None = None) -> None:
        self.servers: list[RedisServer] = []
        self.tls = tls
        secured = () if tls is None else ("--tls-cluster", "yes", "--tls-replication", "yes")
        for number in range(6):
            own = directory / str(number)
            own.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-config-file", "nodes")
            options = (*options, "--cluster-replica-validity-factor", "0", *secured)
            self.servers.append(RedisServer(own, options, tls=tls, has_bus=True))

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
        deadline = time.monotonic() + CLUSTER_TIMEOUT_S
        while sum(b"master_link_status:up" in server.call("INFO", "replication") for server in self.servers) < 3:
            assert time.monotonic() < deadline, "the replicas do not follow"
            time.sleep(_POLL_S)

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
        deadline = time.monotonic() + CLUSTER_TIMEOUT_S
        for server in servers:
            while b"cluster_state:ok" not in server.call("CLUSTER", "INFO"):
                assert time.monotonic() < deadline, "the cluster does not come together"
                time.sleep(_POLL_S)

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


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    """A Redis Cluster of three masters and three replicas; takes seconds to start."""
    yield from _clustered(RedisClusterServers(_directory(tmp_path)))


@pytest.fixture
def tls_redis_cluster(tmp_path: Path) -> Iterator[RedisClusterServers]:
    """The same with TLS, which requires a client's certificate."""
    directory = _directory(tmp_path)
    yield from _clustered(RedisClusterServers(directory, tls=make_tls_files(directory)))


def _clustered(cluster: RedisClusterServers) -> Iterator[RedisClusterServers]:
    for program in ("redis-server", "redis-cli"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _directory(tmp_path: Path) -> Path:
    directory = tmp_path / "cluster"
    directory.mkdir()
    return directory
