"""Over TLS, a Redis Cluster's members, sentinels, and the masters that they name prove who they are, each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.redis_clusters import RedisClusterServers, tls_redis_cluster
from tests.support.redis_sentinels import SERVICE, RedisSentinelServers, tls_redis_sentinel
from tests.support.tenants import RedisStorage, Tenant
from tiered_kv.cli import main
from tiered_kv.testing.redis_servers import RedisServer, TlsFiles, make_tls_files
from tiered_kv.testing.waiting import wait_until

__all__ = ["tls_redis_cluster", "tls_redis_sentinel"]

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 30
REFUSED = "does not pass the check of its certificate"


@pytest.fixture
def other(tmp_path: Path) -> TlsFiles:
    """Another authority, and what it signed for a host of another name."""
    (tmp_path / "other").mkdir()
    return make_tls_files(tmp_path / "other", "elsewhere.example")


def both(one: TlsFiles, other: TlsFiles, folder: Path) -> Path:
    """Return a file with both authorities, so that nothing but a name can be wrong."""
    path = folder / "both.pem"
    path.write_bytes(one.ca.read_bytes() + other.ca.read_bytes())
    return path


def show(servers: Sequence[RedisServer], files: TlsFiles) -> None:
    """Have servers show another certificate from now on."""
    for server in servers:
        reply = server.call("CONFIG", "SET", "tls-cert-file", str(files.cert), "tls-key-file", str(files.key))
        assert reply == b"+OK\r\n"


def tenant_of(servers: Sequence[RedisServer], tls: TlsFiles | None, folder: Path, **settings: object) -> Tenant:
    assert tls is not None
    own = {"tls": True, "tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key)}
    return Tenant("alice", RedisStorage(folder, servers, **{**own, **settings}))


def expect_refused(tenant: Tenant, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["check", str(tenant.file), "--json"]) == 1
    assert REFUSED in json.loads(capsys.readouterr().out)["tiers"][1]["error"]
    assert main(["purge", str(tenant.file), "--yes", "--json"]) == 1
    assert REFUSED in capsys.readouterr().out


def expect_used(tenant: Tenant, capsys: pytest.CaptureFixture[str], first: int = 0) -> None:
    capsys.readouterr()
    assert main(["check", str(tenant.file), "--json"]) == 0
    details = json.loads(capsys.readouterr().out)["tiers"][1]["details"]
    assert (details["tls"], details["tls_verified"]) == (True, True)
    assert tenant.store(BLOCKS, first) == BLOCKS
    assert tenant.load(BLOCKS, first) == (BLOCKS, 0)


def values_of(servers: Sequence[RedisServer]) -> int:
    return sum(int(server.call("DBSIZE")[1:]) for server in servers)


def test_a_cluster_s_members_prove_who_they_are(
    tls_redis_cluster: RedisClusterServers, other: TlsFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, tls = tls_redis_cluster, tls_redis_cluster.tls
    assert tls is not None
    cluster.keep_masters()  # a member that loses its links, too: what it shows later would keep it from having others
    entry = {"mode": "cluster", "nodes": cluster.addresses}
    expect_refused(tenant_of(cluster.servers, tls, tmp_path, **entry, tls_ca=str(other.ca)), capsys)
    expect_refused(tenant_of(cluster.servers, tls, tmp_path, **entry, tls_ca=None), capsys)
    assert values_of(cluster.servers) == 0
    trusting = {**entry, "tls_ca": str(both(tls, other, tmp_path))}
    expect_used(tenant_of(cluster.servers, tls, tmp_path, **trusting), capsys)
    assert all(values_of([master]) for master in cluster.masters()), "the blocks are not spread over the masters"
    show(cluster.servers, other)
    expect_refused(tenant_of(cluster.servers, tls, tmp_path, **trusting), capsys)


def test_a_master_that_a_cluster_names_proves_who_it_is_too(
    tls_redis_cluster: RedisClusterServers, other: TlsFiles, tmp_path: Path
) -> None:
    """The one that is asked has the right certificate. What another has is not stored, and is a miss."""
    cluster, tls = tls_redis_cluster, tls_redis_cluster.tls
    assert tls is not None
    cluster.keep_masters()
    ca = str(both(tls, other, tmp_path))
    tenant = tenant_of(cluster.servers, tls, tmp_path, mode="cluster", nodes=cluster.addresses, tls_ca=ca)
    assert tenant.store(BLOCKS) == BLOCKS
    masters = cluster.masters()
    asked = next(master for master in masters if master.keys("tkv1:*:epoch"))  # without it no tier is opened
    show([master for master in masters if master is not asked], other)
    before = values_of([asked])
    loaded, wrong = tenant.load(BLOCKS)  # none at all, perhaps: lookups without an answer open the tier's breaker
    assert (loaded < BLOCKS, wrong) == (True, 0)
    stored = tenant.store(BLOCKS, BLOCKS)
    assert 0 < stored < BLOCKS
    assert values_of([asked]) == before + stored


def test_a_sentinel_and_the_master_that_it_names_prove_who_they_are(
    tls_redis_sentinel: RedisSentinelServers, other: TlsFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers, tls = tls_redis_sentinel, tls_redis_sentinel.tls
    assert tls is not None
    data = [servers.master, servers.replica]
    entry = {"mode": "sentinel", "service": SERVICE, "nodes": [servers.address]}
    expect_refused(tenant_of(data, tls, tmp_path, **entry, tls_ca=str(other.ca)), capsys)
    trusting = {**entry, "tls_ca": str(both(tls, other, tmp_path))}
    # The sentinel by a name that its certificate has not.
    expect_refused(tenant_of(data, tls, tmp_path, **{**trusting, "nodes": [servers.other_address]}), capsys)
    assert values_of(data) == 0
    expect_used(tenant_of(data, tls, tmp_path, **trusting), capsys)
    wait_until(lambda: values_of([servers.master]) == values_of([servers.replica]))
    # The sentinel as it should be, and a master that shows what was signed for another.
    show([servers.master], other)
    expect_refused(tenant_of(data, tls, tmp_path, **trusting), capsys)
