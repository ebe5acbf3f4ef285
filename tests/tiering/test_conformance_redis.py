"""The redis tier keeps the contract of a secondary tier: on real servers, on a slow wire, and on fakeredis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support.redis_groups import RedisClusterServers, redis_cluster
from tests.support.redis_servers import (
    PASSWORD,
    PATIENT,
    RedisServer,
    redis_server,
    tls_redis_server,
)
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.proxy import FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.servers import fake_redis_url
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.record import HEADER_BYTES

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

__all__ = ["fake_redis_url", "redis_cluster", "redis_server", "tls_redis_server"]


def opener(**settings: object) -> OpenTier:
    checked = RedisSettings.model_validate({**PATIENT, **settings})
    return lambda spec, view: RedisTier(spec, view, "redis", checked)


class TestRedisTier(TierConformance):
    survives_reopen = True
    settings: ClassVar[dict[str, object]] = {}
    server: RedisServer

    @pytest.fixture
    def open_tier(self, redis_server: RedisServer) -> OpenTier:
        self.server = redis_server
        return opener(url=redis_server.url, **self.settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        self.server.damage("tkv1:*", HEADER_BYTES)
        return True


@pytest.mark.slow
class TestRedisTierWithCompressionAndEncryption(TestRedisTier):
    settings: ClassVar[dict[str, object]] = {
        "codec": "zstd+aes-256-gcm",
        "encryption": {"keys": {1: "11" * 32}},
        "ttl": "1h",
        "connections": 1,
        "pipeline": 10_000,
    }
    compressible = True
    block_bytes = 3000


@pytest.mark.slow
class TestRedisTierOverTls(TestRedisTier):
    @pytest.fixture
    def open_tier(self, tls_redis_server: RedisServer) -> OpenTier:
        self.server = tls_redis_server
        tls = tls_redis_server.tls
        assert tls is not None
        files = {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key)}
        return opener(url=tls_redis_server.url, password=PASSWORD, **files)


@pytest.mark.slow
class TestRedisTierOverAUnixSocket(TestRedisTier):
    @pytest.fixture
    def open_tier(self, redis_server: RedisServer, tmp_path: Path) -> OpenTier:
        self.server = redis_server
        path = str(tmp_path / "socket")
        redis_server.restart("--unixsocket", path)
        return opener(url=f"unix://{path}")


@pytest.mark.slow
class TestRedisTierOnASlowWire(TestRedisTier):
    @pytest.fixture
    def open_tier(self, redis_server: RedisServer, slow_wire: FaultProxy) -> OpenTier:
        self.server = redis_server
        return opener(url=f"redis://{slow_wire.host}:{slow_wire.port}")

    @pytest.fixture
    def slow_wire(self, redis_server: RedisServer) -> Iterator[FaultProxy]:
        with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
            proxy.set_faults(Faults(latency_s=0.002, bytes_per_s=20e6))
            yield proxy


class TestRedisTierOnFakeredis(TierConformance):
    survives_reopen = True

    @pytest.fixture
    def open_tier(self, fake_redis_url: str) -> OpenTier:
        return opener(url=fake_redis_url)


@pytest.mark.slow
class TestRedisTierOnACluster(TierConformance):
    survives_reopen = True

    @pytest.fixture
    def open_tier(self, redis_cluster: RedisClusterServers) -> OpenTier:
        return opener(mode="cluster", nodes=redis_cluster.addresses[:2])
