"""What a directory occupies on its disk, and what of it is there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from pathlib import Path
from typing import Any

from tiered_kv_fs.layout import BLOCK


def occupied_bytes(directory: Path) -> int:
    """Return what a directory occupies with everything in it, as `du` counts it; 0 if it is not there.

    Entries may come and go meanwhile. One that is renamed while it is counted may be met under either name, or both, so
    files are told apart by their inode.
    """
    found: dict[int, int] = {}
    for root, _, names in os.walk(directory):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(f"{root}/{name}")
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def fs_blocks(directory: Path) -> list[Path]:
    """Return the files of blocks in an fs tier's directory."""
    return sorted(entry for entry in directory.rglob("*") if BLOCK.fullmatch(entry.name) and entry.is_file())


def fs_ledger(directory: Path) -> dict[str, Any]:
    """Return what the ledger of an fs tier's directory says; it is replaced as a whole when it is written."""
    state: dict[str, Any] = json.loads((directory / "ledger").read_bytes())
    return state


def flush_file_system(path: Path) -> None:
    """Have all that was written to the file system of `path`, removals too, put on its device: syncfs(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
    finally:
        os.close(fd)
