"""The s3 tier on moto's server: requests, limits and settings."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.support.entries import rig_of, s3_entry
from tests.support.s3_servers import S3Server
from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv_s3 import control
from tiered_kv_s3.access import BucketAccess
from tiered_kv_s3.administration import S3Administration
from tiered_kv_s3.control import Control
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")


pytestmark = pytest.mark.slow

BLOCK_BYTES = 4096
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
WAIT_S = 60.0
PATIENCE = {"job_timeout": WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S}
"""Timeouts that a slow machine does not reach."""

MakeRig = Callable[..., TierRig]


@pytest.fixture
def make_rig(moto_server: S3Server, moto_bucket: str, closing: contextlib.ExitStack) -> MakeRig:
    def make(**changes: object) -> TierRig:
        entry = {**s3_entry(moto_server, moto_bucket, connections=4, **PATIENCE), **changes}
        rig = rig_of(entry, block_bytes=BLOCK_BYTES, num_blocks=1024, wait_s=2 * WAIT_S)
        return closing.enter_context(contextlib.closing(rig))

    return make


@pytest.fixture
def client(moto_server: S3Server) -> Iterator[Any]:
    with contextlib.closing(moto_server.client()) as client:
        yield client


def blocks_in(client: Any, bucket: str) -> list[dict[str, Any]]:
    found = client.list_objects_v2(Bucket=bucket).get("Contents", ())
    return [entry for entry in found if "/blocks/" in entry["Key"]]


def test_a_renewed_block_keeps_its_bytes_and_storage_class(
    client: Any, moto_server: S3Server, moto_bucket: str, make_rig: MakeRig
) -> None:
    rig = make_rig(storage_class="ONEZONE_IA")
    keys = make_keys(1)
    rig.store(keys)
    name = blocks_in(client, moto_bucket)[0]["Key"]
    before = client.head_object(Bucket=moto_bucket, Key=name)
    settings = S3Settings.model_validate(s3_entry(moto_server, moto_bucket, storage_class="ONEZONE_IA"))
    with contextlib.closing(Control(BucketAccess(settings, "s3"), settings, "s3")) as control:
        control.renew(name)
    after = client.head_object(Bucket=moto_bucket, Key=name)
    assert (after["StorageClass"], after["ETag"]) == ("ONEZONE_IA", before["ETag"])
    assert rig.load(keys) == set(keys)


def test_blocks_past_their_time_are_misses_and_are_deleted(client: Any, moto_bucket: str, make_rig: MakeRig) -> None:
    keys = make_keys(4)
    rig = make_rig(ttl=1, presence_ttl=0, sweep_interval=86400)  # the first sweep comes within that time
    rig.store(keys)
    wait_until(lambda: not any(rig.lookup(key) for key in keys), WAIT_S, what="their end")
    assert rig.load(keys) == set()
    assert rig.tier.stats()["expired_blocks_total"] == 4
    sweeping = make_rig(ttl=1, sweep_interval=0.2)
    sweeping.store(make_keys(1, "another"))
    wait_until(lambda: not blocks_in(client, moto_bucket), WAIT_S, what="their deletion")


def test_a_description_warns_of_a_bucket_that_keeps_what_is_deleted(
    client: Any, moto_bucket: str, make_rig: MakeRig
) -> None:
    rig = make_rig(capacity=1 << 20)
    assert "warning" not in rig.tier.describe()
    client.put_bucket_versioning(Bucket=moto_bucket, VersioningConfiguration={"Status": "Enabled"})
    assert "old versions" in str(rig.tier.describe()["warning"])
    assert "warning" not in make_rig().tier.describe(), "without a limit nothing is deleted"


def test_a_description_warns_of_object_lock_and_of_a_clock_that_is_wrong(
    client: Any, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    rig = make_rig(bucket="locked")
    assert str(rig.tier.describe()["warning"]).startswith("the bucket has object lock: deleted blocks stay")
    monkeypatch.setattr(control, "seconds_of", lambda date: time.time() - 300.0)
    assert "the clock of this machine is 5min ahead of the server's; set it" in str(rig.tier.describe()["warning"])


def test_objects_get_the_storage_class_and_encryption_of_the_settings(
    client: Any, moto_bucket: str, make_rig: MakeRig
) -> None:
    rig = make_rig(
        storage_class="ONEZONE_IA", server_encryption="aws:kms", kms_key_id="alias/kv", sign_payload=True, codec="raw"
    )
    assert rig.store(make_keys(1)).success
    (entry,) = blocks_in(client, moto_bucket)
    head = client.head_object(Bucket=moto_bucket, Key=entry["Key"])
    assert (head["StorageClass"], head["ServerSideEncryption"]) == ("ONEZONE_IA", "aws:kms")
    assert head["SSEKMSKeyId"].endswith("alias/kv")


@pytest.mark.parametrize("deletes", [2, 0], ids=["slowed down", "refused"])
def test_a_purge_continues_as_long_as_the_server_deletes_something(
    client: Any,
    moto_server: S3Server,
    moto_bucket: str,
    make_rig: MakeRig,
    monkeypatch: pytest.MonkeyPatch,
    deletes: int,
) -> None:
    rig = make_rig()
    assert rig.store(make_keys(4)).success
    requests = 0
    delete = Control.delete_versions

    def delete_some(self: Control, objects: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        nonlocal requests
        requests += 1
        refusals = dict.fromkeys(range(deletes, len(objects)), "SlowDown")
        return refusals | (delete(self, objects[:deletes]) if deletes else {})

    monkeypatch.setattr(Control, "delete_versions", delete_some)
    settings = S3Settings.model_validate(s3_entry(moto_server, moto_bucket))
    with contextlib.closing(S3Administration(settings)) as administration:
        purged = administration.purge(rig.spec.namespace_digest.hex(), time.monotonic() + WAIT_S)
    assert (bool(purged.left), len(blocks_in(client, moto_bucket))) == ((False, 0) if deletes else (True, 4))
    surveys = 3 if deletes else 2
    assert requests == surveys + (1 if deletes else 2)  # the epoch's mark; if it is refused, again at the end


def test_a_missing_bucket_is_reported(make_rig: MakeRig) -> None:
    rig = make_rig(bucket="no-such-bucket")
    with pytest.raises(TierUnavailableError, match=r"/no-such-bucket does not exist \(NoSuchBucket"):
        rig.tier.describe()
    (result,) = rig.wait([rig.submit_store(make_keys(1))])
    assert result.reason == "no_bucket"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": RECORD_BYTES - 1}, "do not hold one record of 4224 bytes"),
        ({"endpoint_url": "https://127.0.0.1:1", "ca_file": "/nowhere/ca.pem"}, "ca_file"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(make_rig: MakeRig, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rig(**changes)
