"""Purging a bucket's namespace while a stack is reset: the mark that it writes stays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.s3_entries import s3_entry
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv_s3.control import Control
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.administration import S3Administration

__all__ = ["moto_bucket", "moto_server"]

DIGEST = bytes(range(16))
NAMING = Naming("kv", DIGEST)
BLOCK = NAMING.block("0123456789abcdef", make_keys(1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("is_versioned", [False, True], ids=["plain", "versioned"])
def test_a_purge_keeps_the_mark_that_is_written_while_it_runs(
    is_versioned: bool, moto_server: S3Server, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = moto_server.client()
    if is_versioned:
        client.put_bucket_versioning(Bucket=moto_bucket, VersioningConfiguration={"Status": "Enabled"})

    def put(*names: str) -> None:
        for name in names:
            client.put_object(Bucket=moto_bucket, Key=name, Body=b"block" if name == BLOCK else b"")

    def kept() -> list[tuple[str, bool]]:
        answer: dict[str, Any] = client.list_object_versions(Bucket=moto_bucket)
        entries = answer.get("Versions", []) + answer.get("DeleteMarkers", [])
        return sorted((each["Key"], each["IsLatest"]) for each in entries)

    put(NAMING.namespace, BLOCK, BLOCK)
    delete = Control.delete

    def delete_late(self: Control, objects: Sequence[Mapping[str, str]]) -> set[str]:
        if NAMING.epoch not in (name for name, _ in kept()):
            put(NAMING.epoch)
        return delete(self, objects)

    monkeypatch.setattr(Control, "delete", delete_late)
    administration = S3Administration(S3Settings.model_validate(s3_entry(moto_server, moto_bucket, prefix="kv")))
    purged = administration.purge(DIGEST.hex(), time.monotonic() + 120.0)
    administration.close()
    left = kept()
    client.close()
    assert left == [(NAMING.epoch, True)]
    assert purged.blocks == (2 if is_versioned else 1)
    assert (purged.size_bytes, purged.left, purged.notes) == (5 * purged.blocks, (), ())
