"""The redis and the s3 tier behind a bad network, before a real redis-server and moto's HTTP server."""

from __future__ import annotations

import pytest

from tests.support.entries import s3_entry
from tests.support.figures import Profile
from tests.support.redis_servers import RedisServer, redis_server
from tiered_kv.testing.proxy import FaultProxy
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.testing.wire_faults import ByteFault, TierUnderWireFaults
from tiered_kv.tiering.factory import SecondaryTierFactory

__all__ = ["moto_bucket", "moto_server", "redis_server"]

pytestmark = [pytest.mark.slow, pytest.mark.trust("wire-faults")]

DENSE_BYTES = 340
"""More than redis's commands, names and the record's header take."""


class PatientlyTested(TierUnderWireFaults):
    """A busy machine holds threads up for a second and more.

    A tier that goes by its own timeout and not by its jobs' deadlines takes twice as long as they may.
    """

    grace_s = 10.0
    recovery_s = 45.0
    shutdown_limit_s = 10.0


class TestRedisTierUnderWireFaults(PatientlyTested):
    @pytest.fixture(autouse=True)
    def _dense(self, profile: Profile) -> None:
        self.step = profile.pick(9, 1)

    def offsets(self, fault: ByteFault, exchange_bytes: int) -> set[int]:
        """Flip a bit of every byte before the payload too, or of a sample of them."""
        head = range(0, min(DENSE_BYTES, exchange_bytes) if fault is ByteFault.FLIP else 0, self.step)
        return super().offsets(fault, exchange_bytes) | set(head)

    @pytest.fixture
    def server_address(self, redis_server: RedisServer) -> tuple[str, int]:
        return "127.0.0.1", redis_server.port

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy) -> OpenTier:
        pytest.importorskip("redis", reason="redis-py is not installed")
        timeouts = {"timeout": "20s", "connect_timeout": "300ms", "lookup_timeout": "300ms"}
        entry = {"type": "redis", "url": f"redis://{proxy.host}:{proxy.port}", **timeouts}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)


class TestS3TierUnderWireFaults(PatientlyTested):
    @pytest.fixture
    def server_address(self, moto_server: S3Server) -> tuple[str, int]:
        return moto_server.address

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        pytest.importorskip("boto3", reason="boto3 is not installed")
        few = {"connections": 4, "attempts": 2, "lookup_timeout": "300ms", "request_timeout": "20s", "presence_ttl": 0}
        url = f"http://{proxy.host}:{proxy.port}"
        entry = {"type": "s3", **s3_entry(moto_server, moto_bucket, endpoint_url=url, **few)}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)
