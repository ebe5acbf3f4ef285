"""Servers prove who they are unless a setting says that they need not, and then `tiered-kv check` shows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tenants import BucketStorage, RedisStorage, Tenant
from tiered_kv.cli import main
from tiered_kv.counters import count_of
from tiered_kv.stack import open_stack
from tiered_kv.testing.redis_servers import PASSWORD, RedisServer, TlsFiles, make_tls_files, tls_redis_server
from tiered_kv.testing.s3_servers import S3Server, missing_for_moto, start_moto
from tiered_kv_s3.settings import S3Settings

__all__ = ["tls_redis_server"]

pytestmark = [pytest.mark.trust("security"), pytest.mark.slow]

BLOCKS = 4


def files_in(folder: Path, *names: str) -> TlsFiles:
    folder.mkdir()
    return make_tls_files(folder, *names)


def check(tenant: Tenant, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Run `tiered-kv check`; return its status and what it says of the tier."""
    capsys.readouterr()
    status = main(["check", str(tenant.file), "--json"])
    tier: dict[str, Any] = json.loads(capsys.readouterr().out)["tiers"][1]
    return status, tier


def redis_tenant(server: RedisServer, folder: Path, **changes: object) -> Tenant:
    assert server.tls is not None
    own = {"tls_ca": str(server.tls.ca), "tls_cert": str(server.tls.cert), "tls_key": str(server.tls.key)}
    return Tenant("alice", RedisStorage(folder, [server], url=server.url, password=PASSWORD, **{**own, **changes}))


def answer_with(server: RedisServer, files: TlsFiles) -> None:
    """Have the server show another certificate from now on."""
    reply = server.call("CONFIG", "SET", "tls-cert-file", str(files.cert), "tls-key-file", str(files.key))
    assert reply == b"+OK\r\n"


def wrong_authority(server: RedisServer, tmp_path: Path) -> dict[str, object]:
    return {"tls_ca": str(files_in(tmp_path / "other").ca)}


def system_authorities(server: RedisServer, tmp_path: Path) -> dict[str, object]:
    return {"tls_ca": None}


def wrong_name(server: RedisServer, tmp_path: Path) -> dict[str, object]:
    files = files_in(tmp_path / "named", "elsewhere.example")
    answer_with(server, files)
    return {"tls_ca": str(files.ca)}


REASONS = [wrong_authority, system_authorities, wrong_name]


@pytest.mark.parametrize("reason", REASONS)
def test_a_redis_that_does_not_prove_who_it_is_gets_nothing(
    reason: Callable[[RedisServer, Path], dict[str, object]],
    tls_redis_server: RedisServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = reason(tls_redis_server, tmp_path)
    tenant = redis_tenant(tls_redis_server, tmp_path, **changes)
    status, tier = check(tenant, capsys)
    assert status == 1
    assert "does not pass the check of its certificate" in tier["error"]
    assert main(["purge", str(tenant.file), "--yes", "--json"]) == 1
    assert "does not pass the check of its certificate" in capsys.readouterr().out
    off = redis_tenant(tls_redis_server, tmp_path, tls_verify=False, **changes)
    status, tier = check(off, capsys)
    assert (status, tier["details"]["tls"], tier["details"]["tls_verified"]) == (0, True, False)
    assert off.store(BLOCKS) == BLOCKS


def test_a_redis_that_proves_who_it_is_is_used_and_check_says_verified(
    tls_redis_server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant = redis_tenant(tls_redis_server, tmp_path)
    status, tier = check(tenant, capsys)
    assert (status, tier["details"]["tls"], tier["details"]["tls_verified"]) == (0, True, True)
    assert (tenant.store(BLOCKS), tenant.load(BLOCKS)) == (BLOCKS, (BLOCKS, 0))


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
def test_an_s3_server_that_does_not_prove_who_it_is_gets_nothing(
    reason: str, moto_with: Callable[[TlsFiles], S3Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "elsewhere.example" if reason == "wrong name" else "127.0.0.1"
    files = files_in(tmp_path / "own", names)
    settings: dict[str, object] = {"ca_file": str(files.ca), "attempts": 1, "request_timeout": "60s"}
    if reason == "wrong authority":
        settings["ca_file"] = str(files_in(tmp_path / "other").ca)
    elif reason == "system authorities":
        del settings["ca_file"]
    server = moto_with(files)
    tenant = Tenant("alice", BucketStorage(tmp_path, server, "kv-bucket", **settings))
    status, tier = check(tenant, capsys)
    assert status == 1
    assert "untrusted" in tier["error"]
    assert main(["purge", str(tenant.file), "--yes"]) == 1
    assert "untrusted" in capsys.readouterr().out
    with open_stack(tenant.file) as stack:
        assert tenant.put(stack, tenant.keys(BLOCKS)) == 0
        assert count_of(stack.counters()["s3"], "failed_blocks_total", "store", "untrusted") == BLOCKS


def test_an_s3_server_that_proves_who_it_is_is_used(
    moto_with: Callable[[TlsFiles], S3Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = files_in(tmp_path / "own")
    tenant = Tenant("alice", BucketStorage(tmp_path, moto_with(files), "kv-bucket", ca_file=str(files.ca)))
    status, tier = check(tenant, capsys)
    assert (status, tier["details"]["tls"]) == (0, True)
    assert (tenant.store(BLOCKS), tenant.load(BLOCKS)) == (BLOCKS, (BLOCKS, 0))


def test_no_setting_of_s3_turns_the_check_off() -> None:
    about_tls = {
        name for name in S3Settings.model_fields if any(word in name for word in ("tls", "verif", "ca_", "cert"))
    }
    assert about_tls == {"ca_file"}
