"""The redis tier behind a bad network, before a real redis-server."""

from __future__ import annotations

import pytest

from tiered_kv.testing.proxy import FaultProxy
from tiered_kv.testing.redis_servers import RedisServer, redis_server
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.wire_faults import ByteFault, TierUnderWireFaults

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

__all__ = ["redis_server"]

DENSE_BYTES = 340
"""More than commands, names and the record's header take."""


@pytest.mark.slow
@pytest.mark.trust("wire-faults")
class TestRedisTierUnderWireFaults(TierUnderWireFaults):
    # A busy machine holds threads up for a second and more. A tier that goes by its own timeout and not by its jobs'
    # deadlines takes twice as long as they may.
    grace_s = 10.0
    recovery_s = 45.0
    shutdown_limit_s = 10.0

    def offsets(self, fault: ByteFault, exchange_bytes: int) -> set[int]:
        """Flip a bit of every byte before the payload too: an exchange takes a millisecond."""
        head = range(min(DENSE_BYTES, exchange_bytes) if fault is ByteFault.FLIP else 0)
        return super().offsets(fault, exchange_bytes) | set(head)

    @pytest.fixture
    def server_address(self, redis_server: RedisServer) -> tuple[str, int]:
        return "127.0.0.1", redis_server.port

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy) -> OpenTier:
        timeouts = {"timeout": "20s", "connect_timeout": "300ms", "lookup_timeout": "300ms"}
        settings = RedisSettings.model_validate({"url": f"redis://{proxy.host}:{proxy.port}", **timeouts})
        return lambda spec, view: RedisTier(spec, view, "redis", settings)
