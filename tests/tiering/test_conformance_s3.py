"""The s3 tier keeps the contract of a secondary tier: on moto's server, on a slow wire, and on other servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest

from tests.support.s3_entries import damage_objects, s3_entry
from tests.support.stacks import stack_of
from tiered_kv.metrics.instruments import count_of
from tiered_kv.stack import open_stack
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.proxy import FaultProxy, Faults
from tiered_kv.testing.rig import OpenTier, make_keys
from tiered_kv.testing.s3_servers import S3Server, installed_server, moto_bucket, moto_server
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.toolkit.record import HEADER_BYTES

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.account import Account
from tiered_kv_s3.administration import S3Administration
from tiered_kv_s3.control import Control
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.tier import S3Tier

__all__ = ["installed_server", "moto_bucket", "moto_server"]

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


@pytest.mark.slow
class TestS3TierOnOtherServers(TierConformance):
    survives_reopen = True
    wait_s = 60.0

    @pytest.fixture
    def open_tier(self, installed_server: S3Server) -> OpenTier:
        self.server, self.bucket = installed_server, installed_server.make_bucket()
        return opener(s3_entry(self.server, self.bucket))

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        damage_objects(self.server, self.bucket, "/blocks/")
        return True


@pytest.mark.slow
def test_sweeps_renewals_and_purges_on_another_server(installed_server: S3Server) -> None:
    bucket, keys = installed_server.make_bucket(), make_keys(40)
    blocks = np.zeros((len(keys), 512), np.uint8)
    entry = s3_entry(installed_server, bucket, **PATIENT, job_timeout="60s")
    capacity = 30 * (HEADER_BYTES + blocks.shape[1])
    limits = {"capacity": capacity, "sweep_interval": "1s"}
    with open_stack(stack_of({**entry, **limits}, blocks=len(keys), block_bytes=512)) as stack:
        assert stack.put(keys, blocks, timeout=60.0) == len(keys)
        assert stack.flush(60.0)
        wait_until(lambda: count_of(stack.counters(), "s3", "tier", "deleted_blocks_total") >= 10, what="a sweep")
        assert count_of(stack.counters(), "s3", "tier", "failed_sweeps_total") == 0
        digest = stack.config.identity.digest.hex()
    settings = S3Settings.model_validate({**entry, "ttl": "6s"})
    with closing(Control(Account(settings, "s3"), settings, "s3")) as control:
        name = next(each.name for page in control.listed("tiered-kv/") for each in page if "/blocks/" in each.name)
        time.sleep(4.0)
        control.renew(name)  # raises if the object is older than half of `ttl`
    with closing(S3Administration(settings)) as administration:
        deadline = time.monotonic() + 60.0
        (found,) = administration.survey(deadline).namespaces
        assert found.blocks == 30
        purged = administration.purge(digest, deadline)
        assert (purged.blocks, purged.left) == (30, ())
        assert administration.survey(deadline).namespaces == ()
