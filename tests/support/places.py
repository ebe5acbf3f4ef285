"""Storage of a test's own for a tier of any built-in type, and the door to what the tier stores there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.doors import Door, FsDoor, MemoryDoor, RedisDoor, S3Door
from tiered_kv.testing.rig import Content, TierRig, block_content
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.keyed_names import KeyedNames

STORED = ("nvme", "fs", "redis", "s3")
"""Tiers whose blocks outlive them."""
PATIENT = {"lookup_timeout": "60s", "job_timeout": "60s"}
"""A lookup that is a miss because the machine is busy would look like a block that is damaged or lost."""
_WAIT_S = 60.0
_OF_PROCESSES = ("/lock", "/sweep", "/owners/", "/grants/", "/ledger")


class Place:
    """New storage for tiers of one type.

    Args:
        kind: The type.
        folder: For directories.
        server: Returns a running server by the name of its fixture, `redis_server` or `moto_server`.
        closing: Ends what is opened here.
    """

    def __init__(self, kind: str, folder: Path, server: Callable[[str], Any], closing: ExitStack) -> None:
        self.kind = kind
        self.path = folder / f"kv-{kind}"
        self.entry: dict[str, object] = {"type": kind, **PATIENT}
        """Of the tier; changes hold when it is opened the next time."""
        self._closing = closing
        match kind:
            case "memory":
                self.entry |= {"capacity": "64MiB"}
            case "nvme":
                self.entry |= {"path": str(self.path), "capacity": "64MiB", "segment": "1MiB"}
            case "fs":
                self.entry |= {"path": str(self.path), "capacity": "64MiB"}
            case "redis":
                pytest.importorskip("redis", reason="redis-py is not installed")
                self._redis = server("redis_server")
                self.entry |= {"url": self._redis.url, "connect_timeout": "60s", "timeout": "60s"}
            case "s3":
                pytest.importorskip("boto3", reason="boto3 is not installed")
                self._s3 = server("moto_server")
                self._bucket = self._s3.make_bucket()
                more = {"prefix": "kv", "presence_ttl": 0, "connections": 8, "request_timeout": "30s"}
                self.entry |= self._s3.settings(self._bucket, **more)

    def open(
        self,
        spec: TierSpec,
        content: Content = block_content,
        *,
        num_blocks: int = 512,
        name_key: bytes | None = None,
        **settings: object,
    ) -> TierRig:
        """Open a tier on a rig; settings come on top of the entry, and `name_key` has it store under keyed names."""

        def open_tier(spec: TierSpec, view: memoryview) -> SecondaryTierManager:
            tier = SecondaryTierFactory.create(spec, view, {**self.entry, **settings})
            return tier if name_key is None else KeyedNames(tier, name_key)

        rig = TierRig(
            open_tier,
            num_blocks=num_blocks,
            block_bytes=spec.block_bytes,
            wait_s=_WAIT_S,
            spec=spec,
            content=content,
        )
        self._closing.callback(rig.close)
        return rig

    def door(self, rig: TierRig) -> Door:
        """Return the way to the stored bytes of a rig's tier; nvme has none but its files."""
        digest = rig.spec.namespace_digest
        match self.kind:
            case "memory":
                return MemoryDoor(rig)
            case "fs":
                return FsDoor(self.path, digest)
            case "redis":
                return RedisDoor(self._redis, digest)
            case _:
                door = S3Door(self._s3, self._bucket, "kv", digest)
                self._closing.callback(door.close)
                return door

    def stored(self, rig: TierRig) -> dict[str, bytes]:
        """Return what the storage holds, by name, but for what belongs to processes."""
        door = None if self.kind == "nvme" else self.door(rig)
        if isinstance(door, RedisDoor | S3Door):
            found: Mapping[str, bytes] = door.everything()
        else:
            files = [path for path in self.path.rglob("*") if path.is_file()]
            found = {str(path.relative_to(self.path)): path.read_bytes() for path in files}
        return {name: data for name, data in found.items() if not any(each in f"/{name}" for each in _OF_PROCESSES)}

    def restore(self, stored: Mapping[str, bytes]) -> None:
        """Put into the storage what `stored` returned."""
        client = self._s3.client() if self.kind == "s3" else None
        for name, data in stored.items():
            if client is not None:
                client.put_object(Bucket=self._bucket, Key=name, Body=data)
            elif self.kind == "redis":
                self._redis.set(bytes.fromhex(name), data)
            else:
                path = self.path / name
                for parent in reversed(path.relative_to(self.path.parent).parents[:-1]):
                    (self.path.parent / parent).mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(data)
                path.chmod(0o600)
        if client is not None:
            client.close()
