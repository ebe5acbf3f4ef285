"""Huge pages: the sizes of transparent ones, the reserved ones of each size, and memory that begins on a huge page.

The primary tier's regions and `Limits` call it, on any thread. The sizes depend on the base pages: 2 MiB and 1 GiB with
pages of 4 KiB, but 2 MiB, 512 MiB and 16 GiB with pages of 64 KiB. So no size is assumed: each one is read from the
kernel (admin-guide/mm/hugetlbpage and transhuge of its documentation).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tiered_kv.config.units import rounded_bytes

TRANSPARENT: Final = Path("/sys/kernel/mm/transparent_hugepage")
POOLS: Final = "/sys/kernel/mm/hugepages"
_MFD_HUGE_SHIFT: Final = 26  # memfd_create(2)
COLLAPSED_BYTES_MAX: Final = 32 << 20
"""Larger pages are not made on request: 512 MiB are hardly ever free, and the small pages there have 64 KiB already."""
_WASTE_SHARE: Final = 8
"""A pool is preferred if its last page leaves unused at most the rows' bytes divided by this."""
_WASTE_BYTES: Final = 16 << 20
"""So few unused bytes are never too many; see `HugePages.fits`."""
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FOLDER: Final = re.compile(r"hugepages-(\d+)kB")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class PoolLimit:
    """A limit of a cgroup on reserved huge pages, in bytes."""

    amount: int
    used: int
    where: str
    """The place of the limit, for messages."""

    @property
    def left(self) -> int:
        return max(0, self.amount - self.used)


@dataclass(frozen=True, slots=True)
class HugePages:
    """The reserved huge pages of one size, and how much of them this process may still take."""

    page_bytes: int
    total_bytes: int
    free_bytes: int  # free in the pool, and below all limits
    where: str  # the limit that sets `free_bytes`
    is_default: bool = True  # whether vm.nr_hugepages means this size
    pool_bytes: int | None = None  # the free bytes of the pool; None for `free_bytes`
    limits: tuple[PoolLimit, ...] = ()

    @property
    def memfd_flags(self) -> int:
        """The flags of memfd_create(2) for a file of these pages."""
        return os.MFD_HUGETLB | (self.page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT

    def pages_of(self, size_bytes: int) -> int:
        return -(-size_bytes // self.page_bytes)

    def has_room_for(self, size_bytes: int) -> bool:
        return self.pages_of(size_bytes) <= self.free_bytes // self.page_bytes

    def fits(self, size_bytes: int) -> bool:
        """Return whether whole pages are not much more than `size_bytes`."""
        unused = self.pages_of(size_bytes) * self.page_bytes - size_bytes
        return unused <= max(size_bytes // _WASTE_SHARE, _WASTE_BYTES)

    def may_get_room_for(self, size_bytes: int) -> bool:
        """Return whether there would be room if no process used any of these pages."""
        return self.pages_of(size_bytes) * self.page_bytes <= min(
            [self.total_bytes, *(each.amount for each in self.limits)]
        )

    def advice(self, size_bytes: int) -> str:
        """Return the remedy for missing room; "" if there is room below all limits that can be seen here."""
        pages = self.pages_of(size_bytes)
        wanted = pages * self.page_bytes
        free = self.free_bytes if self.pool_bytes is None else self.pool_bytes
        parts = []
        if free < wanted:
            total = self.pages_of(self.total_bytes) + self.pages_of(wanted - max(0, free))
            how = f"sysctl vm.nr_hugepages={total}"
            if not self.is_default:
                how = f"echo {total} > {POOLS}/hugepages-{self.page_bytes >> 10}kB/nr_hugepages"
            parts.append(f"reserve them, at best when the machine starts: {how}")
        parts += [f"raise {each.where} to {each.used + wanted}" for each in self.limits if each.left < wanted]
        return "; ".join(parts)


def pool_for(pools: Iterable[HugePages], size_bytes: int) -> HugePages:
    """Return the pool to take `size_bytes` from: one with room, and of these one that wastes little of its last page.

    Of several such pools the default size comes first, then larger pages.
    """

    def rank(pool: HugePages) -> tuple[bool, bool, bool, int]:
        is_wasteful = pool.pages_of(size_bytes) * pool.page_bytes - size_bytes > size_bytes // _WASTE_SHARE
        size = pool.page_bytes if is_wasteful else -pool.page_bytes
        return not pool.has_room_for(size_bytes), is_wasteful, not is_wasteful and not pool.is_default, size

    return min(pools, key=rank)


def pool_name(page_bytes: int) -> str:
    """Return the beginning of the names of a cgroup's files, such as "hugetlb.2MB"."""
    return f"hugetlb.{rounded_bytes(page_bytes).replace('i', '')}"


def transparent_sizes(setting: Literal["enabled", "shmem_enabled"], folder: Path = TRANSPARENT) -> list[int]:
    """Return the sizes of the pages that the kernel gives to memory that asks for huge pages (madvise(2)), rising.

    `shmem_enabled` is for shared memory, `enabled` for other. Each size has its own file since Linux 6.8, for shared
    memory since 6.11. The file above them holds for sizes that say `inherit`, and before these versions
    for the largest size.
    """
    above = _chosen(folder / setting)
    if setting == "shmem_enabled" and above == "deny":
        return []
    whole = _whole_size(folder)
    by_size = {}
    with suppress(OSError):
        for entry in os.listdir(folder):
            if (match := _FOLDER.fullmatch(entry)) and (chosen := _chosen(folder / entry / setting)):
                by_size[int(match[1]) << 10] = chosen
    if above == "force":  # then only the sizes that inherit have pages
        return sorted(size for size, chosen in by_size.items() if chosen == "inherit") or ([whole] if whole else [])
    if whole:
        by_size.setdefault(whole, "inherit")
    given = {size: above if chosen == "inherit" else chosen for size, chosen in by_size.items()}
    return sorted(size for size, chosen in given.items() if chosen not in ("never", ""))


def collapsed_size(folder: Path = TRANSPARENT) -> int:
    """Return the size of the huge pages that shared memory gets on request (`collapse`); 0 if it gets none."""
    size = _whole_size(folder)
    return size if size <= COLLAPSED_BYTES_MAX and _chosen(folder / "shmem_enabled") not in ("", "deny") else 0


def aligned_to(sizes: Iterable[int], size_bytes: int) -> int:
    """Return the best alignment for memory of `size_bytes`: the largest page that fits into it."""
    return max((size for size in sizes if size <= size_bytes), default=mmap.PAGESIZE)


def map_aligned(size_bytes: int, align_bytes: int, *, fd: int = -1, offset: int = 0) -> tuple[mmap.mmap, int]:
    """Map private memory, or the shared memory of a file from `offset` on, aligned to `align_bytes`.

    The kernel aligns memory to its largest huge page only, and not always. So the mapping is longer by `align_bytes`,
    and these bytes are never used.

    Returns:
        The mapping, and the byte in it where the memory begins: its address and `offset` are equal, modulo
        `align_bytes`.

    Raises:
        OSError, OverflowError: See `mmap.mmap`.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if align_bytes <= mmap.PAGESIZE:
        if fd < 0:
            return mmap.mmap(-1, size_bytes, flags=private), 0
        return mmap.mmap(fd, size_bytes, offset=offset), 0
    mapping = mmap.mmap(-1, size_bytes + align_bytes, flags=private | (_MAP_NORESERVE if fd >= 0 else 0))
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = (offset - address) % align_bytes
    if fd >= 0:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        made = _libc.mmap(address + start, size_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        if made != address + start:
            code = ctypes.get_errno()
            mapping.close()
            raise OSError(code, os.strerror(code))
    return mapping, start


def _whole_size(folder: Path) -> int:
    with suppress(OSError, ValueError):
        return int((folder / "hpage_pmd_size").read_text())
    return 0


def _chosen(path: Path) -> str:
    """Return the chosen word of a setting, which its file has in brackets; "" if there is no such file."""
    with suppress(OSError):
        if match := re.search(r"\[(\w+)\]", path.read_text()):
            return match[1]
    return ""
