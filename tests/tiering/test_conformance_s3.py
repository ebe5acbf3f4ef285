"""The s3 tier keeps the contract of a secondary tier: on moto's server, within this process, and on a slow wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.support.doors import codec_id_of
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.proxy import FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.testing.s3_servers import (
    ACCESS_KEY_ID,
    REGION,
    SECRET_ACCESS_KEY,
    S3Server,
    missing_for_moto,
    moto_bucket,
    moto_server,
)
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.codecs import ZSTD_ID
from tiered_kv.toolkit.record import HEADER_BYTES

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]

SLOW_WIRE = Faults(latency_s=0.002, bytes_per_s=20e6)
"""Of a datacenter next door; 20 MB/s for each connection."""

PATIENT = {"request_timeout": "60s", "lookup_timeout": "60s"}
"""A server that a busy machine holds up is no fault, and what it holds no miss."""

bucket_numbers = itertools.count()


def opener(entry: dict[str, object]) -> OpenTier:
    settings = S3Settings.model_validate({**PATIENT, **entry, "connections": 8})
    return lambda spec, view: S3Tier(spec, view, "s3", settings)


@pytest.mark.slow
class TestS3Tier(TierConformance):
    survives_reopen = True

    @pytest.fixture
    def open_tier(self, moto_server: S3Server, moto_bucket: str) -> OpenTier:
        self.server, self.bucket = moto_server, moto_bucket
        return opener(moto_server.settings(moto_bucket))

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        self.server.damage(self.bucket, "/blocks/")
        return True


class TestS3TierOnASlowWire(TestS3Tier):
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, moto_server: S3Server, moto_bucket: str, slow_wire: FaultProxy) -> OpenTier:
        self.server, self.bucket = moto_server, moto_bucket
        url = f"http://{slow_wire.host}:{slow_wire.port}"
        return opener(moto_server.settings(moto_bucket, endpoint_url=url))

    @pytest.fixture
    def slow_wire(self, moto_server: S3Server) -> Iterator[FaultProxy]:
        with FaultProxy(moto_server.address) as proxy:
            proxy.to_server = proxy.to_client = SLOW_WIRE
            yield proxy


@pytest.mark.slow
class TestS3TierWithCompressionOnMotoInThisProcess(TierConformance):
    """moto as a library starts it: its server closes every connection after one answer."""

    survives_reopen = True
    compressible = True

    @pytest.fixture
    def open_tier(self, bucket_in_this_process: dict[str, object]) -> OpenTier:
        return opener({**bucket_in_this_process, "codec": "zstd"})

    def test_objects_are_shorter_than_their_blocks(
        self, rig: TierRig, bucket_in_this_process: dict[str, object]
    ) -> None:
        keys = make_keys(8)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)
        bucket = str(bucket_in_this_process["bucket"])
        with closing(s3_client(str(bucket_in_this_process["endpoint_url"]))) as client:
            names = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
            blocks = [name for name in names if "/blocks/" in name]
            records = [client.get_object(Bucket=bucket, Key=name)["Body"].read() for name in blocks]
        assert [codec_id_of(record) for record in records] == [ZSTD_ID] * 8
        assert max(map(len, records)) < HEADER_BYTES + rig.block_bytes // 2


@pytest.fixture(scope="module")
def moto_in_this_process() -> Iterator[str]:
    """The URL of moto's server on a thread of this process."""
    if missing := missing_for_moto():
        pytest.skip(missing)
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket_in_this_process(moto_in_this_process: str) -> dict[str, object]:
    """A new bucket on it, as the YAML entry of an s3 tier."""
    bucket = f"bucket-{next(bucket_numbers)}"
    secrets = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    with closing(s3_client(moto_in_this_process)) as client:
        client.create_bucket(Bucket=bucket)
    return {"bucket": bucket, "endpoint_url": moto_in_this_process, "region": REGION, "addressing": "path", **secrets}


def s3_client(url: str) -> Any:  # Any: boto3 makes its class when it is asked for one
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
    )
