"""The s3 tier keeps the contract of a secondary tier, on moto's server."""

from __future__ import annotations

import pytest

from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]


@pytest.mark.slow
class TestS3Tier(TierConformance):
    survives_reopen = True
    codec = "raw"

    @pytest.fixture
    def open_tier(self, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        self.server, self.bucket = moto_server, moto_bucket
        settings = S3Settings.model_validate(moto_server.settings(moto_bucket, codec=self.codec, connections=8))
        return lambda spec, view: S3Tier(spec, view, "s3", settings)

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        client = self.server.client()
        for entry in client.list_objects_v2(Bucket=self.bucket)["Contents"]:
            if "/blocks/" in entry["Key"]:
                data = bytearray(client.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read())
                data[-1] ^= 0x10
                client.put_object(Bucket=self.bucket, Key=entry["Key"], Body=bytes(data))
        client.close()
        return True


@pytest.mark.slow
class TestS3TierWithCompression(TestS3Tier):
    codec = "zstd"
