"""Access to the bytes that a tier has stored under a key, behind the tier's back.

There is a door for each tier of block records; `tests.support.segment_map` reads nvme's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from tests.support.redis_servers import RedisServer
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig
from tiered_kv.testing.s3_servers import S3Server
from tiered_kv.toolkit.epoch import EpochMark
from tiered_kv.toolkit.record import RecordHeader, digest_of, read_header
from tiered_kv_fs.layout import block_path


class Door(Protocol):
    def read(self, key: OffloadKey) -> bytes | None:
        """Return what is stored for a key; None if there is nothing."""

    def write(self, key: OffloadKey, data: bytes) -> None:
        """Replace what is stored for a key that is there, in its place."""


def codec_id_of(record: bytes) -> int:
    header = read_header(record)
    assert isinstance(header, RecordHeader), f"it has no header that can be read: {header.value}"
    return header.codec_id


class MemoryDoor:
    def __init__(self, rig: TierRig) -> None:
        self._rig = rig

    def read(self, key: OffloadKey) -> bytes | None:
        record = self._records.get(key)
        return None if record is None else bytes(record.data)

    def write(self, key: OffloadKey, data: bytes) -> None:
        self._records[key].data = bytearray(data)

    @property
    def _records(self) -> Any:  # Any: the tier's own class of records
        return self._rig.tier._records  # type: ignore[attr-defined]  # reaching in is the point


class FsDoor:
    def __init__(self, directory: Path, namespace_digest: bytes) -> None:
        self._directory = directory
        self._digest = namespace_digest

    def read(self, key: OffloadKey) -> bytes | None:
        path = self.path_of(key)
        return None if path is None else path.read_bytes()

    def write(self, key: OffloadKey, data: bytes) -> None:
        path = self.path_of(key)
        assert path is not None, "there is no such block"
        path.write_bytes(data)

    def path_of(self, key: OffloadKey) -> Path | None:
        """Return a block's file in the namespace's present epoch; None if it is missing."""
        namespace = self._directory / self._digest.hex()
        mark = EpochMark.decode((namespace / "epoch").read_bytes())
        assert mark is not None, "the epoch's mark is damaged"
        path = namespace / mark.value / block_path(key, self._digest)
        return path if path.exists() else None


class RedisDoor:
    def __init__(self, server: RedisServer, namespace_digest: bytes) -> None:
        self._server = server
        self._prefix = b"tkv1:" + namespace_digest.hex().encode() + b":"

    def read(self, key: OffloadKey) -> bytes | None:
        name = self.name_of(key)
        return self._server.get(name) if self._server.call("EXISTS", name) == b":1\r\n" else None

    def write(self, key: OffloadKey, data: bytes) -> None:
        self._server.set(self.name_of(key), data)

    def name_of(self, key: OffloadKey) -> bytes:
        """Return a block's name in the present epoch."""
        mark = EpochMark.decode(self._server.get(self._prefix + b"epoch"))
        assert mark is not None, "the epoch's mark is damaged"
        return self._prefix + mark.value.encode() + b":" + key


class S3Door:
    def __init__(self, server: S3Server, bucket: str, prefix: str, namespace_digest: bytes) -> None:
        self._client = server.client()
        self._bucket = bucket
        self._root = f"{prefix}/{namespace_digest.hex()}"

    def close(self) -> None:
        self._client.close()

    def read(self, key: OffloadKey) -> bytes | None:
        return self._get(self.name_of(key))

    def write(self, key: OffloadKey, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self.name_of(key), Body=data)

    def name_of(self, key: OffloadKey) -> str:
        mark = EpochMark.decode(self._get(f"{self._root}/epoch") or b"")
        assert mark is not None, "nothing has used the bucket yet"
        digest = digest_of(key).hex()
        return f"{self._root}/blocks/{mark.value}/{digest[:2]}/{digest}"

    def _get(self, name: str) -> bytes | None:
        try:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()
        except self._client.exceptions.NoSuchKey:
            return None
        return body
