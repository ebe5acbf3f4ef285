"""The memory that a host's cache shares with its engines: the rows of one namespace. `generations` has their numbers.

The server makes the file and hands its descriptor over its socket. It has no name: it ends with the last process that
has mapped it. The kernel refuses to shrink or grow it (F_ADD_SEALS, fcntl(2)). Otherwise any process with the
descriptor could kill all others: an access behind the end of a file is a SIGBUS.

A `ServedStack` makes the file on the thread that opens its stack. A client's `Attachment` maps it.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakKeyDictionary

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.region import Geometry, PrimaryRegion, shared_sizes
from tiered_kv.errors import ConfigError, ResourceError, needing_resources
from tiered_kv.server.allocation import RowAllocation
from tiered_kv.system.collapse import Collapse, describe, huge_bytes
from tiered_kv.system.huge_pages import TRANSPARENT, HugePages, aligned_to, map_aligned, pool_name
from tiered_kv.system.limits import Limit, Limits

ROWS_MIN: Final = 2
"""A server starts only with memory for so many rows."""
SPARE_BYTES: Final = 32 << 20
SPARE_SHARE: Final = 8
"""The rows leave `SPARE_BYTES` of memory free, or their bytes divided by `SPARE_SHARE` if that is less. The server
needs this memory for itself."""
_LOOK_BYTES: Final = 64 << 20
"""After so many bytes of rows, the server looks anew at how much memory is free."""
_POLL_S: Final = 0.05
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_SHMEM_ENABLED: Final = TRANSPARENT / "shmem_enabled"

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SealedRegion(PrimaryRegion):
    """Rows of a sealed file without a name. Other threads run while it is unmapped, which takes a second for some GiB.

    Attributes:
        fd: The file; the region closes it.
    """

    fd = -1

    def close(self) -> bool:
        """Unmap the region; see `PrimaryRegion`. Other processes keep their mappings."""
        is_closed = True
        if getattr(self, "_mapping", None) is not None:  # absent if it could not be mapped
            self.unpin()
            # Python holds the interpreter's lock while it unmaps: the pages go before, and the file is closed after.
            _libc.madvise(self.array.ctypes.data, self.array.nbytes, mmap.MADV_DONTNEED)
            is_closed = super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return is_closed


class HostRegion(SealedRegion):
    """The server's rows of one namespace, in a sealed file without a name that its engines map (`map_host_region`).

    One thread creates and closes it; any thread may read how many rows are ready.

    Args:
        num_blocks, block_bytes: As of `PrimaryRegion`.
        huge_pages: Ask for transparent huge pages. With `prefault`, the kernel makes them on request (`Collapse`).
            Without it, only if a setting `shmem_enabled` allows it, in /sys/kernel/mm/transparent_hugepage or a folder
            of it. The default is `never`.
        reserved: Take reserved huge pages (vm.nr_hugepages) of any size instead. None takes them only if `huge_pages`
            is set, `numa_node` is None, enough pages are free, and whole pages waste little (`HugePages.fits`).
        numa_node: Bind the memory to this node, for all processes that map it.
        wait_s: Seconds to wait until enough memory is free: engines may still map the memory of a killed server.
        prefault: Allocate all rows in the background, and hand out only rows that have memory. Without it, the kernel
            charges a page to the process that touches it first. Reserved huge pages are always allocated.

    Raises:
        ConfigError: Less memory is free, or fewer huge pages are reserved, than the rows need. Or the memory cannot be
            bound to the node.
        ResourceError: The system gives no descriptor, or maps no more memory, or refuses the first rows.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        huge_pages: bool = True,
        reserved: bool | None = False,
        numa_node: int | None = None,
        wait_s: float = 0.0,
        prefault: bool = False,
    ) -> None:
        wanted = Geometry(num_blocks, block_bytes).size_bytes
        self._least_bytes = min(ROWS_MIN, num_blocks) * block_bytes
        self._numa_node = numa_node
        self._allocation: RowAllocation | None = None
        self._lacking = ""  # how to get reserved huge pages
        self._collapse: Collapse | None = None
        self._wants_huge_pages = huge_pages
        self.is_reserved = False
        try:
            mapped = self._map_reserved(wanted, wait_s) if reserved else None
            if reserved is None and huge_pages and numa_node is None and Limits().huge_pages(wanted).fits(wanted):
                with suppress(ConfigError):
                    mapped = self._map_reserved(wanted, wait_s)
            self.is_reserved = mapped is not None
            sizes = _transparent_sizes(wanted) if huge_pages and not self.is_reserved else []
            if mapped is None:
                _wait_for_free(wanted, wait_s, numa_node)
                mapped = self._map(wanted, [*sizes, *(_sizes_to_align(wanted) if huge_pages else [])])
            self._adopt(mapped[0], num_blocks, block_bytes, mapped[1])
            self._place(bool(sizes), numa_node)  # before the first page is allocated
            self.has_huge_pages |= self.is_reserved
            if huge_pages and not self.has_huge_pages and not prefault:
                _log.info("the rows have no huge pages, with which disks are faster; %s", self._advice())
            with needing_resources("the rows' memory cannot be sealed"):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
            if prefault and self._allocation is None:
                address, page_bytes = self.array.ctypes.data, Limits().collapsed_size(_SHMEM_ENABLED.parent)
                if huge_pages and 0 < page_bytes <= self._size_bytes:
                    self._collapse = Collapse(address, self._size_bytes, page_bytes)
                    self.has_huge_pages = True  # until they are counted
                self._allocation = self._begun(address, mmap.PAGESIZE)
                if self._allocation.refusal and self._allocation.ready_bytes < self._least_bytes:
                    raise ResourceError(self._allocation.refusal)
            if self._allocation is not None:
                self._allocation.go_on()
        except BaseException:
            self.close()
            raise

    @property
    def ready_rows(self) -> int:
        """How many rows, from the first on, may be handed out: a touch of them allocates no page."""
        allocation = self._allocation
        return (
            self.num_blocks if allocation is None else min(self.num_blocks, allocation.ready_bytes // self.block_bytes)
        )

    @property
    def is_prefaulted(self) -> bool:
        """Whether a row is allocated before it is handed out."""
        return self._allocation is not None

    @property
    def is_allocating(self) -> bool:
        """Whether more rows may become ready."""
        return self._allocation is not None and not self._allocation.is_over

    def stop_allocating(self) -> None:
        """Allocate no further rows. It waits for one call of the kernel at most."""
        if self._allocation is not None:
            self._allocation.close()

    def close(self) -> bool:
        """Stop the allocation, and unmap the region."""
        self.stop_allocating()
        return super().close()

    def _begun(self, address: int, page_bytes: int) -> RowAllocation:
        allocation = RowAllocation(
            self.fd,
            address,
            self._size_bytes,
            page_bytes=page_bytes,
            room=None if self.is_reserved else self._room,
            collapse=self._collapse,
            on_end=self._count_huge_pages,
        )
        allocation.begin()
        return allocation

    def _count_huge_pages(self) -> None:
        """Count the huge pages of the allocated rows, and log how to get more."""
        if self.is_reserved:
            self.huge_bytes = self.array.nbytes
        elif self._wants_huge_pages:
            self.huge_bytes = huge_bytes(self.array.ctypes.data, self._size_bytes)
            whole_bytes = self._collapse.whole_bytes if self._collapse else self._size_bytes
            if self.huge_bytes >= whole_bytes > 0:
                _log.info("%s", describe(self.huge_bytes, self._size_bytes))
            elif self.huge_bytes:
                _log.info("%s; %s", describe(self.huge_bytes, self._size_bytes), self._advice())
            else:
                _log.info("the rows have no huge pages, with which disks are faster; %s", self._advice())
        self.has_huge_pages = self.huge_bytes > 0

    def _advice(self) -> str:
        """Return how to get huge pages, or more of them: reserved ones, and why the kernel made no others."""
        reserve = self._lacking or Limits().huge_pages(self._size_bytes).advice(self._size_bytes)
        why = self._collapse.advice() if self._collapse else ""
        return "; or ".join(filter(None, (why, reserve or "set reserved_huge_pages: true")))

    def _room(self, wanted: int) -> tuple[int, str]:
        """Return how many bytes the rows may take now, and why no more."""
        spare_bytes = min(SPARE_BYTES, self._size_bytes // SPARE_SHARE)
        least = _least_free(wanted + spare_bytes, self._numa_node, is_slow=False)  # else the server is slow, too
        why = (
            f"{rounded_bytes(least.amount)} are free ({least.where}), of which {rounded_bytes(spare_bytes)} are spared"
        )
        return min(max(wanted, _LOOK_BYTES), least.amount - spare_bytes), why

    def _map_reserved(self, wanted: int, wait_s: float) -> tuple[mmap.mmap, int]:
        found = _wait_for_reserved(wanted, wait_s)
        self._lacking = found.advice(wanted)
        if found.has_room_for(wanted):
            try:
                return self._allocated_reserved(wanted, found)
            except (OSError, ResourceError) as error:
                limit = f"{pool_name(found.page_bytes)}.max"
                self._lacking = f"raise a limit that cannot be seen here, such as {limit} of a cgroup above: {error}"
                self._allocation, self.is_reserved = None, False
                super().close()
        raise ConfigError(
            f"expected {found.pages_of(wanted)} reserved huge pages of {format_bytes(found.page_bytes)}, found "
            f"{found.free_bytes // found.page_bytes} that are free ({found.where}); {self._lacking}, or set this to "
            "false",
            location="primary.reserved_huge_pages",
        )

    def _allocated_reserved(self, wanted: int, pool: HugePages) -> tuple[mmap.mmap, int]:
        mapping, start = self._map(wanted, [pool.page_bytes], pool.memfd_flags)
        self.is_reserved = True
        self._allocation = self._begun(ctypes.addressof(ctypes.c_char.from_buffer(mapping, start)), pool.page_bytes)
        if self._allocation.refusal:
            mapping.close()
            raise ResourceError(self._allocation.refusal)
        return mapping, start

    def _map(self, wanted: int, sizes: Sequence[int], flags: int = 0) -> tuple[mmap.mmap, int]:
        self.fd = create_sealable("tiered-kv-rows", flags)
        self._size_bytes = _rounded_to_pages(self.fd, wanted)
        with needing_resources(f"{rounded_bytes(wanted)} of memory cannot be mapped"):
            os.ftruncate(self.fd, self._size_bytes)
            return map_aligned(self._size_bytes, aligned_to(sizes, self._size_bytes), fd=self.fd)


def map_host_region(fd: int, num_blocks: int, block_bytes: int) -> SealedRegion:
    """Map the rows of a server, which may run as another user: the socket has shown its user.

    A forked child does not inherit the rows, since the server gives them to others when this process has ended. In the
    child every access to them is a SIGSEGV. To close the region there is safe, and leaves the parent's as it is.

    Args:
        fd: The file that has come over the socket; the caller closes it.
        num_blocks, block_bytes: As the server says.

    Raises:
        ResourceError: The system maps no more memory.
    """
    region = SealedRegion.__new__(SealedRegion)
    with needing_resources("the rows of the host's cache cannot be mapped"):
        size_bytes = os.fstat(fd).st_size  # all of it: a file of huge pages is longer than the rows
        page_bytes = os.fstatvfs(fd).f_bsize
        sizes = _sizes_to_align(size_bytes) if page_bytes <= mmap.PAGESIZE else [page_bytes]
        mapping, start = map_aligned(size_bytes, aligned_to(sizes, size_bytes), fd=fd)
        mapping.madvise(mmap.MADV_DONTFORK)
        region.fd = os.dup(fd)
    region._adopt(mapping, num_blocks, block_bytes, start)
    _not_inherited[mapping] = (region.array.ctypes.data - start, len(mapping), _identity(fd))
    region._place(True, None)
    return region


def create_sealable(name: str, flags: int = 0) -> int:
    """Return a file without a name, of shared memory, that may be sealed."""
    with needing_resources("memory to share cannot be created"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)


def _rounded_to_pages(fd: int, size_bytes: int) -> int:
    page_bytes = os.fstatvfs(fd).f_bsize  # of a huge page, if the file has those
    return -(-size_bytes // page_bytes) * page_bytes


def _least_free(wanted: int, numa_node: int | None, *, is_slow: bool = True) -> Limit:
    return min(
        Limits().free_memory(numa_node, is_slow=is_slow), key=lambda each: each.amount, default=Limit(wanted, "")
    )


def _wait_for_free(wanted: int, wait_s: float, numa_node: int | None) -> None:
    end_s = time.monotonic() + wait_s
    while True:
        least = _least_free(wanted, numa_node)
        if least.amount >= wanted:
            return
        if time.monotonic() >= end_s:
            raise ConfigError(
                f"the rows need {rounded_bytes(wanted)} of memory, and {rounded_bytes(least.amount)} are free "
                f"({least.where}); lower it, or end what uses the memory",
                location="primary.capacity",
            )
        time.sleep(_POLL_S)


def _wait_for_reserved(wanted: int, wait_s: float) -> HugePages:
    end_s = time.monotonic() + wait_s
    while True:
        found = Limits().huge_pages(wanted)
        if found.has_room_for(wanted) or not found.may_get_room_for(wanted) or time.monotonic() >= end_s:
            return found
        time.sleep(_POLL_S)


def _transparent_sizes(size_bytes: int) -> list[int]:
    """Return the sizes of huge pages that rows of `size_bytes` may have."""
    sizes = Limits().transparent_sizes("shmem_enabled", _SHMEM_ENABLED.parent)
    return [size for size in sizes if size <= size_bytes]


def _sizes_to_align(size_bytes: int) -> list[int]:
    """Return the same, with those that rows get on request."""
    return [size for size in shared_sizes(Limits(), _SHMEM_ENABLED.parent) if size <= size_bytes]


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_not_inherited: WeakKeyDictionary[mmap.mmap, tuple[int, int, tuple[int, int]]] = WeakKeyDictionary()
"""The rows that this process has mapped: address, bytes and file."""


def _leave_to_parent() -> None:
    """In a forked child, reserve the addresses of the rows, and close their files, which would keep the memory.

    Otherwise the child might map other memory at these addresses, and unmap it with its copy of the mapping.
    """
    mapped = [each for mapping, each in _not_inherited.items() if not mapping.closed]
    if not mapped:
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
    for address, size_bytes, _ in mapped:
        _libc.mmap(address, size_bytes, _PROT_NONE, flags, -1, 0)
    files = {file for _, _, file in mapped}
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with suppress(OSError):  # the descriptor of the listing itself
            if _identity(fd) in files:
                os.dup2(nothing, fd, inheritable=False)  # its number stays taken: the copy will close it
    os.close(nothing)


os.register_at_fork(after_in_child=_leave_to_parent)
