"""The list of the hottest blocks of a stack's memory: a file with their keys, from a clean end to the next start.

`WarmStart` writes and reads it, on the thread that closes a stack and on its own one. `docs/reference/formats.md`
describes it. What must stay true: a reader finds a whole list or none. A list of another namespace or block size, one
that is damaged, and one of a newer release is refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from tiered_kv.base import OffloadKey
from tiered_kv.errors import FormatError
from tiered_kv.toolkit.small_files import read_file, replace_file

MAGIC: Final = b"\x89TKVHOT\n"
FORMAT_VERSION: Final = 1
KEYS_MAX: Final = 1 << 20
KEY_BYTES_MAX: Final = 1024  # a block with a longer key is left out
FILE_BYTES_MAX: Final = 64 << 20
_HEAD: Final = struct.Struct("<8sHHIQ16s16s")  # magic, version, reserved, keys, block bytes, namespace, checksum
_CHECKSUM_OFFSET: Final = _HEAD.size - 16
_LENGTH: Final = struct.Struct("<H")


def write_list(path: Path, digest: bytes, block_bytes: int, keys: Sequence[OffloadKey]) -> int:
    """Write the first keys, the hottest first, in place of an older list; return how many fitted.

    Raises:
        OSError: The file cannot be written; an older list is whole.
    """
    parts: list[bytes] = []
    left_bytes = FILE_BYTES_MAX - _HEAD.size
    for key in keys[:KEYS_MAX]:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            continue
        left_bytes -= _LENGTH.size + len(key)
        if left_bytes < 0:
            break
        parts += _LENGTH.pack(len(key)), key
    body, count = b"".join(parts), len(parts) // 2
    head = _HEAD.pack(MAGIC, FORMAT_VERSION, 0, count, block_bytes, digest, bytes(16))[:_CHECKSUM_OFFSET]
    replace_file(os.fspath(path), head + xxhash.xxh3_128_digest(head + body) + body, flush=True)
    return count


def is_list(path: Path) -> bool:
    """Return whether a file begins as a list does.

    Raises:
        OSError: It cannot be read.
    """
    return (read_file(os.fspath(path), FILE_BYTES_MAX) or b"").startswith(MAGIC)


def read_list(path: Path, digest: bytes, block_bytes: int) -> list[OffloadKey]:
    """Return the keys of a list, the hottest first; none if there is no file.

    Raises:
        FormatError: It is no list of this namespace, or is damaged.
        OSError: It cannot be read.
    """
    if not os.path.lexists(path):
        return []
    data = read_file(os.fspath(path), FILE_BYTES_MAX)
    if data is None or len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise _refusal(path, "it is no list of blocks")
    _, version, reserved, count, bytes_of_block, namespace, checksum = _HEAD.unpack_from(data)
    if version != FORMAT_VERSION or reserved:
        raise _refusal(path, f"it has format version {version}, and this release reads {FORMAT_VERSION}")
    body = memoryview(data)[_HEAD.size :]
    if xxhash.xxh3_128_digest(data[:_CHECKSUM_OFFSET] + body) != checksum:
        raise _refusal(path, "it is damaged")
    if namespace != digest or bytes_of_block != block_bytes:
        raise _refusal(path, "it is of another namespace")
    keys: list[OffloadKey] = []
    offset = 0
    for _ in range(count):
        if offset + _LENGTH.size > len(body):
            raise _refusal(path, "it is damaged")
        (length,) = _LENGTH.unpack_from(body, offset)
        offset += _LENGTH.size + length
        keys.append(OffloadKey(bytes(body[offset - length : offset])))
    if offset != len(body) or len(keys) > KEYS_MAX or not all(keys):
        raise _refusal(path, "it is damaged")
    return list(dict.fromkeys(keys))


def _refusal(path: Path, why: str) -> FormatError:
    return FormatError(f"{path}: {why}", operation="warm start")
