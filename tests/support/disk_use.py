"""The size of directories on disk, and the files in an fs tier's directory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from pathlib import Path
from typing import Any

from tiered_kv_fs.layout import BLOCK


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
