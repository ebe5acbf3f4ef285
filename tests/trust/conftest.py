"""What the proofs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.support.places import Place
from tests.support.redis_sentinels import SERVICE
from tests.support.tenants import BucketStorage, DirectoryStorage, MakeStorage, RedisStorage, Storage
from tiered_kv.testing.s3_servers import missing_for_moto


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start the server that lasts for the session before a test begins, which would be blamed for leaving it behind."""
    if hasattr(request.module, "moto_server") and not missing_for_moto():
        request.getfixturevalue("moto_server")


@pytest.fixture
def place_of(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Place]]:
    """Return new storage for a tier, by the tier's type; what is opened there is closed with the test."""
    with ExitStack() as ended:
        yield lambda kind: Place(kind, tmp_path, request.getfixturevalue, ended)


@pytest.fixture
def make_storage(tmp_path: Path, request: pytest.FixtureRequest) -> MakeStorage:
    """Return the storage of a kind for tenants."""

    def make(kind: str) -> Storage:
        if kind in ("nvme", "fs"):
            return DirectoryStorage(tmp_path, kind)
        if kind == "redis":
            server = request.getfixturevalue("redis_server")
            return RedisStorage(tmp_path, [server], url=server.url)
        if kind == "redis-cluster":
            cluster = request.getfixturevalue("redis_cluster")
            cluster.keep_masters()
            return RedisStorage(tmp_path, cluster.masters(), mode="cluster", nodes=cluster.addresses)
        if kind == "redis-sentinel":
            servers = request.getfixturevalue("redis_sentinel")
            settings = {"mode": "sentinel", "service": SERVICE, "nodes": [servers.address]}
            return RedisStorage(tmp_path, [servers.master], **settings)
        moto = request.getfixturevalue("moto_server")
        bucket = moto.make_bucket()
        if kind == "s3-versioned":
            with closing(moto.client()) as client:
                client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        return BucketStorage(tmp_path, moto, bucket)

    return make
