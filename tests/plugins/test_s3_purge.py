"""Purging a bucket's namespace while stacks announce what they will store: no grant that may hold is deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.s3_servers import S3Server, moto_bucket, moto_server
from tiered_kv_s3 import grants
from tiered_kv_s3.listing import Listing
from tiered_kv_s3.mark import MarkObject
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.versions import Known, Version, Versions

pytest.importorskip("boto3", reason="boto3 is not installed")

from tiered_kv_s3.administration import S3Administration

__all__ = ["moto_bucket", "moto_server"]

DIGEST = bytes(range(16))
NAMING = Naming("kv", DIGEST)
BLOCK = NAMING.block("0123456789abcdef", make_keys(1)[0])
LIVE, NEW, LAPSED, LAPSED_TWICE = (
    f"{NAMING.grants}{digit * 16}-4096-{seconds}" for digit, seconds in (("1", 90), ("2", 90), ("3", 0), ("4", 0))
)


def soon() -> float:
    return time.monotonic() + 120.0


@pytest.mark.slow
@pytest.mark.parametrize("is_versioned", [False, True], ids=["plain", "versioned"])
def test_a_purge_keeps_grants_and_the_epoch_that_are_written_while_it_runs(
    is_versioned: bool, moto_server: S3Server, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "CLOCKS_S", -30.0)  # so that a grant for 0 s has lapsed at once
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

    put(NAMING.namespace, LIVE, LIVE, LAPSED, LAPSED_TWICE, LAPSED_TWICE, BLOCK, BLOCK)
    delete = Versions.delete

    def delete_late(self: Versions, versions: Sequence[Version], deadline: float) -> tuple[int, set[str]]:
        if NEW not in (name for name, _ in kept()):
            put(NEW, LIVE, NAMING.epoch)  # one stack announces a grant, one renews its own, one is reset
        return delete(self, versions, deadline)

    monkeypatch.setattr(Versions, "delete", delete_late)
    administration = S3Administration(S3Settings.model_validate(moto_server.settings(moto_bucket, prefix="kv")))
    purged = administration.purge(DIGEST.hex(), soon())
    administration.close()
    left = kept()
    client.close()
    assert left == sorted((name, True) for name in (LIVE, NEW, NAMING.epoch))
    assert purged.blocks == (2 if is_versioned else 1)
    assert (purged.size_bytes, purged.left) == (5 * purged.blocks, ())
    assert purged.notes == ("1 open stacks use this namespace; they go on, and may store in it again",)


class OneVersionAPage:
    """Versions in a list, the latest of each object first; every page has one."""

    def __init__(self, *entries: tuple[str, str]) -> None:
        self.known = Known.YES
        self.entries = list(entries)

    def pages(self, prefix: str, deadline: float) -> Iterator[list[Version]]:
        for entry in list(self.entries):
            name, version = entry
            latest = next(each for each in self.entries if each[0] == name)
            if name.startswith(prefix):
                yield [Version(name, version, 0, entry == latest, version == "mark")]

    def delete(self, versions: Sequence[Version], deadline: float) -> tuple[int, set[str]]:
        for version in versions:
            self.entries.remove((version.name, version.version))
        return len(versions), set()


class NothingListed:
    def pages(self, prefix: str, deadline: float) -> Iterator[list[Any]]:
        yield []


def test_what_was_deleted_does_not_stay_when_the_mark_of_its_deletion_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MarkObject, "read", lambda self, deadline: None)
    administration = S3Administration(S3Settings.model_validate({"bucket": "kv-blocks", "prefix": "kv"}))
    lapsed = [(LAPSED, version) for version in ("mark", "2", "1")]
    versions = OneVersionAPage(*lapsed, (LIVE, "2"), (LIVE, "mark"), (LIVE, "1"))
    administration._versions = cast(Versions, versions)
    administration._listing = cast(Listing, NothingListed())
    purged = administration.purge(DIGEST.hex(), soon())
    administration.close()
    assert versions.entries == [(LIVE, "2")]
    assert purged.left == ()
