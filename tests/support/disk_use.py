"""The size of directories on disk, and the files in directories of fs and nvme tiers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from pathlib import Path
from typing import Any

from tiered_kv_fs.names import BLOCK
from tiered_kv_nvme.layout import PAGE_BYTES

_STRIDE_BYTES = 128
"""Less than any payload of the tests, compressed ones included."""


def occupied_bytes(directory: Path) -> int:
    """Return the size of a directory on disk, as `du` counts it; 0 if it is missing.

    Entries may come and go meanwhile. A file that is renamed during the walk may be met twice, so inodes are counted.
    """
    found: dict[int, int] = {}
    for root, _, names in os.walk(directory):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(f"{root}/{name}")
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def fs_blocks(directory: Path) -> list[Path]:
    return sorted(entry for entry in directory.rglob("*") if BLOCK.fullmatch(entry.name) and entry.is_file())


def damage_files(directory: Path) -> None:
    """Flip bits in place: of each fs block the last byte, and each stretch of nvme's segments behind their headers."""
    for path in fs_blocks(directory):
        _write_over(path, (data := path.read_bytes())[:-1] + bytes([data[-1] ^ 0x01]))
    for path in directory.rglob("segment-*.kv"):
        changed = bytearray(path.read_bytes())
        for at in range(PAGE_BYTES, len(changed), _STRIDE_BYTES):
            changed[at] ^= any(changed[at : at + _STRIDE_BYTES])
        _write_over(path, bytes(changed))


def _write_over(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:  # which a tier has open
        file.write(data)


def fs_ledger(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / "ledger").read_bytes())
    return state


def flush_file_system(path: Path) -> None:
    """Flush the file system of `path` to its device, removals too: syncfs(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
    finally:
        os.close(fd)
