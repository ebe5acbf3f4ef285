"""Access to the bytes that a tier has stored, behind the tier's back: blocks, and the mark of the epoch.

There is a door for each tier of block records; `tests.support.segment_map` reads nvme's files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.redis_servers import RedisServer
from tests.support.s3_servers import S3Server
from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import TierRig
from tiered_kv.toolkit.epoch import EpochMark
from tiered_kv.toolkit.record import RecordHeader, digest_of, read_header
from tiered_kv_fs.names import block_path


def codec_id_of(record: bytes) -> int:
    header = read_header(record)
    assert isinstance(header, RecordHeader), f"it has no header that can be read: {header.value}"
    return header.codec_id


class Door:
    """Reads and writes under names, which differ by tier.

    Args:
        get: Returns what is stored under a name; None if there is nothing.
        put: Replaces it; None deletes it.
        mark: The name of the epoch's mark.
        block: Returns the name of a block, from an epoch and a key.
    """

    def __init__(
        self,
        get: Callable[[Any], bytes | None],  # Any: a path, bytes or a text
        put: Callable[[Any, bytes | None], object],
        mark: Any,
        block: Callable[[str, OffloadKey], Any],
    ) -> None:
        self.get, self.put, self._mark, self._block = get, put, mark, block

    def name_of(self, key: OffloadKey) -> Any:
        """Return a block's name in the present epoch."""
        mark = EpochMark.decode(self.read_mark() or b"")
        assert mark is not None, "the epoch's mark is missing or damaged"
        return self._block(mark.value, key)

    def read(self, key: OffloadKey) -> bytes | None:
        return self.get(self.name_of(key))

    def write(self, key: OffloadKey, data: bytes) -> None:
        """Replace a block that is there, in its place."""
        self.put(self.name_of(key), data)

    def read_mark(self) -> bytes | None:
        return self.get(self._mark)

    def write_mark(self, data: bytes | None) -> None:
        self.put(self._mark, data)


class MemoryDoor(Door):
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


def fs_door(directory: Path, digest: bytes) -> Door:
    namespace = directory / digest.hex()
    return Door(
        lambda path: path.read_bytes() if path.exists() else None,
        lambda path, data: path.unlink() if data is None else path.write_bytes(data),
        namespace / "epoch",
        lambda epoch, key: namespace / epoch / block_path(key, digest),
    )


def redis_door(server: RedisServer, digest: bytes) -> Door:
    prefix = b"tkv1:" + digest.hex().encode() + b":"
    return Door(
        lambda name: server.get(name) if server.call("EXISTS", name) == b":1\r\n" else None,
        lambda name, data: server.call("DEL", name) if data is None else server.set(name, data),
        prefix + b"epoch",
        lambda epoch, key: prefix + epoch.encode() + b":" + key,
    )


def bucket_door(get: Callable[[str], bytes | None], put: Callable[[str, bytes | None], object], root: str) -> Door:
    """Return access to the objects of a namespace below `root`."""

    def block(epoch: str, key: OffloadKey) -> str:
        digest = digest_of(key).hex()
        return f"{root}/blocks/{epoch}/{digest[:2]}/{digest}"

    return Door(get, put, f"{root}/epoch", block)


def s3_door(server: S3Server, bucket: str, root: str, closing: Callable[[Callable[[], None]], object]) -> Door:
    client = server.client()
    closing(client.close)

    def get(name: str) -> bytes | None:
        with suppress(client.exceptions.NoSuchKey):
            body: bytes = client.get_object(Bucket=bucket, Key=name)["Body"].read()
            return body
        return None

    return bucket_door(get, lambda name, data: client.put_object(Bucket=bucket, Key=name, Body=data), root)
