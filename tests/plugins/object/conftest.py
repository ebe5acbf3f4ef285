"""The tiers gcs and azure, each over its small server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.entries import rig_of
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import FakeGCS
from tests.support.fake_s3 import BLOCK_BYTES, WAIT_S, FakeS3, OpenRig
from tiered_kv.testing.rig import TierRig

CLOUDS: dict[str, type[FakeS3]] = {"gcs": FakeGCS, "azure": FakeAzure}


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[FakeS3]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with CLOUDS[request.param]() as server:
        yield server


@pytest.fixture
def open_rig(cloud: FakeS3, closing: ExitStack) -> OpenRig:
    """Opens tiers with timeouts that a busy machine does not reach, and without a presence cache."""
    patience = {"job_timeout": 10 * WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S, "presence_ttl": 0}

    def open_one(**changes: object) -> TierRig:
        rig = rig_of({**cloud.entry, **patience, **changes}, block_bytes=BLOCK_BYTES, wait_s=2 * WAIT_S)
        closing.callback(rig.close)
        return rig

    return open_one
