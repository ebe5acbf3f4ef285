"""Every server's certificate is verified: also those of a Redis Cluster's members, of sentinels and of their masters.

`tls_verify: false` turns this off, and `tiered-kv check` shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.entries import s3_entry
from tests.support.redis_groups import SERVICE, RedisClusterServers, RedisSentinelServers
from tests.support.redis_servers import PASSWORD, PATIENT, RedisServer, TlsFiles, make_tls_files
from tests.support.s3_servers import S3Server, missing_for_moto, start_moto
from tests.support.tenants import Tenant
from tiered_kv.cli.main import main
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv_s3.settings import S3Settings

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 30
S3_PATIENT = {"job_timeout": "60s", "lookup_timeout": "60s", "request_timeout": "60s"}
REFUSED = "does not pass the check of its certificate"


def files_in(folder: Path, *names: str) -> TlsFiles:
    folder.mkdir()
    return make_tls_files(folder, *names)


@pytest.fixture
def other(tmp_path: Path) -> TlsFiles:
    """Another authority, and what it signed for a host of another name."""
    return files_in(tmp_path / "other", "elsewhere.example")


def both(one: TlsFiles, other: TlsFiles, folder: Path) -> str:
    """Return the path of a file with both authorities, so that only a name can be wrong."""
    path = folder / "both.pem"
    path.write_bytes(one.ca.read_bytes() + other.ca.read_bytes())
    return str(path)


def show(servers: Sequence[RedisServer], files: TlsFiles) -> None:
    """Have servers show another certificate from now on."""
    for server in servers:
        reply = server.call("CONFIG", "SET", "tls-cert-file", str(files.cert), "tls-key-file", str(files.key))
        assert reply == b"+OK\r\n"


def tenant_of(tls: TlsFiles | None, folder: Path, **settings: object) -> Tenant:
    assert tls is not None
    own = {"tls": None if "url" in settings else True, "tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key}
    paths = {name: str(value) if isinstance(value, Path) else value for name, value in own.items()}
    return Tenant("alice", folder, {"type": "redis", **PATIENT, "job_timeout": "60s", **paths, **settings})


def check(tenant: Tenant, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run `tiered-kv check`; return its status and what it says of the tier."""
    capsys.readouterr()
    status = main(["check", str(tenant.file), "--json"])
    tier: dict[str, Any] = json.loads(capsys.readouterr().out)["tiers"][1]
    return status, tier


def expect_refused(tenant: Tenant, capsys: pytest.CaptureFixture[str], reason: str = REFUSED) -> None:
    status, tier = check(tenant, capsys)
    assert status == 1
    assert reason in tier["error"]
    assert main(["purge", str(tenant.file), "--yes", "--json"]) == 1
    assert reason in capsys.readouterr().out


def expect_used(tenant: Tenant, capsys: pytest.CaptureFixture[str], *, verified: bool | None = True) -> None:
    status, tier = check(tenant, capsys)
    assert (status, tier["details"]["tls"], tier["details"].get("tls_verified")) == (0, True, verified)
    assert tenant.store(BLOCKS) == BLOCKS
    assert tenant.load(BLOCKS) == (BLOCKS, 0)


def values_of(servers: Sequence[RedisServer]) -> int:
    return sum(int(server.call("DBSIZE")[1:]) for server in servers)


@pytest.mark.parametrize("reason", ["wrong authority", "system authorities", "wrong name"])
def test_a_redis_with_a_wrong_certificate_gets_nothing(
    reason: str, tls_redis_server: RedisServer, other: TlsFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = tls_redis_server
    settings: dict[str, object] = {"url": server.url, "password": PASSWORD}
    settings |= {"tls_ca": None if reason == "system authorities" else str(other.ca)}
    if reason == "wrong name":
        show([server], other)
    expect_refused(tenant_of(server.tls, tmp_path, **settings), capsys)
    expect_used(tenant_of(server.tls, tmp_path, **settings, tls_verify=False), capsys, verified=False)


def test_a_redis_with_the_right_certificate_is_used_and_check_says_verified(
    tls_redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = tls_redis_server
    expect_used(tenant_of(server.tls, tmp_path, url=server.url, password=PASSWORD), capsys)


def test_the_certificates_of_a_cluster_s_members_are_verified(
    tls_redis_cluster: RedisClusterServers, other: TlsFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, tls = tls_redis_cluster, tls_redis_cluster.tls
    assert tls is not None
    cluster.keep_masters()  # a member that loses its links, too: what it shows later would keep it from having others
    entry = {"mode": "cluster", "nodes": cluster.addresses}
    expect_refused(tenant_of(tls, tmp_path, **entry, tls_ca=str(other.ca)), capsys)
    expect_refused(tenant_of(tls, tmp_path, **entry, tls_ca=None), capsys)
    assert values_of(cluster.servers) == 0
    trusting = {**entry, "tls_ca": both(tls, other, tmp_path)}
    expect_used(tenant_of(tls, tmp_path, **trusting), capsys)
    assert all(values_of([master]) for master in cluster.masters()), "the blocks are not spread over the masters"
    show(cluster.servers, other)
    expect_refused(tenant_of(tls, tmp_path, **trusting), capsys)


def test_the_certificates_of_other_masters_of_a_cluster_are_verified(
    tls_redis_cluster: RedisClusterServers, other: TlsFiles, tmp_path: Path
) -> None:
    """The first master has the right certificate. Blocks of the others are not stored, and are misses."""
    cluster, tls = tls_redis_cluster, tls_redis_cluster.tls
    assert tls is not None
    cluster.keep_masters()
    ca = both(tls, other, tmp_path)
    tenant = tenant_of(tls, tmp_path, mode="cluster", nodes=cluster.addresses, tls_ca=ca)
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


def test_the_certificates_of_a_sentinel_and_its_master_are_verified(
    tls_redis_sentinel: RedisSentinelServers, other: TlsFiles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers, tls = tls_redis_sentinel, tls_redis_sentinel.tls
    assert tls is not None
    data = [servers.master, servers.replica]
    entry = {"mode": "sentinel", "service": SERVICE, "nodes": [servers.address]}
    expect_refused(tenant_of(tls, tmp_path, **entry, tls_ca=str(other.ca)), capsys)
    trusting = {**entry, "tls_ca": both(tls, other, tmp_path)}
    # The sentinel by a name that its certificate has not.
    expect_refused(tenant_of(tls, tmp_path, **{**trusting, "nodes": [servers.other_address]}), capsys)
    assert values_of(data) == 0
    expect_used(tenant_of(tls, tmp_path, **trusting), capsys)
    wait_until(lambda: values_of([servers.master]) == values_of([servers.replica]))
    # The sentinel as it should be, and a master that shows what was signed for another.
    show([servers.master], other)
    expect_refused(tenant_of(tls, tmp_path, **trusting), capsys)


@pytest.fixture
def moto_with() -> Iterator[Callable[[TlsFiles], S3Server]]:
    """Start moto's server with a certificate."""
    if missing := missing_for_moto():
        pytest.skip(missing)
    servers: list[S3Server] = []

    def start(files: TlsFiles) -> S3Server:
        servers.append(start_moto((files.cert, files.key)))
        client = servers[-1].client(verify=False)
        with pytest.warns():  # urllib3's, that nothing is verified
            client.create_bucket(Bucket="kv-bucket")
        client.close()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.mark.parametrize("reason", ["wrong authority", "system authorities", "wrong name"])
def test_an_s3_server_with_a_wrong_certificate_gets_nothing(
    reason: str, moto_with: Callable[[TlsFiles], S3Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "elsewhere.example" if reason == "wrong name" else "127.0.0.1"
    files = files_in(tmp_path / "own", names)
    settings: dict[str, object] = {"ca_file": str(files.ca), "attempts": 1}
    if reason == "wrong authority":
        settings["ca_file"] = str(files_in(tmp_path / "other").ca)
    elif reason == "system authorities":
        del settings["ca_file"]
    server = moto_with(files)
    tenant = Tenant("alice", tmp_path, s3_entry(server, "kv-bucket", **S3_PATIENT, **settings))
    expect_refused(tenant, capsys, "certificate that is refused")
    with open_stack(tenant.file) as stack:
        assert tenant.put(stack, tenant.keys(BLOCKS)) == 0
        assert count_of(stack.counters()["s3"], "failed_blocks_total", "store", "untrusted") == BLOCKS


def test_an_s3_server_with_the_right_certificate_is_used(
    moto_with: Callable[[TlsFiles], S3Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_in(tmp_path / "own")
    server = moto_with(files)
    tenant = Tenant("alice", tmp_path, s3_entry(server, "kv-bucket", **S3_PATIENT, ca_file=str(files.ca)))
    expect_used(tenant, capsys, verified=None)


def test_no_setting_of_s3_turns_the_check_off() -> None:
    about_tls = {
        name for name in S3Settings.model_fields if any(word in name for word in ("tls", "verif", "ca_", "cert"))
    }
    assert about_tls == {"ca_file"}
