"""The memory that a host's cache shares with its engines: the rows of one namespace, and a generation for each of them.

The server makes both files and hands their descriptors over its socket. Neither has a name: they end with the last
process that has mapped them. The kernel refuses to shrink or grow them (F_ADD_SEALS, fcntl(2)); otherwise any process
that has the descriptor could kill all others, since an access behind the end of a file is a SIGBUS.

Engines write to the rows. They only read the generations: the kernel refuses any new mapping that could write to them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.region import Geometry, PrimaryRegion
from tiered_kv.errors import ConfigError, ResourceError, needing_resources
from tiered_kv.limits import HugePages, Limit, Limits
from tiered_kv.threads import start_thread

PREFAULT_BYTES: Final = 4 << 20
"""What one call of the kernel allocates. Meanwhile, a few milliseconds, the process can map no other memory."""
_PREFAULT_THREADS: Final = 4
_PREFAULT_NICE: Final = 10
"""The server already answers, and engines run: what they need of the processors goes first."""
_POLL_S: Final = 0.05
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in Python 3.11's fcntl
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the mmap module
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

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
        """Unmap the region as `PrimaryRegion` does. Other processes keep what they have mapped."""
        is_closed = True
        if getattr(self, "_mapping", None) is not None:  # there is none if it could not be mapped
            self.unpin()
            # Python keeps the interpreter's lock while it unmaps. So it must find no pages, nor end the file.
            _libc.madvise(self.array.ctypes.data, self.array.nbytes, mmap.MADV_DONTNEED)
            is_closed = super().close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return is_closed


class HostRegion(SealedRegion):
    """The server's rows of one namespace, in a sealed file without a name that its engines map (`map_host_region`).

    One thread creates and closes it and starts `prefault`; any thread may wait for it.

    Args:
        num_blocks, block_bytes: As of `PrimaryRegion`.
        huge_pages: Ask for transparent huge pages. The kernel gives them only where its setting `shmem_enabled`, in
            /sys/kernel/mm/transparent_hugepage, is not `never`, as it is by default.
        reserved: Take the huge pages that are reserved for such use (vm.nr_hugepages) instead. With None, only if
            `huge_pages` are asked for, enough are free, and on any node.
        numa_node: Bind the memory to this node, for all processes that map it.
        wait_s: How long to wait until enough memory is free: engines may still have mapped that of a killed server.

    Raises:
        ConfigError: Less memory is free, or fewer huge pages are reserved, than the rows need, or it cannot be bound.
        ResourceError: The system gives no descriptor, or maps no more memory.
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
    ) -> None:
        wanted = Geometry(num_blocks, block_bytes).size_bytes
        self._threads: list[threading.Thread] = []
        self._chunks: deque[int] = deque()  # offsets that no thread has begun with
        self._lock = threading.Lock()  # guards the number below
        self._allocated_bytes = 0
        try:
            mapping = self._map_reserved(wanted, wait_s) if reserved else None
            if reserved is None and huge_pages and numa_node is None:
                with suppress(ConfigError):
                    mapping = self._map_reserved(wanted, wait_s)
            is_reserved = mapping is not None
            if mapping is None:
                _wait_for_free(wanted, wait_s)
                mapping = self._map(wanted)
            self._adopt(mapping, num_blocks, block_bytes)
            self._place(huge_pages and not is_reserved and _gives_huge_pages(), numa_node)
            self.has_huge_pages |= is_reserved
            if huge_pages and not self.has_huge_pages:
                _log.info("the rows have no huge pages, with which disks are faster; %s", _how_to_reserve(wanted))
            with needing_resources("the rows' memory cannot be sealed"):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise

    def prefault(self) -> None:
        """Start to allocate all pages in the background, so that later no engine's copy waits for a page. Call it once.

        Rows may be used meanwhile: their bytes do not change. The threads log each tenth; the time is the kernel's,
        which clears the pages. Before Linux 5.14, or if the system gives no thread, a page is allocated with its first
        use.
        """
        self._chunks.extend(range(0, self._size_bytes, PREFAULT_BYTES))
        address = self.array.ctypes.data
        with suppress(ResourceError):
            for number in range(_PREFAULT_THREADS):
                self._threads.append(start_thread(self._populate, f"tiered-kv-prefault-{number}", address))

    def close(self) -> bool:
        """Stop `prefault`, and unmap the region."""
        self._chunks.clear()
        for thread in self._threads:
            thread.join()  # of one chunk at most
        self._threads.clear()
        return super().close()

    def _map_reserved(self, wanted: int, wait_s: float) -> mmap.mmap:
        found = _wait_for_reserved(wanted, wait_s)
        if found.free_bytes >= wanted:
            try:
                mapping = self._map(wanted, os.MFD_HUGETLB)
                # A limit that cannot be seen here would kill the process with its first use of a page.
                _allocate(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), found.page_bytes)
                return mapping
            except (OSError, ResourceError):
                super().close()
        raise ConfigError(
            f"expected {found.pages_of(wanted)} reserved huge pages of {format_bytes(found.page_bytes)}, found "
            f"{found.pages_of(found.free_bytes)} that are free ({found.where}); {_how_to_reserve(wanted)}, or set this "
            "to false",
            location="primary.reserved_huge_pages",
        )

    def _map(self, wanted: int, flags: int = 0) -> mmap.mmap:
        self.fd = _create("tiered-kv-rows", flags)
        self._size_bytes = _rounded_to_pages(self.fd, wanted)
        with needing_resources(f"{rounded_bytes(wanted)} of memory cannot be mapped"):
            os.ftruncate(self.fd, self._size_bytes)
            return mmap.mmap(self.fd, self._size_bytes)

    def _populate(self, address: int) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PREFAULT_NICE)  # of this thread only
        with suppress(IndexError):
            while True:
                offset = self._chunks.popleft()
                length = min(PREFAULT_BYTES, self._size_bytes - offset)
                try:
                    _allocate(address + offset, length)
                except OSError as error:
                    self._chunks.clear()
                    _log.error("%s", ResourceError.of("the rows' memory cannot be allocated", error))
                    return
                with self._lock:
                    tenth = 10 * self._allocated_bytes // self._size_bytes
                    self._allocated_bytes += length
                    if (now := 10 * self._allocated_bytes // self._size_bytes) > tenth:
                        _log.info("%d0%% of the rows' %s are allocated", now, rounded_bytes(self._size_bytes))


class Generations:
    """A number of 32 bits for each row, which only the server changes: a row has another whenever it is given anew.

    One thread calls.

    Attributes:
        fd: The file, to hand over a socket; `close` closes it.
        values: The numbers.

    Raises:
        ResourceError: The system gives no descriptor, maps no more memory, or is older than Linux 5.1.
    """

    def __init__(self, rows: int) -> None:
        self.fd = _create("tiered-kv-generations")
        try:
            with needing_resources("the rows' generations cannot be mapped"):
                os.ftruncate(self.fd, rows * 4)
                self.values = memoryview(mmap.mmap(self.fd, rows * 4)).cast("I")
                seals = _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.fd)
            raise

    def bump(self, rows: Iterable[int]) -> None:
        """Give each of these rows its next generation; after the last comes 0."""
        values = self.values
        for row in rows:
            values[row] = values[row] + 1 & 0xFFFFFFFF

    def bump_all(self) -> None:
        """Give every row its next generation: no engine takes a block from before a reset for stored."""
        current = np.frombuffer(self.values, np.uint32)
        current += np.uint32(1)

    def close(self) -> None:
        """Close and unmap the file. Engines keep what they have mapped. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.values.release()


def map_host_region(fd: int, num_blocks: int, block_bytes: int) -> SealedRegion:
    """Map the rows of a server, which may run as another user: the socket has shown who it is.

    A forked child does not inherit the rows, since the server gives them to others when this process has ended. In the
    child every access to them is a SIGSEGV; to close the region there is safe and does nothing to the parent's.

    Args:
        fd: The file that has come over the socket; the caller closes it.
        num_blocks, block_bytes: As the server says.

    Raises:
        ResourceError: The system maps no more memory.
    """
    region = SealedRegion.__new__(SealedRegion)
    with needing_resources("the rows of the host's cache cannot be mapped"):
        mapping = mmap.mmap(fd, 0)  # all of it: a file of huge pages is longer than the rows
        mapping.madvise(mmap.MADV_DONTFORK)
        region.fd = os.dup(fd)
    region._adopt(mapping, num_blocks, block_bytes)
    _not_inherited[mapping] = (region.array.ctypes.data, len(mapping), _identity(fd))
    region._place(True, None)
    return region


def map_generations(fd: int, rows: int) -> memoryview:
    """Map the generations of a server's rows, read-only. The memory is unmapped with the last view of it.

    Args:
        fd: The file that has come over the socket; the caller closes it.
        rows: How many rows there are.

    Raises:
        ResourceError: As `map_host_region`.
    """
    with needing_resources("the generations of the host's cache cannot be mapped"):
        return memoryview(mmap.mmap(fd, rows * 4, prot=mmap.PROT_READ)).cast("I")


def _create(name: str, flags: int = 0) -> int:
    with needing_resources("memory to share cannot be created"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)


def _rounded_to_pages(fd: int, size_bytes: int) -> int:
    page_bytes = os.fstatvfs(fd).f_bsize  # of a huge page, if the file has those
    return -(-size_bytes // page_bytes) * page_bytes


def _wait_for_free(wanted: int, wait_s: float) -> None:
    end_s = time.monotonic() + wait_s
    while True:
        least = min(Limits().free_memory(), key=lambda each: each.amount, default=Limit(wanted, ""))
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
        found = Limits().huge_pages()
        if found.free_bytes >= wanted or found.total_bytes < wanted or time.monotonic() >= end_s:
            return found
        time.sleep(_POLL_S)


def _how_to_reserve(wanted: int) -> str:
    found = Limits().huge_pages()
    pages = found.pages_of(found.total_bytes) + found.pages_of(max(0, wanted - found.free_bytes))
    return f"reserve them, at best when the machine starts: sysctl vm.nr_hugepages={pages}"


def _gives_huge_pages() -> bool:
    with suppress(OSError):
        return not {"[never]", "[deny]"}.intersection(_SHMEM_ENABLED.read_text().split())
    return False


def _allocate(address: int, length: int) -> None:
    """Allocate the pages of a part of a mapping, without a change of their bytes. Other threads run meanwhile."""
    failed = _libc.madvise(address, length, _MADV_POPULATE_WRITE)
    if failed and (code := ctypes.get_errno()) != errno.EINVAL:  # an older kernel allocates pages with their first use
        raise OSError(code, os.strerror(code))


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_not_inherited: WeakKeyDictionary[mmap.mmap, tuple[int, int, tuple[int, int]]] = WeakKeyDictionary()
"""The rows that this process has mapped: address, bytes and file."""


def _leave_to_parent() -> None:
    """In a forked child: reserve the addresses of the rows, and close their files, which would keep the memory.

    Otherwise the child might map something else there, and unmap that when it deletes its copy of the mapping.
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
