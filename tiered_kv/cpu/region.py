"""The region: the memory of the primary tier, one page-aligned mapping that holds every block; and the header of its
file.

The stack maps it when it opens. Workers and secondary tiers copy from and to its rows, on their threads. These things
stay true:

- A mapping does not move, and is not unmapped during a transfer: GPUs and tiers use its addresses.
- Processes that share a file divide it alike. Otherwise they would copy bytes of other blocks without an error. So the
  process that creates the file writes the geometry into it, and every other process compares it.

The header is one page of JSON. The rows begin at `ROWS_OFFSET`; the hole between them takes no memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import mmap
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.errors import ConfigError, ResourceError, needing_resources
from tiered_kv.system.file_systems import allocate
from tiered_kv.system.huge_pages import TRANSPARENT, aligned_to, map_aligned
from tiered_kv.system.limits import Limits
from tiered_kv.system.permissions import NotPrivateError, check_file

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")
HEADER_BYTES = 4096
ROWS_OFFSET = 2 << 20
"""Byte offset of the first row: the header takes one huge page of 2 MiB. With larger huge pages, the rows and their
mapping begin inside a page."""
_FORMAT = 1

# mbind(2) has no wrapper in libc; its number is per architecture (Linux's syscall tables).
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_NODES_MAX = 1024


class PrimaryRegion:
    """`num_blocks` rows of `block_bytes`, in private memory or in a file that other processes map (`map_file`).

    Any thread may read the attributes. One thread creates and closes it.

    Args:
        num_blocks: Rows, at least 1.
        block_bytes: Bytes of a row, at least 1.
        huge_pages: Ask the kernel for transparent huge pages; it may decline. With them disk transfers are up to 1.5
            times as fast, since one request covers megabytes instead of a list of single pages.
        prefault: Touch every page now, so that the first stores do not wait for page faults.
        numa_node: Bind the memory to this node.

    Raises:
        ConfigError: The memory cannot be allocated as requested; the message has the remedy.
    """

    is_reserved = False
    """Whether its pages are reserved huge ones, which count in no limit of memory."""
    huge_bytes = 0
    """Bytes of shared memory that the kernel has mapped by huge pages, counted when the start has ended."""

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        huge_pages: bool = True,
        prefault: bool = False,
        numa_node: int | None = None,
    ) -> None:
        size_bytes = Geometry(num_blocks, block_bytes).size_bytes
        sizes = Limits().transparent_sizes("enabled") if huge_pages else []
        try:
            mapping, start = map_aligned(size_bytes, aligned_to(sizes, size_bytes))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "that is more than there can be"
            raise ConfigError(
                f"cannot map {rounded_bytes(size_bytes)} of memory: {reason}; lower it", location="primary.capacity"
            ) from error
        self._adopt(mapping, num_blocks, block_bytes, start)
        self._place(huge_pages, numa_node)
        if prefault:
            try:
                self.flat[:: mmap.PAGESIZE] = bytes(len(range(0, size_bytes, mmap.PAGESIZE)))
            except MemoryError as error:
                self.close()
                raise ResourceError.of("the primary tier's memory cannot be touched", error) from error

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
        """Map rows of the open file `fd`, which the caller creates, closes and removes; `path` is for messages.

        The first row is at the byte `offset`, a multiple of the page size. The last row ends the file.

        Raises:
            ConfigError: The file has another owner or size, or it cannot be bound to the node.
            ResourceError: The system maps no more memory.
        """
        wanted = offset + num_blocks * block_bytes
        try:
            found = check_file(fd, str(path)).st_size  # any user may make files in /dev/shm
        except NotPrivateError as error:
            raise ConfigError(f"cannot attach to the region: {error.strerror}") from error
        if found != wanted:
            raise ConfigError(
                f"expected {num_blocks} blocks of {format_bytes(block_bytes)} in the region {path}, a file of "
                f"{format_bytes(wanted)}, found one of {format_bytes(found)}"
            )
        region = cls.__new__(cls)
        size_bytes = wanted - offset
        sizes = shared_sizes(Limits()) if huge_pages else []
        with needing_resources(f"the region {path} cannot be mapped"):
            mapping, start = map_aligned(size_bytes, aligned_to(sizes, size_bytes), fd=fd, offset=offset)
        region._adopt(mapping, num_blocks, block_bytes, start)
        region._place(huge_pages, numa_node)
        return region

    def _adopt(self, mapping: mmap.mmap, num_blocks: int, block_bytes: int, start: int = 0) -> None:
        """Take over a mapping, in which the rows begin at the byte `start`."""
        self._mapping: mmap.mmap | None = mapping
        self.is_pinned = False
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.flat = memoryview(mapping)[start : start + num_blocks * block_bytes]  # the mapping may be longer
        """All bytes, one-dimensional."""
        self.kv_view = self.flat.cast("B", (num_blocks, block_bytes))
        """The same bytes, of shape (num_blocks, block_bytes)."""
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(
            mapping, dtype=np.uint8, count=num_blocks * block_bytes, offset=start
        ).reshape(num_blocks, block_bytes)
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

        Does nothing if this process has not imported torch, or torch finds no CUDA device.

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
                    f"lower primary.capacity or raise the limit of locked memory (ulimit -l), which is "
                    f"{Limits().locked_memory()}"
                )
            self.is_pinned = True
        return self.is_pinned

    def unpin(self) -> None:
        """Undo `pin`. No copy may run meanwhile. A second call does nothing."""
        if self.is_pinned:
            cudart = _cuda_runtime()
            assert cudart is not None
            cudart.cudaHostUnregister(self.array.ctypes.data)
            self.is_pinned = False

    def unlink(self) -> None:
        """Remove the region's file name, if it has one; mappings stay. A second call does nothing."""

    def close(self) -> bool:
        """Unmap the region.

        Returns:
            False if a view of it still exists. Then the memory stays mapped until the last view is gone. To unmap it
            during a transfer would crash the process.
        """
        self.unlink()
        if self._mapping is None:
            return True
        self.unpin()
        self.array = np.empty((0, self.block_bytes), dtype=np.uint8)
        try:
            self.kv_view.release()
            self.flat.release()
            self._mapping.close()
        except BufferError:
            return False
        self._mapping = None
        return True


def shared_sizes(limits: Limits, folder: Path = TRANSPARENT) -> list[int]:
    """Return the sizes of huge pages that shared memory may get, by itself or on request: it is aligned to one."""
    collapsed = limits.collapsed_size(folder)
    return sorted({*limits.transparent_sizes("shmem_enabled", folder), *([collapsed] if collapsed else [])})


def check_shared_room(fd: int, path: Path, size_bytes: int) -> None:
    """Raise `ConfigError` if too little shared memory is free for the rows of a file."""
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if free < size_bytes:
        raise ConfigError(
            f"{path.parent} has {rounded_bytes(free)} free and the region needs {rounded_bytes(size_bytes)}; "
            "lower primary.capacity, or enlarge it (mount -o remount,size=...)"
        )


def size_shared(fd: int, path: Path, size_bytes: int) -> None:
    """Allocate the pages of all rows of a file in shared memory. Otherwise a full /dev/shm would kill a writer later.

    Raises:
        ConfigError: Too little shared memory is free.
    """
    try:
        if not allocate(fd, ROWS_OFFSET, size_bytes):
            zeros = memoryview(bytes(min(size_bytes, 2 << 20)))
            for at in range(0, size_bytes, len(zeros)):
                os.pwrite(fd, zeros[: size_bytes - at], ROWS_OFFSET + at)
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


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers that are equal in all processes that map a region; raises `ConfigError` for a number below 1."""

    rows: int
    row_bytes: int
    parts: int = 1  # in every row: one for each worker, or one for all
    block_size_factor: int = 1  # device blocks in a row

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1:
            raise ConfigError(f"a region needs at least one block, byte, part and device block, found {self}")

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of a part; the part of worker 0 is the first."""
        return self.row_bytes // self.parts

    def header(self) -> dict[str, int]:
        return {"format": _FORMAT, **dataclasses.asdict(self), "part_bytes": self.part_bytes}


def write_header(fd: int, geometry: Geometry) -> None:
    """Write the header of a file after its rows were allocated."""
    os.pwrite(fd, json.dumps(geometry.header()).encode().ljust(HEADER_BYTES, b"\0"), 0)


def has_header(fd: int) -> bool:
    """Return whether a header has been written."""
    return any(os.pread(fd, HEADER_BYTES, 0))


def check_header(fd: int, path: str | os.PathLike[str], wanted: Geometry) -> None:
    """Compare a file's header with the geometry that this process expects.

    Raises:
        ConfigError: The header is missing, or has another geometry.
    """
    try:
        found = json.loads(os.pread(fd, HEADER_BYTES, 0).rstrip(b"\0"))
    except ValueError:
        found = {}
    expected = wanted.header()
    differing = [name for name in expected if found.get(name) != expected[name]]
    if differing:
        raise ConfigError(
            f"expected {', '.join(f'{name} {expected[name]}' for name in differing)} in the region {Path(path)}, "
            f"found {', '.join(f'{name} {found.get(name)}' for name in differing)}; every process that maps it must be "
            "configured alike"
        )
