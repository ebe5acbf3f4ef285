"""An archive: blocks of one namespace in one file, as records. `docs/reference/formats.md` describes it.

`tiered-kv export` writes one through an `ArchiveTarget`, and `import` reads it through an `ArchiveSource`, each on one
thread. These things stay true:

- A file gets its name when it is complete and flushed. Whoever reads it finds a whole archive, or none.
- What is read is hostile until its checksum is verified. A damaged head, manifest or table refuses the file; a damaged
  record is passed over.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
import struct
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.copying.target import JOB_BLOCKS_MAX, JOB_BYTES, Record, Row
from tiered_kv.errors import FormatError, TierUnavailableError
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.toolkit.administration import StoredBlock, matching_description
from tiered_kv.toolkit.record import check_record, record_bytes_max
from tiered_kv.toolkit.small_files import fields_of, opened, put_in_place, read_all, remove, words_of, write_all

MAGIC: Final = b"\x89TKVARC\n"
FORMAT_VERSION: Final = 1
HEAD_BYTES: Final = 128
# magic, version, reserved, manifest bytes, blocks, table offset and bytes, block bytes, namespace, checksums, reserved
_HEAD: Final = struct.Struct("<8sHHIQQQQ16s16s16s32s")
_CHECKSUM_OFFSET: Final = 80  # of the head and the manifest
_NONE: Final = bytes(16)
_ENTRY: Final = struct.Struct("<QIH")
_COLUMNS: Final = np.dtype([("offset", "<u8"), ("record", "<u4"), ("key", "<u2")])
_MANIFEST_BYTES_MAX: Final = 1 << 20
_TABLE_BYTES_MAX: Final = 4 << 30
_BLOCK_BYTES_MAX: Final = 256 << 20
KEY_BYTES_MAX: Final = 1024
_LISTED: Final = 256  # blocks of one batch
assert _HEAD.size == HEAD_BYTES

checksum = xxhash.xxh3_128_digest


class ArchiveTarget:
    """A new archive, as the target of a copy. Use it as a context manager: without `finish` no file is left.

    Raises:
        TierUnavailableError: The file cannot be written.
    """

    def __init__(self, path: Path, namespace_digest: bytes, described: Mapping[str, object], block_bytes: int) -> None:
        self.stored = self.stored_bytes = 0
        self.refused: Counter[str] = Counter()
        self._path = path
        self._temporary = str(path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp"))
        self._digest, self._block_bytes = namespace_digest, block_bytes
        self._manifest = json.dumps({"namespace": dict(described)}, sort_keys=True, default=str).encode()
        self._row_bytes = record_bytes_max(block_bytes)
        self.job_blocks = max(1, min(JOB_BLOCKS_MAX, JOB_BYTES // self._row_bytes))
        self._memory = memoryview(mmap.mmap(-1, self.job_blocks * self._row_bytes))
        self._keys: dict[OffloadKey, None] = {}
        self._offsets, self._sizes = array("Q"), array("I")
        self._offset = HEAD_BYTES + len(self._manifest)

    def __enter__(self) -> Self:
        self._file = opened(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._fd = self._file.__enter__()
        except OSError as error:
            raise self._unavailable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.__exit__(None, None, None)
        remove(self._temporary)

    def has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [key in self._keys for key in keys]

    def rows(self, count: int) -> list[Row]:
        return [Row(at, self._memory[at * self._row_bytes :][: self._row_bytes]) for at in range(count)]

    def store(self, records: Sequence[Record]) -> None:
        pieces = [each.row.memory[: each.size_bytes] for each in records]
        try:
            write_all(self._fd, pieces, self._offset)
        except OSError as error:
            raise self._unavailable(error) from error
        for each in records:
            self._keys[each.key] = None
            self._offsets.append(self._offset)
            self._sizes.append(each.size_bytes)
            self._offset += each.size_bytes
        self.stored += len(records)
        self.stored_bytes = self._offset - HEAD_BYTES - len(self._manifest)

    def drain(self) -> None:
        """Every call of `store` has written its records."""

    def finish(self) -> None:
        """Write the table and the head, flush the file, and give it its name."""
        entries = map(_ENTRY.pack, self._offsets, self._sizes, map(len, self._keys))
        table = b"".join((*entries, *self._keys))
        head = _head(self._manifest, self.stored, self._offset, table, self._block_bytes, self._digest)
        try:
            write_all(self._fd, [table], self._offset)
            write_all(self._fd, [head, self._manifest])
            os.fsync(self._fd)
            put_in_place(self._temporary, str(self._path))
            with opened(str(self._path.parent), os.O_RDONLY | os.O_DIRECTORY) as directory:
                os.fsync(directory)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> TierUnavailableError:
        return TierUnavailableError(f"{self._path} cannot be written: {words_of(error)}", operation="export")


class Head(NamedTuple):
    """The fields of an archive's head."""

    manifest_bytes: int
    blocks: int
    table_offset: int
    table_bytes: int
    block_bytes: int
    digest: bytes
    table_checksum: bytes
    checksum: bytes


class ArchiveSource:
    """An archive as the source of a copy. Close it.

    Attributes:
        digest: Of its namespace, in hexadecimal.
        described: The readable form of the namespace.
        block_bytes: Bytes of a block.

    Raises:
        FormatError: The file is no archive, is cut off or damaged, or a newer release wrote it.
        TierUnavailableError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = opened(str(path), os.O_RDONLY)
            self._fd = self._file.__enter__()
            try:
                self._read()
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise TierUnavailableError(f"{path} cannot be read: {words_of(error)}", operation="import") from error

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        for start in range(0, len(self._columns), _LISTED):
            part = self._columns[start : start + _LISTED]
            ends = self._key_ends[start : start + _LISTED]
            batch = []
            for (offset, size_bytes, key_bytes), end in zip(part.tolist(), ends.tolist(), strict=True):
                key = OffloadKey(bytes(self._keys[end - key_bytes : end]))
                if keys is None or key in keys:
                    batch.append(StoredBlock(key, size_bytes, None, offset))
            yield batch

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float = math.inf
    ) -> list[RecordStatus | str]:
        return [self._read_one(block, row) for block, row in zip(blocks, rows, strict=True)]

    def _read_one(self, block: StoredBlock, row: memoryview) -> RecordStatus | str:
        size_bytes = block.size_bytes or 0
        if size_bytes > len(row):
            return RecordStatus.BAD_LENGTH
        try:
            read_bytes = read_all(self._fd, [row[:size_bytes]], block.where)
        except OSError as error:
            return RecordStatus.BAD_PLACE if error.errno == errno.EIO else Reason.IO_ERROR
        return check_record(row, read_bytes, block.key, bytes.fromhex(self.digest))

    def _read(self) -> None:
        """Read and verify all but the records."""
        size_bytes = os.fstat(self._fd).st_size
        data = os.pread(self._fd, HEAD_BYTES, 0)
        magic, version, reserved, *fields, reserved_tail = _HEAD.unpack(data.ljust(HEAD_BYTES, b"\0"))
        if magic != MAGIC:
            raise self._wrong("it is no archive of `tiered-kv export`")
        if version != FORMAT_VERSION:
            raise self._wrong(f"it has format version {version}, and this release reads {FORMAT_VERSION}")
        head = Head(*fields)
        end = head.table_offset + head.table_bytes
        if head.manifest_bytes > _MANIFEST_BYTES_MAX or reserved or any(reserved_tail):
            raise self._wrong("its head is damaged")
        manifest = os.pread(self._fd, head.manifest_bytes, HEAD_BYTES)
        unsigned = data[:_CHECKSUM_OFFSET] + _NONE + data[_CHECKSUM_OFFSET + len(_NONE) :]
        if checksum(unsigned + manifest) != head.checksum or not 0 < head.block_bytes <= _BLOCK_BYTES_MAX:
            raise self._wrong("its head is damaged, or it is cut off")
        if end != size_bytes or head.table_bytes > _TABLE_BYTES_MAX:
            raise self._wrong(f"it has {size_bytes} bytes in place of {end}: it is cut off, or something was added")
        table = memoryview(bytearray(head.table_bytes))
        if read_all(self._fd, [table], head.table_offset) != len(table) or checksum(table) != head.table_checksum:
            raise self._wrong("its table is damaged")
        self.digest, self.block_bytes = head.digest.hex(), head.block_bytes
        self.described = dict(matching_description(fields_of(manifest).get("namespace"), self.digest))
        self._use(table, head)

    def _use(self, table: memoryview, head: Head) -> None:
        """Take the table, whose checksum is right. No entry may lead out of the records, and no key out of the keys."""
        entries_bytes = head.blocks * _ENTRY.size
        if not 0 < entries_bytes <= len(table):
            raise self._wrong("it has no blocks" if not head.blocks else "its table is too short")
        self._columns = np.frombuffer(table, _COLUMNS, head.blocks)
        self._keys = table[entries_bytes:]
        self._key_ends = np.cumsum(self._columns["key"], dtype=np.int64)
        offsets, keys = self._columns["offset"], self._columns["key"]
        if (
            not 0 < keys.min() <= keys.max() <= KEY_BYTES_MAX
            or self._key_ends[-1] != len(self._keys)
            or offsets.max() >= head.table_offset
            or self._columns["record"].max() > record_bytes_max(head.block_bytes)
        ):
            raise self._wrong("its table leads out of it")

    def _wrong(self, why: str) -> FormatError:
        return FormatError(f"{self._path} cannot be imported: {why}", operation="import")


def _head(
    manifest: bytes, blocks: int, table_offset: int, table: bytes, block_bytes: int, namespace_digest: bytes
) -> bytes:
    fields = (len(manifest), blocks, table_offset, len(table), block_bytes, namespace_digest, checksum(table))
    unsigned = _HEAD.pack(MAGIC, FORMAT_VERSION, 0, *fields, _NONE, bytes(32))
    return unsigned[:_CHECKSUM_OFFSET] + checksum(unsigned + manifest) + unsigned[_CHECKSUM_OFFSET + len(_NONE) :]
