"""Stacks of two tenants on one kind of storage, every byte of which can be looked at: for what must not be left there.

    storage = DirectoryStorage(tmp_path, "fs")
    tenant = Tenant("alice", storage)
    tenant.store(64)
    assert storage.holds(tenant.marker)

A tenant's blocks begin with its marker, again and again, so that any piece of one that is left anywhere is found.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.config.stack_config import load_config
from tiered_kv.counters import count_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.testing.s3_servers import S3Server

BLOCK_BYTES = 4096
MARKER_BYTES = 32
WAIT_S = 120.0
"""For stores to end, and for a block to come: it ends what hangs."""
_PATIENT = {"job_timeout": "60s", "lookup_timeout": "60s"}
"""A lookup that is a miss, or a store that is given up, because the machine is busy would look like a block that was
removed. Servers that are there answer; those that are not refuse at once."""
_HASH_AS_TEXT = "return table.concat(redis.call('HGETALL', KEYS[1]), ' ')"


class Storage(ABC):
    """Where blocks are kept, as seen by who can read all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def entry(self, tenant: str) -> dict[str, object]:
        """Return the YAML entry of the tier, as this tenant's stacks have it."""

    @abstractmethod
    def everything(self) -> Iterator[tuple[str, bytes]]:
        """Yield a name for, and the bytes of, everything that is there, names of things included."""

    def holds(self, marker: bytes) -> list[str]:
        """Return the names of what has `marker` in it."""
        return self.hold(marker)[0]

    def hold(self, *markers: bytes) -> list[list[str]]:
        """Return for each marker what has it in it, as of one look at everything."""
        found: list[list[str]] = [[] for _ in markers]
        for name, data in self.everything():
            for names, marker in zip(found, markers, strict=True):
                if marker in data:
                    names.append(name)
        return found


MakeStorage = Callable[[str], Storage]


class UnseenStorage(Storage):
    """Where nothing can be looked at, such as a server that lies."""

    def __init__(self, folder: Path, entry: Mapping[str, object]) -> None:
        super().__init__(folder)
        self._entry = entry

    def entry(self, tenant: str) -> dict[str, object]:
        return dict(self._entry)

    def everything(self) -> Iterator[tuple[str, bytes]]:
        yield from ()


class DirectoryStorage(Storage):
    """A directory: of fs one that tenants share, of nvme one for each, as it must be."""

    def __init__(self, folder: Path, tier_type: str) -> None:
        super().__init__(folder)
        self._type = tier_type

    def path(self, tenant: str) -> Path:
        """Return a tenant's directory."""
        return self.folder / ("kv" if self._type == "fs" else f"kv-{re.sub(r'[^a-z]', '_', tenant)[:64]}")

    def entry(self, tenant: str) -> dict[str, object]:
        return {"type": self._type, "path": str(self.path(tenant)), "capacity": "64MiB", **_PATIENT}

    def everything(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self.folder.glob("kv*/**/*")):
            yield str(path), path.name.encode()
            if path.is_file():
                yield str(path), path.read_bytes()


class RedisStorage(Storage):
    """Redis servers: one, or the masters of a cluster."""

    def __init__(self, folder: Path, servers: Sequence[RedisServer], **settings: object) -> None:
        super().__init__(folder)
        self.servers = servers
        self._settings = settings

    def entry(self, tenant: str) -> dict[str, object]:
        return {"type": "redis", **_PATIENT, "connect_timeout": "30s", **self._settings}

    def everything(self) -> Iterator[tuple[str, bytes]]:
        for server in self.servers:
            for name in server.keys("*"):
                is_text = server.call("TYPE", name) == b"+string\r\n"
                yield repr(name), name
                yield repr(name), server.get(name) if is_text else server.call("EVAL", _HASH_AS_TEXT, "1", name)


class BucketStorage(Storage):
    """A bucket, with all the versions that it keeps."""

    def __init__(self, folder: Path, server: S3Server, bucket: str, **settings: object) -> None:
        super().__init__(folder)
        self.server = server
        self.bucket = bucket
        self._settings = settings

    def entry(self, tenant: str) -> dict[str, object]:
        return self.server.settings(self.bucket, **{**_PATIENT, "request_timeout": "30s", **self._settings})

    def everything(self) -> Iterator[tuple[str, bytes]]:
        client = self.server.client()
        try:
            for page in client.get_paginator("list_object_versions").paginate(Bucket=self.bucket):
                for found in page.get("DeleteMarkers", ()):
                    yield f"mark of {found['Key']}", found["Key"].encode()
                for found in page.get("Versions", ()):
                    name, version = found["Key"], found["VersionId"]
                    body = client.get_object(Bucket=self.bucket, Key=name, VersionId=version)["Body"].read()
                    yield f"{name} {version}", name.encode() + b"\n" + body
        finally:
            client.close()


class Stored:
    """What a tenant stores: blocks that can be told from everybody else's, and moved in and out of stacks."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.marker = hashlib.sha256(tenant.encode()).hexdigest()[:MARKER_BYTES].encode()

    def keys(self, count: int, first: int = 0) -> list[OffloadKey]:
        """Return keys of blocks; tenants have the same ones."""
        return [make_offload_key(hashlib.sha256(b"%d" % number).digest(), 0) for number in range(first, first + count)]

    def content(self, key: OffloadKey) -> bytes:
        """Return a block's bytes: the marker and a digest of the key, in turns."""
        line = self.marker + hashlib.sha256(self.marker + key).hexdigest().encode()
        return (line * (BLOCK_BYTES // len(line) + 1))[:BLOCK_BYTES]

    def put(self, stack: Stack, keys: Sequence[OffloadKey]) -> int:
        """Store blocks; return how many came to the tier."""
        blocks = np.frombuffer(b"".join(map(self.content, keys)), np.uint8).reshape(len(keys), BLOCK_BYTES)
        name = stack.tier_names[0]
        before = count_of(stack.counters(), name, "stored_blocks_total")
        stack.put(keys, blocks, timeout=WAIT_S)
        assert stack.flush(WAIT_S), "the stores do not end"
        return count_of(stack.counters(), name, "stored_blocks_total") - before

    def wrong(self, stack: Stack, keys: Sequence[OffloadKey]) -> tuple[int, int]:
        """Load blocks one by one; return how many came, and how many of them with wrong bytes."""
        came = wrong = 0
        out = np.zeros((1, BLOCK_BYTES), np.uint8)
        for key in keys:
            if stack.get([key], out, WAIT_S):
                came += 1
                wrong += out.tobytes() != self.content(key)
        return came, wrong


class Tenant(Stored):
    """One tenant's stacks on a storage."""

    def __init__(self, name: str, storage: Storage) -> None:
        super().__init__(name)
        self.storage = storage
        self.file = storage.folder / f"{self.marker.decode()}.yaml"
        config = {
            "version": 1,
            "namespace": {"model": "test", "tenant": name},
            "block": {"bytes": BLOCK_BYTES},
            "primary": {"capacity": 64 * BLOCK_BYTES},
            "secondary": [storage.entry(name)],
        }
        self.file.write_text(yaml.safe_dump(config))
        self.digest = load_config(self.file).identity.digest.hex()

    def store(self, count: int, first: int = 0) -> int:
        """Open a stack, store blocks, close it; return how many came to the tier."""
        with open_stack(self.file) as stack:
            return self.put(stack, self.keys(count, first))

    def load(self, count: int, first: int = 0) -> tuple[int, int]:
        """Open a stack and load blocks, none of which its memory has; return as `wrong`."""
        with open_stack(self.file) as stack:
            return self.wrong(stack, self.keys(count, first))
