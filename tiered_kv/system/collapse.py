"""Huge pages for shared memory on request: the kernel moves small pages into a huge one (MADV_COLLAPSE, Linux 6.1).

A server's allocation of rows and the memory of an engine's processes call it, on threads of their own. Bytes do not
change, and other processes may use the memory meanwhile. What must stay true:

- No setting of the kernel need allow it, except that `shmem_enabled` is not `deny`.
- Each huge page needs one small page first: the kernel refuses memory without any (EINVAL).
- The answer 0 proves nothing, so `huge_bytes` counts what the kernel has mapped.
- Pages that a device has pinned cannot move (EAGAIN). So the memory is collapsed before CUDA registers it.
- A huge page is charged to the process that asks for it, and lies on the NUMA node of the small one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import struct
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.system.huge_pages import COLLAPSED_BYTES_MAX, aligned_to, map_aligned
from tiered_kv.system.step import give_way
from tiered_kv.system.threads import start_thread

PART_BYTES: Final = 4 << 20
"""The bytes that one call collapses, or one huge page if that is larger."""
FAILURES_MAX: Final = 32
"""So many parts that fail one after another end it: the next ones would fail, too."""
PASSES_MAX: Final = 4
"""How often the thread tries a part whose pages were in use, as those of a running transfer are."""
_PAUSE_S: Final = 1.0  # between two passes
_GIVE_WAY_S: Final = 0.001
NICE: Final = 10
"""Nice value of threads that allocate or collapse: the server and the engines get the processors first."""
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25  # not in the mmap module
_PAGEMAP_SCAN: Final = 0xC0606610  # ioctl(2), with the structure pm_scan_arg: admin-guide/mm/pagemap
_SCAN: Final = struct.Struct("12Q")
_WALK_END: Final = 4  # the field of it that says where the kernel has stopped
_MAPPED_HUGE: Final = 1 << 3 | 1 << 6  # PAGE_IS_PRESENT and PAGE_IS_HUGE
_SCANNED_BYTES: Final = 1 << 30
"""The bytes that one call looks at. Meanwhile, up to 2 ms, no thread of the process can map memory."""
_REGIONS_MAX: Final = 512
_READ_BYTES: Final = 1 << 20
_MAPPING: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ", re.M)
_HUGE: Final = re.compile(rb"^(?:ShmemPmdMapped|AnonHugePages|Shared_Hugetlb|Private_Hugetlb): *(\d+) kB", re.M)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Collapse:
    """Moves the pages of a shared mapping into huge ones, part by part. Any thread may call; one part each at a time.

    Args:
        address: Where the memory begins, in a writable mapping of shared memory.
        size_bytes: Its size.
        page_bytes: The size of a huge page; also an attribute.

    Attributes:
        whole_bytes: The bytes of all huge pages that fit into the memory.
        part_bytes: The size of a part: whole huge pages.
        is_over: Whether further parts are not tried: the kernel refused, or too many failed.
    """

    def __init__(self, address: int, size_bytes: int, page_bytes: int) -> None:
        self._address, self._size_bytes, self.page_bytes = address, size_bytes, page_bytes
        begin, end = self._whole_pages(0, size_bytes)
        self.whole_bytes = max(0, end - begin)
        self.part_bytes = max(PART_BYTES, page_bytes)
        self.is_over = not self.whole_bytes
        self._error = 0
        """The number of the last error; 0 if there was none."""
        self._failures = 0  # parts that have failed since the last success
        self._has_succeeded = False

    def part(self, offset: int, length: int) -> bool:
        """Allocate and collapse the huge pages that lie wholly in a part; return whether the kernel had no objection.

        Where it objects, some pages of the part may be allocated.
        """
        begin, end = self._whole_pages(offset, length)
        if self.is_over or begin >= end:
            return not self.is_over
        try:
            for page in range(begin, end, self.page_bytes):
                _advise(page, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
            _advise(begin, end - begin, _MADV_COLLAPSE)
            _advise(begin, end - begin, _MADV_POPULATE_READ)  # some kernels map a new huge page at the next touch only
        except OSError as error:
            self._error = error.errno or 0
            self._failures += 1
            # Before Linux 6.1, or where a process may have no huge pages, EINVAL is the answer to every call.
            is_refused = self._error in (errno.EINVAL, errno.ENOSYS, errno.EPERM) and not self._has_succeeded
            self.is_over = is_refused or self._failures >= FAILURES_MAX
            return False
        self._failures, self._has_succeeded = 0, True
        return True

    def all_parts(self, may_go_on: Callable[[float], bool]) -> None:
        """Collapse all parts on this thread, and try those again whose pages were in use.

        Args:
            may_go_on: Called before each part with 0.0, and before parts are tried again with the seconds to wait.
        """
        left = list(range(0, self._size_bytes, self.part_bytes))
        for number in range(PASSES_MAX):
            if not left or self.is_over or not may_go_on(_PAUSE_S if number else 0.0):
                return
            left = [offset for offset in left if not (may_go_on(0.0) and self.part(offset, self.part_bytes))]

    def within(self, limit_s: float) -> None:
        """Collapse all parts on this thread, as far as the time suffices."""
        end_s = time.monotonic() + limit_s

        def may_go_on(wait_s: float) -> bool:
            time.sleep(wait_s)
            return time.monotonic() < end_s

        self.all_parts(may_go_on)

    def count(self) -> int:
        """Return how many bytes the kernel has mapped by huge pages in this process."""
        return huge_bytes(self._address, self._size_bytes)

    def advice(self) -> str:
        """Return why a part has failed, and the remedy; "" if none has."""
        return advice_for(self._error) if self._error else ""

    def _whole_pages(self, offset: int, length: int) -> tuple[int, int]:
        """Return the addresses between which whole huge pages lie, within a part."""
        begin, end = self._address + offset, self._address + min(offset + length, self._size_bytes)
        return -(-begin // self.page_bytes) * self.page_bytes, end // self.page_bytes * self.page_bytes


class CollapseThread:
    """One thread that collapses allocated memory behind the start, and gives way to all others.

    Args:
        collapse: What it collapses.
        on_end: Called on that thread at the end, unless `close` came before.

    Raises:
        ResourceError: The system gives no thread.
    """

    def __init__(self, collapse: Collapse, on_end: Callable[[], None]) -> None:
        self._collapse, self._on_end = collapse, on_end
        self._closed = threading.Event()
        self._thread = start_thread(self._run, "tiered-kv-huge-pages")

    def close(self) -> None:
        """Stop. It waits for one part at most."""
        self._closed.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # only this thread's
        self._collapse.all_parts(self._may_go_on)
        if not self._closed.is_set():
            self._on_end()

    def _may_go_on(self, wait_s: float) -> bool:
        give_way(_GIVE_WAY_S)
        return not self._closed.wait(wait_s)


def huge_bytes(address: int, size_bytes: int) -> int:
    """Return how many bytes of this process's memory, from `address` on, the kernel has mapped by huge pages."""
    try:
        return _scanned(address, size_bytes)
    except OSError:
        return _in_smaps(address, size_bytes)


def _scanned(address: int, size_bytes: int) -> int:
    """Return `huge_bytes`, by a look at this memory only. Raise OSError before Linux 6.7."""
    regions = array("Q", bytes(_REGIONS_MAX * 3 * 8))  # each with begin, end and kind
    at, end, found = address & -mmap.PAGESIZE, -(-(address + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE, 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        while at < end:
            until, place = min(at + _SCANNED_BYTES, end), regions.buffer_info()[0]
            kinds = 0, _MAPPED_HUGE, 0, _MAPPED_HUGE
            asked = bytearray(_SCAN.pack(_SCAN.size, 0, at, until, 0, place, _REGIONS_MAX, 0, *kinds))
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked)
            found += sum(regions[1 : 3 * count : 3]) - sum(regions[0 : 3 * count : 3])
            before, at = at, _SCAN.unpack(asked)[_WALK_END]
            if at <= before:  # a kernel that stands still would be asked for ever
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return min(found, size_bytes)


def _in_smaps(address: int, size_bytes: int) -> int:
    """Return `huge_bytes`, by a look at every page of the process: 3 s for 100 GiB of small ones."""
    found = 0
    text = _read("/proc/self/smaps")
    mappings = list(_MAPPING.finditer(text))
    for at, match in enumerate(mappings):
        begin, end = int(match[1], 16), int(match[2], 16)
        if begin < address + size_bytes and end > address:
            described = text[match.end() : mappings[at + 1].start() if at + 1 < len(mappings) else len(text)]
            found += sum(int(number) << 10 for number in _HUGE.findall(described))
    return min(found, size_bytes)


def refusal(page_bytes: int) -> str:
    """Try one huge page of shared memory, and return why this process gets none, and the remedy; "" if it gets one."""
    if not page_bytes:
        most = format_bytes(COLLAPSED_BYTES_MAX)
        return f"this machine has none, or larger ones than {most}, or shmem_enabled is 'deny'; reserve huge pages"
    try:
        fd = os.memfd_create("tiered-kv-probe", os.MFD_CLOEXEC)
    except OSError as error:
        return str(error)
    try:
        os.ftruncate(fd, page_bytes)
        mapping, start = map_aligned(page_bytes, aligned_to([page_bytes], page_bytes), fd=fd)
        with mapping:
            collapse = Collapse(ctypes.addressof(ctypes.c_char.from_buffer(mapping, start)), page_bytes, page_bytes)
            collapse.part(0, page_bytes)
            return "" if collapse.count() else collapse.advice() or advice_for(errno.EINVAL)
    except (OSError, OverflowError) as error:
        return str(error)
    finally:
        os.close(fd)


def advice_for(number: int) -> str:
    """Return what to do about an error of the kernel."""
    if number == errno.ENOMEM:
        return "free memory has no room for huge pages: sysctl vm.compact_memory=1, and start anew"
    if number == errno.EAGAIN:
        return "pages were in use: start anew, before the engine's transfers"
    if number in (errno.EBUSY, errno.EFAULT):
        return "a limit of memory left no room: raise it, and start anew"
    return "this kernel makes no huge pages of shared memory: use Linux 6.1 or later, with shmem_enabled not 'deny'"


def describe(found_bytes: int, size_bytes: int) -> str:
    """Return the beginning of the log's line."""
    return f"{rounded_bytes(found_bytes)} of the rows' {rounded_bytes(size_bytes)} are on huge pages"


def _advise(address: int, length: int, advice: int) -> None:
    if _libc.madvise(address, length, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _read(path: str) -> bytes:
    parts = []
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            parts.append(part)
    return b"".join(parts)
