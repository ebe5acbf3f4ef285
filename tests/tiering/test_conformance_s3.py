"""The s3 tier keeps the contract of a secondary tier, on moto's server and on a slow wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.support.s3_entries import damage_objects, s3_entry
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.proxy import FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.tiering.base import SecondaryTierManager

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]

SLOW_WIRE = Faults(latency_s=0.002, bytes_per_s=20e6)
"""Another datacenter: 20 MB/s for each connection."""

PATIENT = {"request_timeout": "60s", "lookup_timeout": "60s"}
"""Timeouts that a busy machine does not reach."""


def opener(entry: dict[str, object]) -> OpenTier:
    settings = S3Settings.model_validate({**PATIENT, **entry, "connections": 8})
    return lambda spec, view: S3Tier(spec, view, "s3", settings)


@pytest.mark.slow
class TestS3Tier(TierConformance):
    survives_reopen = True

    settings: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def open_tier(self, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        self.server, self.bucket = moto_server, moto_bucket
        return opener({**s3_entry(moto_server, moto_bucket), **self.settings})

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        damage_objects(self.server, self.bucket, "/blocks/")
        return True


class TestS3TierWithCompression(TestS3Tier):
    settings: ClassVar[dict[str, object]] = {"codec": "zstd"}
    compressible = True


class TestS3TierOnASlowWire(TestS3Tier):
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, moto_server: S3Server, moto_bucket: str, slow_wire: FaultProxy) -> OpenTier:
        self.server, self.bucket = moto_server, moto_bucket
        url = f"http://{slow_wire.host}:{slow_wire.port}"
        return opener(s3_entry(moto_server, moto_bucket, endpoint_url=url))

    @pytest.fixture
    def slow_wire(self, moto_server: S3Server) -> Iterator[FaultProxy]:
        with FaultProxy(moto_server.address) as proxy:
            proxy.set_faults(SLOW_WIRE)
            yield proxy
