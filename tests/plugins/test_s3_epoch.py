"""A reset of a bucket stays done, whatever becomes of the mark that the bucket keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv.toolkit import epoch
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.tier import S3Tier

__all__ = ["moto_bucket", "moto_server"]

OpenRig = Callable[[], TierRig]
pytestmark = pytest.mark.slow


class Mark:
    """The object that holds the mark of the epoch, as another program sees it."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    @property
    def name(self) -> str:
        names = [each["Key"] for each in self._client.list_objects_v2(Bucket=self._bucket)["Contents"]]
        return next(str(name) for name in names if name.endswith("/epoch"))

    def read(self) -> bytes:
        return bytes(self._client.get_object(Bucket=self._bucket, Key=self.name)["Body"].read())

    def write(self, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self.name, Body=data)

    def delete(self) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self.name)


@pytest.fixture
def mark(moto_server: S3Server, moto_bucket: str) -> Iterator[Mark]:
    client = moto_server.client()
    yield Mark(client, moto_bucket)
    client.close()


@pytest.fixture
def open_rig(moto_server: S3Server, moto_bucket: str) -> Iterator[OpenRig]:
    rigs: list[TierRig] = []
    patience = {"lookup_timeout": 60, "request_timeout": 60, "presence_ttl": 0}
    settings = S3Settings.model_validate(moto_server.settings(moto_bucket, **patience))

    def open_one() -> TierRig:
        rigs.append(
            TierRig(lambda spec, view: S3Tier(spec, view, "s3", settings), num_blocks=16, block_bytes=512, wait_s=60.0)
        )
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


def test_a_bucket_whose_mark_was_deleted_brings_no_block_back(open_rig: OpenRig, mark: Mark) -> None:
    keys = make_keys(4)
    rig = open_rig()
    assert rig.store(keys).success
    rig.tier.reset_cache()
    assert rig.store(make_keys(1, "new")).success
    rig.close()
    mark.delete()
    newcomer = open_rig()
    assert newcomer.load(keys) == set()
    assert not any(newcomer.lookup_all(keys))
    assert newcomer.store(keys).success
    assert newcomer.load(keys) == set(keys)


def test_a_process_never_joins_an_epoch_again_that_it_has_seen_retired(open_rig: OpenRig, mark: Mark) -> None:
    keys = make_keys(4)
    rig = open_rig()
    assert rig.store(keys).success
    old = mark.read()
    rig.tier.reset_cache()
    assert rig.store(make_keys(1, "new")).success
    rig.close()
    mark.write(old)  # as when a bucket is restored
    assert open_rig().load(keys) == set()
    assert mark.read() != old


def test_a_bucket_that_fell_back_is_repaired_while_a_process_runs(
    open_rig: OpenRig, mark: Mark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "CHECK_PAUSE_S", 0.0)
    rig = open_rig()
    assert rig.store(make_keys(1)).success
    old = mark.read()
    rig.tier.reset_cache()
    assert rig.store(make_keys(1)).success
    new = mark.read()
    mark.write(old)
    rig.load(make_keys(1))
    assert mark.read() == new
