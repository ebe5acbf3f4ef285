"""Storage for tiers of any built-in type: it opens tiers and tenants, and reads everything that they store.

place = Place("fs", tmp_path)
rig = place.open(spec)                      # a tier on a rig
place.door(rig).read(key)
alice = place.tenant("alice")               # stacks of a tenant
alice.store(64)
assert place.holds(alice.marker)
"""

from __future__ import annotations

import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.disk_use import damage_files
from tests.support.doors import Door, MemoryDoor, bucket_door, fs_door, redis_door, s3_door
from tests.support.entries import NAMESPACE, rig_of, s3_entry
from tests.support.fake_azure import FakeAzure
from tests.support.fake_gcs import FakeGCS
from tests.support.fake_s3 import FakeS3
from tests.support.redis_groups import SERVICE
from tests.support.redis_servers import RedisServer
from tests.support.tenants import Tenant
from tiered_kv.config.hooks import tier_plugins
from tiered_kv.testing.rig import Content, OpenTier, TierRig, block_content
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.administration import TierAdministration
from tiered_kv.toolkit.record import HEADER_BYTES

SPEC = TierSpec("storage", 4096, NAMESPACE, {"model": "bench"}, wants_events=True)
"""Of rigs, unless a test gives another."""
RECORD_MAGIC = b"\x89TKVREC\n"
"""Every block record begins with it."""
STORED = ("nvme", "fs", "redis", "s3")
"""Tiers whose blocks persist."""
_PATIENT: Mapping[str, Mapping[str, object]] = {
    "redis": {"connect_timeout": "60s", "timeout": "60s"},
    "s3": {"request_timeout": "60s"},
    "gcs": {"request_timeout": "60s"},
    "azure": {"request_timeout": "60s"},
}
"""A lookup or store that times out on a busy machine would look like a lost block."""
_OF_RIGS: Mapping[str, Mapping[str, object]] = {
    "s3": {"presence_ttl": 0, "connections": 8},
    "gcs": {"presence_ttl": 0},
    "azure": {"presence_ttl": 0},
}
_SMALL = ("gcs", "azure")
"""Kinds whose server is in this process."""
_OF_PROCESSES = ("/lock", "/sweep", "/owners/", "/grants/", "/ledger")


class Place:
    """New storage for tiers of one type.

    Args:
        kind: The type; or `redis-cluster`, `redis-sentinel`, `s3-versioned`, a bucket that keeps versions, `s3-small`,
            a `FakeS3`, or `s3-remembers`, the same under a tier with a presence cache. `gcs` and `azure` have a
            `FakeGCS` and a `FakeAzure`.
        folder: For directories.
        server: Returns a running server by the name of its fixture.
        ending: Closes rigs and doors.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        server: Callable[[str], Any] = lambda name: pytest.fail(f"there is no {name}"),
        ending: ExitStack | None = None,
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.path = folder / "kv"
        self._ending = ending or ExitStack()
        self._type = kind.partition("-")[0]
        self.masters: list[RedisServer] = []
        self.small_s3: FakeS3
        self.entry: dict[str, object] = {"type": self._type}
        """Of the tier; changes apply when it is opened the next time."""
        if self._type == "redis":
            pytest.importorskip("redis", reason="redis-py is not installed")
        match kind:
            case "nvme" | "fs":
                self.entry |= {"path": str(self.path), "capacity": "64MiB"}
            case "redis":
                self.masters = [server("redis_server")]
                self.entry |= {"url": self.masters[0].url}
            case "redis-cluster":
                cluster = server("redis_cluster")
                cluster.keep_masters()
                self.masters = cluster.masters()
                self.entry |= {"mode": "cluster", "nodes": cluster.addresses}
            case "redis-sentinel":
                servers = server("redis_sentinel")
                self.masters = [servers.master]
                self.entry |= {"mode": "sentinel", "service": SERVICE, "nodes": [servers.address]}
            case "s3" | "s3-versioned":
                pytest.importorskip("boto3", reason="boto3 is not installed")
                self.s3 = server("moto_server")
                self.bucket = self.s3.make_bucket()
                self.entry |= s3_entry(self.s3, self.bucket, prefix="kv")
                if kind == "s3-versioned":
                    with closing(self.s3.client()) as client:
                        client.put_bucket_versioning(Bucket=self.bucket, VersioningConfiguration={"Status": "Enabled"})
            case "gcs":
                pytest.importorskip("obstore", reason="obstore is not installed")
                self.small_s3 = self._ending.enter_context(FakeGCS())
                self.small_s3.has_mark = False
                self.entry |= self.small_s3.entry
            case "azure":
                pytest.importorskip("obstore", reason="obstore is not installed")
                self.small_s3 = self._ending.enter_context(FakeAzure())
                self.small_s3.has_mark = False
                self.entry |= self.small_s3.entry
            case "s3-small" | "s3-remembers":
                pytest.importorskip("boto3", reason="boto3 is not installed")
                self.small_s3 = self._ending.enter_context(FakeS3())
                self.small_s3.has_mark = False  # the tier writes it
                self.entry |= self.small_s3.entry | ({"presence_ttl": "1h"} if kind == "s3-remembers" else {})
            case _:
                self.entry |= {"capacity": "64MiB"}
        if kind == "nvme":
            self.entry |= {"segment": "1MiB"}

    def open(
        self, spec: TierSpec = SPEC, content: Content = block_content, *, num_blocks: int = 512, **settings: object
    ) -> TierRig:
        """Open a tier on a rig; settings replace those of the entry."""
        # A chain: a rig that opens the tier again takes the entry of that time.
        entry = ChainMap(settings, self.entry, dict(_OF_RIGS.get(self._type, {})), dict(self._patient))
        rig = rig_of(entry, block_bytes=spec.block_bytes, num_blocks=num_blocks, spec=spec, content=content)
        self._ending.callback(rig.close)
        return rig

    def opener(self, **settings: object) -> OpenTier:
        """Return what opens the tier for a rig of the caller; settings replace those of the entry."""
        entry = {**self._patient, **self.entry, **settings}
        return lambda spec, view: SecondaryTierFactory.create(spec, view, entry)

    def tenant(self, name: str, **settings: object) -> Tenant:
        """Return a tenant on this storage; in nvme each has its directory."""
        entry = {**self._patient, **self.entry, **settings}
        if self.kind == "nvme":
            entry["path"] = str(self.folder / f"kv-{re.sub(r'[^a-z]', '_', name)[:64]}")
        return Tenant(name, self.folder, entry)

    def door(self, rig: TierRig) -> Door:
        """Return access to the stored bytes; nvme has none but its files."""
        digest = rig.spec.namespace_digest
        match self.kind:
            case "memory":
                return MemoryDoor(rig)
            case "fs":
                return fs_door(self.path, digest)
            case "redis":
                return redis_door(self.masters[0], digest)
            case "s3":
                return s3_door(self.s3, self.bucket, f"kv/{digest.hex()}", self._ending.callback)
            case _:
                objects = self.small_s3.objects
                return bucket_door(objects.get, _put_into(objects), f"/bucket/tiered-kv/{digest.hex()}")

    def damage(self, tier: SecondaryTierManager) -> None:
        """Flip bits in every block that an open tier has stored."""
        if self.kind == "memory":
            for record in tier._records.values():  # type: ignore[attr-defined]  # reaching in is the point
                record.data[-1] ^= 0x01
        elif self.kind in ("nvme", "fs"):
            damage_files(self.path)
        elif self.masters:
            for master in self.masters:
                master.damage("tkv1:*", HEADER_BYTES)
        else:
            records = {name: data for name, data in self.stored().items() if data.startswith(RECORD_MAGIC)}
            self.restore({name: data[:-1] + bytes([data[-1] ^ 0x01]) for name, data in records.items()})

    def administration(self) -> TierAdministration:
        tier_type = tier_plugins().resolve(str(self.entry["type"]))
        assert tier_type.administration is not None
        return tier_type.administration()(tier_type.settings.model_validate({**self.entry, "name": "x"}))

    def refuse_deletions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Refuse to delete blocks from now on."""

        def refuse(name: str, **options: int) -> None:
            raise PermissionError(1, "Operation not permitted", name)

        if self.kind == "fs":
            monkeypatch.setattr("os.unlink", refuse)
        elif self.kind == "redis":
            self.masters[0].call("ACL", "SETUSER", "default", "-unlink", "-del")
        else:
            self.small_s3.always["DELETE"] = "denied"

    def everything(self) -> Iterator[tuple[str, bytes, bytes | None]]:
        """Yield name, raw name and bytes of all that is stored; of an object each version.

        The name is a path relative to `path`, a Redis key in hexadecimal digits, or the object's. Directories and
        delete markers have no bytes.
        """
        for server in self.masters:
            for raw in server.keys("*"):
                yield raw.hex(), raw, server.get(raw)
        for path in sorted(self.folder.glob("kv*/**/*")):
            yield os.path.relpath(path, self.path), path.name.encode(), path.read_bytes() if path.is_file() else None
        if self.kind in _SMALL:
            for target, data in list(self.small_s3.objects.items()):
                yield target, target.encode(), data
        if self._type != "s3":
            return
        with closing(self.s3.client()) as client:
            for page in client.get_paginator("list_object_versions").paginate(Bucket=self.bucket):
                for found in page.get("DeleteMarkers", ()):
                    yield found["Key"], found["Key"].encode(), None
                for found in page.get("Versions", ()):
                    name, version = found["Key"], found["VersionId"]
                    body = client.get_object(Bucket=self.bucket, Key=name, VersionId=version)["Body"].read()
                    yield name, name.encode(), body

    def holds(self, marker: bytes) -> list[str]:
        """Return the names of entries with `marker` in their bytes or name."""
        return self.hold(marker)[0]

    def hold(self, *markers: bytes) -> list[list[str]]:
        """Return the same for each marker, from one pass over everything."""
        found: list[list[str]] = [[] for _ in markers]
        for name, raw, data in self.everything():
            for names, marker in zip(found, markers, strict=True):
                if marker in raw or marker in (data or b""):
                    names.append(name)
        return found

    def stored(self) -> dict[str, bytes]:
        """Return the stored bytes by name, without files that belong to running processes."""
        found = {name: data for name, _, data in self.everything() if data is not None}
        return {name: data for name, data in found.items() if not any(each in f"/{name}" for each in _OF_PROCESSES)}

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """Put back what `stored` returned."""
        client = self.s3.client() if self._type == "s3" else None
        for name, data in stored.items():
            if client is not None:
                client.put_object(Bucket=self.bucket, Key=name, Body=data)
            elif self.kind == "redis":
                self.masters[0].set(bytes.fromhex(name), data)
            elif self.kind in _SMALL:
                self.small_s3.objects[name] = data
            else:
                path = self.path / name
                for parent in reversed(path.relative_to(self.folder).parents[:-1]):
                    (self.folder / parent).mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o600)
        if client is not None:
            client.close()

    @property
    def _patient(self) -> dict[str, object]:
        return {"lookup_timeout": "60s", "job_timeout": "60s", **_PATIENT.get(self._type, {})}


def _put_into(objects: dict[str, bytes]) -> Callable[[str, bytes | None], object]:
    return lambda name, data: objects.pop(name) if data is None else objects.update({name: data})


PlaceOf = Callable[[str], Place]
"""Returns new storage of a kind."""


@pytest.fixture
def place_of(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PlaceOf]:
    """Return new storage by its kind; its tiers are closed with the test."""
    with ExitStack() as ending:
        yield lambda kind: Place(kind, tmp_path, request.getfixturevalue, ending)
