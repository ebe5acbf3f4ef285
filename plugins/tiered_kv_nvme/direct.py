"""Direct I/O: whether transfers of segments bypass the page cache. The kernel reports it, and a test file shows it.

The store calls `probe_direct` once, on the thread that opens its directory. `tiered-kv check` shows the result. It
removes its test file. A full disk is no reason to refuse the opening.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from tiered_kv.errors import remedy_of
from tiered_kv.system.file_systems import Mount, direct_alignment, is_cached, is_full, is_written_in_place
from tiered_kv.toolkit.codecs import ThreadBuffer
from tiered_kv.toolkit.small_files import opened, read_all, remove, write_all
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.layout import PAGE_BYTES

PROBE_NAME: Final = "probe.tmp"

_BTRFS_BUFFERS: Final = (6, 15)
"""The first release of Linux whose btrfs buffers direct writes of files with checksums."""


class DirectIO(NamedTuple):
    is_used: bool  # whether segments are opened with O_DIRECT
    refusal: str | None = None  # why transfers use a page cache nevertheless; None if they do not

    @property
    def shown(self) -> str:
        return f"no: {self.refusal}" if self.refusal else "yes"


def probe_direct(disk: Disk, directory_fd: int, mount: Mount | None, existing: str) -> DirectIO:
    """Find out whether the file system takes O_DIRECT, and obeys it. On a full disk, try the file `existing` instead.

    Raises `OSError`: the system gave no descriptor or memory.
    """
    try:
        try:
            with opened(PROBE_NAME, os.O_RDWR | os.O_CREAT | os.O_DIRECT, dir_fd=directory_fd) as fd:
                return _refused(fd) or _probe(disk, fd, mount)
        except OSError as error:
            if not is_full(error):
                raise
        try:
            with opened(existing, os.O_RDONLY | os.O_DIRECT, dir_fd=directory_fd) as fd:
                return _refused(fd) or DirectIO(True)
        except FileNotFoundError:
            return DirectIO(True)  # nearly every disk takes it
    except OSError as error:
        if remedy_of(error):  # a lack of descriptors or memory says nothing of direct I/O
            raise
        return DirectIO(False, f"a test write with O_DIRECT failed ({error.strerror})")
    finally:
        remove(PROBE_NAME, dir_fd=directory_fd)  # if the file stays, the next opening removes it or fails


def _refused(fd: int) -> DirectIO | None:
    """Return the file system's objection to direct transfers of pages; None if it has none."""
    alignment = direct_alignment(fd)
    if alignment is None:
        return None
    if not alignment.offset_bytes:
        return DirectIO(False, "the file system buffers all transfers of these files (statx: no direct I/O)")
    if max(alignment) > PAGE_BYTES:
        return DirectIO(False, f"the device takes multiples of {max(alignment)} bytes only (statx)")
    return None


def _probe(disk: Disk, fd: int, mount: Mount | None) -> DirectIO:
    page = ThreadBuffer().take(PAGE_BYTES)
    write_all(fd, [page], 0, pwritev=disk.pwritev)
    if is_cached(fd):
        return DirectIO(False, "a page written with O_DIRECT is in the page cache")
    if read_all(fd, [page], 0, preadv=disk.preadv) != PAGE_BYTES:
        return DirectIO(False, "a page written with O_DIRECT cannot be read back")
    return DirectIO(True, _buffering(fd, mount) if mount is not None else None)


def _buffering(fd: int, mount: Mount) -> str | None:
    """Return why the system buffers transfers although no test above shows it; None if it does not.

    O_DIRECT still helps: reads are direct, or the pages are cached once and not twice.
    """
    if mount.kind.startswith("fuse") and _takes_any_size(fd):
        return "the program of this FUSE file system does not pass O_DIRECT on: it takes writes of any size"
    if (
        mount.kind == "btrfs"
        and not mount.options & {"nodatasum", "nodatacow"}
        and not is_written_in_place(fd)
        and _kernel_release() >= _BTRFS_BUFFERS
    ):
        return "btrfs buffers writes of files with checksums since Linux 6.15; reads are direct"
    return None


def _takes_any_size(fd: int) -> bool:
    try:
        return os.pwrite(fd, b"any", 1) == len(b"any")
    except OSError:
        return False


def _kernel_release() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdecimal())
