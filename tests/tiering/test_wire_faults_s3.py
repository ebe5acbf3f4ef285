"""The s3 tier behind a bad network, before moto's HTTP server."""

from __future__ import annotations

import pytest

from tiered_kv.testing.proxy import FaultProxy
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.testing.wire_faults import TierUnderWireFaults

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]


@pytest.mark.slow
@pytest.mark.trust("wire-faults")
class TestS3TierUnderWireFaults(TierUnderWireFaults):
    # A busy machine holds threads up for a second and more. A tier that goes by its own timeout and not by its jobs'
    # deadlines takes twice as long as they may.
    grace_s = 10.0
    recovery_s = 45.0
    shutdown_limit_s = 10.0

    @pytest.fixture
    def server_address(self, moto_server: S3Server) -> tuple[str, int]:
        return moto_server.address

    @pytest.fixture
    def open_tier(self, proxy: FaultProxy, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        url = f"http://{proxy.host}:{proxy.port}"
        few = {"connections": 4, "attempts": 2, "lookup_timeout": "300ms", "request_timeout": "20s", "presence_ttl": 0}
        settings = S3Settings.model_validate(moto_server.settings(moto_bucket, endpoint_url=url, **few))
        return lambda spec, view: S3Tier(spec, view, "s3", settings)
