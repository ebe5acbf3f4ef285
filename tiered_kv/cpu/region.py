"""The primary tier's memory: one page-aligned mapping that holds every block.

It is the only memory that a GPU copies from and to, and the only memory that secondary tiers read and write, so
it must not move, and must not be unmapped while a transfer may touch it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.geometry import ROWS_OFFSET, Geometry, check_header, write_header
from tiered_kv.errors import ConfigError
from tiered_kv.permissions import FILE_MODE, NotPrivateError, check_file

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")

# mbind(2) has no wrapper in libc; its number is per architecture (Linux's syscall tables).
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_NODES_MAX = 1024


class PrimaryRegion:
    """`num_blocks` rows of `block_bytes`, in private memory or in a file that other processes can map.

    Args:
        num_blocks: Rows, at least 1.
        block_bytes: Bytes of a row, at least 1.
        name: None for private memory; otherwise the name of a file to create in /dev/shm, mode 0600. Call
            `unlink` once every worker has attached, so that a killed process leaves nothing behind.
        huge_pages: Ask the kernel for transparent huge pages; it may decline. A disk then moves blocks up to 1.5
            times as fast, because one request covers megabytes and not a list of single pages.
        prefault: Touch every page now, so that the first stores do not pay for it.
        numa_node: Bind the memory to this node.

    Raises:
        ConfigError: The memory cannot be allocated as requested; the message says what to do.

    Any thread may read the attributes; create and close on one thread.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        name: str | None = None,
        huge_pages: bool = True,
        prefault: bool = False,
        numa_node: int | None = None,
    ) -> None:
        geometry = Geometry(num_blocks, block_bytes)
        size_bytes = geometry.size_bytes
        self.path = None if name is None else _shared_path(name)
        if self.path is None:
            self._adopt(_map_private(size_bytes), num_blocks, block_bytes)
            self._place(huge_pages, numa_node)
        else:
            fd, mapping = _create_shared(self.path, size_bytes)
            try:
                self._adopt(mapping, num_blocks, block_bytes)
                self._place(huge_pages, numa_node)
                size_shared(fd, self.path, size_bytes)  # pages are allocated where the mapping was bound
                write_header(fd, geometry)
            except BaseException:
                self.close()
                raise
            finally:
                os.close(fd)
        if prefault:
            self.flat[:: mmap.PAGESIZE] = bytes(len(range(0, size_bytes, mmap.PAGESIZE)))

    @classmethod
    def attach(cls, path: str | os.PathLike[str], num_blocks: int, block_bytes: int) -> Self:
        """Map the file of a region that another process created with the same arguments.

        Raises:
            ConfigError: There is no such file, it is another user's, or its header has another geometry.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise ConfigError(f"cannot attach to the region {path}: {error.strerror}") from error
        try:
            _check_private(fd, path)
            check_header(fd, path, Geometry(num_blocks, block_bytes))
            return cls.map_file(fd, path, num_blocks, block_bytes, offset=ROWS_OFFSET)
        finally:
            os.close(fd)

    @classmethod
    def map_file(
        cls,
        fd: int,
        path: str | os.PathLike[str],
        num_blocks: int,
        block_bytes: int,
        *,
        offset: int = 0,
        huge_pages: bool = False,
        numa_node: int | None = None,
    ) -> Self:
        """Map rows of a file that the caller made and removes.

        Args:
            fd: The open file, which still belongs to the caller.
            path: Its name, for messages.
            num_blocks: Rows, at least 1.
            block_bytes: Bytes of a row, at least 1.
            offset: Where the first row begins, in bytes; a multiple of the page size. The last row ends the file.
            huge_pages: As for `PrimaryRegion`.
            numa_node: Likewise.

        Raises:
            ConfigError: The file is another user's, its size is another, or it cannot be bound to the node.
        """
        wanted = offset + num_blocks * block_bytes
        found = _check_private(fd, path)
        if found != wanted:
            raise ConfigError(
                f"expected {num_blocks} blocks of {format_bytes(block_bytes)} in the region {path}, a file of "
                f"{format_bytes(wanted)}, found one of {format_bytes(found)}"
            )
        region = cls.__new__(cls)
        region.path = None  # the creator unlinks
        region._adopt(mmap.mmap(fd, wanted - offset, offset=offset), num_blocks, block_bytes)
        region._place(huge_pages, numa_node)
        return region

    def _adopt(self, mapping: mmap.mmap, num_blocks: int, block_bytes: int) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.is_pinned = False
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.flat = memoryview(mapping)
        """All bytes, one-dimensional."""
        self.kv_view = self.flat.cast("B", (num_blocks, block_bytes))
        """The same bytes, of shape (num_blocks, block_bytes)."""
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(mapping, dtype=np.uint8).reshape(
            num_blocks, block_bytes
        )
        """The same bytes as a numpy array."""

    def _place(self, huge_pages: bool, numa_node: int | None) -> None:
        assert self._mapping is not None
        try:
            self.has_huge_pages = huge_pages and _advise_huge_pages(self._mapping)
            if numa_node is not None:
                _bind_to_node(self.array.ctypes.data, self.array.nbytes, numa_node)
        except BaseException:
            self.close()
            raise

    def pin(self) -> bool:
        """Page-lock the region for this process's GPU, so that copies to and from it are direct and asynchronous.

        Does nothing where this process has not imported torch, or torch sees no CUDA device.

        Returns:
            Whether the region is pinned now.

        Raises:
            ConfigError: CUDA refuses to pin it.
        """
        cudart = _cuda_runtime()
        if cudart is not None and not self.is_pinned:
            code = int(cudart.cudaHostRegister(self.array.ctypes.data, self.array.nbytes, 0))
            if code:
                raise ConfigError(
                    f"CUDA cannot pin {rounded_bytes(self.array.nbytes)} (cudaHostRegister: error {code}); "
                    "lower primary.capacity or raise the limit of locked memory (ulimit -l)"
                )
            self.is_pinned = True
        return self.is_pinned

    def unlink(self) -> None:
        """Remove the region's name; mappings stay. Does nothing for private memory or a second time."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def close(self) -> bool:
        """Unmap the region.

        Returns:
            False if a view of it still exists. Then the memory stays mapped until the last view is gone:
            unmapping it during a transfer would crash the process.
        """
        self.unlink()
        if self._mapping is None:
            return True
        if self.is_pinned:
            cudart = _cuda_runtime()
            assert cudart is not None
            cudart.cudaHostUnregister(self.array.ctypes.data)
            self.is_pinned = False
        self.array = np.empty((0, self.block_bytes), dtype=np.uint8)
        try:
            self.kv_view.release()
            self.flat.release()
            self._mapping.close()
        except BufferError:
            return False
        self._mapping = None
        return True


def _map_private(size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot map {rounded_bytes(size_bytes)} of memory: {_reason(error)}; lower it",
            location="primary.capacity",
        ) from error


def _reason(error: OSError | OverflowError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "that is more than there can be"


def _shared_path(name: str) -> Path:
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"{name!r} is not a file name; give a plain name for a file in {SHARED_MEMORY_DIRECTORY}")
    return SHARED_MEMORY_DIRECTORY / name


def _create_shared(path: Path, size_bytes: int) -> tuple[int, mmap.mmap]:
    """Create and map the file; return its descriptor and the mapping, whose pages are yet to be allocated."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists: another process uses this name, or one that was killed left it; "
            "delete it if no process uses it"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}") from error
    try:
        os.ftruncate(fd, ROWS_OFFSET + size_bytes)
        return fd, mmap.mmap(fd, size_bytes, offset=ROWS_OFFSET)
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        if isinstance(error, (OSError, OverflowError)):
            raise ConfigError(f"cannot map {path}: {_reason(error)}") from error
        raise


def _check_private(fd: int, path: str | os.PathLike[str]) -> int:
    """Return the size of a file, which must be this user's: any user may make files in /dev/shm."""
    try:
        return check_file(fd, str(path)).st_size
    except NotPrivateError as error:
        raise ConfigError(f"cannot attach to the region: {error.strerror}") from error


def size_shared(fd: int, path: Path, size_bytes: int) -> None:
    """Allocate the pages of all rows of a file in shared memory now: a full one would kill a writer later (SIGBUS).

    Raises:
        ConfigError: There is too little shared memory.
    """
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if free < size_bytes:
        raise ConfigError(
            f"{path.parent} has {rounded_bytes(free)} free and the region needs {rounded_bytes(size_bytes)}; "
            "lower primary.capacity, or enlarge it (mount -o remount,size=...)"
        )
    try:
        os.posix_fallocate(fd, ROWS_OFFSET, size_bytes)
    except OSError as error:
        raise ConfigError(f"cannot size {path} to {rounded_bytes(size_bytes)}: {error.strerror}") from error


def _cuda_runtime() -> Any:  # Any: torch's binding of the CUDA runtime, or None
    # Not imported here: a process that has not loaded torch copies nothing to a GPU.
    torch = sys.modules.get("torch")
    return torch.cuda.cudart() if torch is not None and torch.cuda.is_available() else None


def _advise_huge_pages(mapping: mmap.mmap) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel or file system without them: only speed is lost
        return False
    return True


def _bind_to_node(address: int, size_bytes: int, node: int) -> None:
    number = _MBIND_NUMBER.get(platform.machine())
    if number is None or not 0 <= node < _NODES_MAX:
        raise ConfigError(f"numa_node {node} cannot be used on this machine", location="primary.numa_node")
    mask = (ctypes.c_ulong * (_NODES_MAX // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
    mask[word] = 1 << bit
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        number,
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        _MPOL_BIND,
        mask,
        ctypes.c_ulong(_NODES_MAX + 1),
        0,
    )
    if failed:
        code = ctypes.get_errno()
        what = "this kernel has no NUMA support" if code == errno.ENOSYS else os.strerror(code)
        raise ConfigError(f"cannot bind the region to NUMA node {node}: {what}", location="primary.numa_node")
