"""What a directory occupies on its disk, and what of it is there; and what the objects in a bucket come to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiered_kv_fs.layout import BLOCK


def occupied_bytes(directory: Path) -> int:
    """Return what a directory occupies with everything in it, as `du` counts it; 0 if it is not there.

    Entries may come and go meanwhile. One that is renamed while it is counted may be met under either name, or both, so
    files are told apart by their inode.
    """
    return sum(entry.size_bytes for entry in _entries_in(directory).values())


def fs_blocks(directory: Path) -> list[Path]:
    """Return the files of blocks in an fs tier's directory."""
    return sorted(entry for entry in directory.rglob("*") if BLOCK.fullmatch(entry.name) and entry.is_file())


def occupied_beyond(directory: Path, limit_bytes: int) -> int:
    """Return what a directory occupied, at least, at some moment of this call, if that is beyond a limit; 0 otherwise.

    What is removed while others are counted may be counted with what took its place. So where a count is beyond the
    limit, there is a second one, and only that is taken which was there both times: all of it was there in between, but
    for a file that was removed and made again under its name and inode.

    Args:
        directory: Where to look, however deep.
        limit_bytes: What it may occupy.
    """
    before = _entries_in(directory)
    if sum(entry.size_bytes for entry in before.values()) <= limit_bytes:
        return 0
    after = _entries_in(directory)
    both = [(before[inode], after[inode]) for inode in before.keys() & after.keys()]
    used_bytes = sum(min(first.size_bytes, second.size_bytes) for first, second in both if first.is_same(second))
    return used_bytes if used_bytes > limit_bytes else 0


@dataclass(frozen=True, slots=True)
class _Entry:
    path: str
    changed_ns: int
    size_bytes: int

    def is_same(self, other: _Entry) -> bool:
        """Return whether two entries with one inode are one file; a removed one's inode is given to a new one."""
        return self.path == other.path or self.changed_ns == other.changed_ns  # written to, or renamed


def _entries_in(directory: Path) -> dict[int, _Entry]:
    """Return each entry by its inode."""
    found: dict[int, _Entry] = {}
    for root, _, names in os.walk(directory):
        for name in (".", *names):
            path = f"{root}/{name}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            found[status.st_ino] = _Entry(path, status.st_mtime_ns, status.st_blocks * 512)
    return found


def bucket_bytes(entry: Mapping[str, object], prefix: str) -> int:
    """Return what the objects under a prefix come to, in the bucket and with the keys of an s3 tier's YAML entry."""
    import boto3

    client = boto3.session.Session().client(
        "s3",
        endpoint_url=entry["endpoint_url"],
        region_name=entry["region"],
        aws_access_key_id=entry["access_key_id"],
        aws_secret_access_key=entry["secret_access_key"],
    )
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=entry["bucket"], Prefix=prefix)
        return sum(item["Size"] for page in pages for item in page.get("Contents", ()))
    finally:
        client.close()


def flush_file_system(path: Path) -> None:
    """Have all that was written to the file system of `path`, removals too, put on its device: syncfs(2).

    Raises:
        OSError: It could not be.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
    finally:
        os.close(fd)
