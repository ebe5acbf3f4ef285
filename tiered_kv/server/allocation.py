"""The allocation of a server's rows: pages, from the first row on, before any engine may touch them.

The kernel charges a page to the container of the process that touches it first. It kills an engine whose container may
not have the page: by a SIGBUS if it is a reserved huge page, by the OOM killer otherwise. So the server touches each
page first, and hands out only the rows before the first byte that is not allocated. Where the system refuses a page,
the allocation ends.

`HostRegion` makes an allocation and starts it, on the thread that opens a stack. Its own threads run until the end, or
until `close`. Any thread may read the allocated rows.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import WeakSet

from tiered_kv.config.units import rounded_bytes
from tiered_kv.errors import ResourceError
from tiered_kv.system.collapse import NICE, Collapse
from tiered_kv.system.limits import Limit, Limits
from tiered_kv.system.threads import start_thread

CHUNK_BYTES: Final = 4 << 20
"""The bytes that one call of the kernel allocates. Meanwhile, a few milliseconds, the process can map no other
memory."""
FIRST_BYTES: Final = 64 << 20
"""Bytes that are allocated before the server's start continues: some tens of milliseconds."""
LOOK_AGAIN_S: Final = 2.0
"""Seconds between two looks while little memory is free, for example because an engine loads its model."""
LOOKS_MAX: Final = 300
"""Limit of such looks, 10 minutes in all: engines that pin the rows attach only after the allocation has ended."""
_THREADS: Final = 4
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in the mmap module

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_Room = Callable[[int], tuple[int, str]]

_looking = threading.Lock()  # guards `_all`; its holder looks for room, and gives it to one allocation
_all: WeakSet[RowAllocation] = WeakSet()
"""The allocations of this process without reserved pages: memory that one of them may take is not free for
another."""


class RowAllocation:
    """Allocates the pages of a mapping, in the background and without a change of their bytes.

    Args:
        fd: The file that is mapped.
        address: Where it is mapped, from its first byte on.
        size_bytes: Size of the file.
        page_bytes: Size of one of its pages.
        room: Gets the number of bytes that are needed; returns how many may be allocated now, and why no more. None if
            the file's pages are reserved.
        collapse: Makes huge pages of the mapping; None if that was not asked for.
        on_end: Called once, on any thread, when all rows are allocated or refused, but not after `close`.

    Attributes:
        refusal: Why the system refused a page; empty if it refused none.
        ready_bytes: All pages before this byte are allocated. It rises until `is_over`.
        is_over: Whether `ready_bytes` is final.
    """

    def __init__(
        self,
        fd: int,
        address: int,
        size_bytes: int,
        *,
        page_bytes: int,
        room: _Room | None = None,
        collapse: Collapse | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._collapse, self._on_end = collapse, on_end
        self._fd, self._address, self._size_bytes = fd, address, size_bytes
        self._chunk_bytes = max(CHUNK_BYTES, page_bytes, collapse.page_bytes if collapse else 0)
        self._room = room
        self._waiting = threading.Lock()  # one thread looks for room at a time, and waits for it
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards all below, and is never held across a call of the kernel
        self._next = 0  # offset of the next chunk
        self._end = size_bytes
        """No chunk begins at or after this offset. `close` and a refused page lower it."""
        self._finished: dict[int, int] = {}
        """Lengths of allocated chunks, by their offsets, after a chunk that is not allocated yet."""
        first_bytes = max(FIRST_BYTES, self._chunk_bytes)  # the opening of the stack has looked at the free memory
        self._allowed_bytes = size_bytes if room is None else min(size_bytes, first_bytes)
        self._looks = 0
        """How often it has looked since it waits for memory."""
        self._may_wait = False  # for free memory; not while the server starts
        self._done_bytes = 0  # in ended chunks
        self._running = 0  # threads that have not left, and `go_on`
        self._threads: list[threading.Thread] = []
        self.refusal = ""
        self.ready_bytes = 0
        self.is_over = False
        if room is not None:
            with _looking:
                _all.add(self)

    @property
    def _promised_bytes(self) -> int:
        """The bytes that it may allocate without another look, the running call included."""
        with self._lock:
            if self._end < self._size_bytes:
                return 0
            return min(self._allowed_bytes, self._end - self._next) + self._next - self._done_bytes

    def begin(self) -> None:
        """Allocate the memory of the first rows; call it once, and then look at `refusal`."""
        while self.ready_bytes < FIRST_BYTES and (chunk := self._take()):
            self._allocate_chunk(*chunk)

    def go_on(self) -> None:
        """Start to allocate the rest in the background, after `begin`.

        The threads log each tenth; the kernel takes the time, to clear the pages. While little memory is free, the
        threads wait. If the system gives no thread, the caller's thread allocates.
        """
        self._running, self._may_wait = _THREADS + 1, True
        with suppress(ResourceError):
            for number in range(_THREADS if self._next < self._end else 0):
                self._threads.append(start_thread(self._run, f"tiered-kv-prefault-{number}"))
        with self._lock:
            self._running -= _THREADS - len(self._threads)
        if not self._threads:
            self._may_wait = False
            self._work()
        self._leave()

    def close(self) -> None:
        """Stop. It waits for one chunk at most."""
        with self._lock:
            self._end = 0
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # only this thread's
        try:
            self._work()
        finally:
            self._leave()

    def _work(self) -> None:
        while chunk := self._take():
            self._allocate_chunk(*chunk)

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            is_last, is_short = not self._running, 0 < self._end < self._size_bytes
        if not is_last:
            return
        try:
            if self._end:
                self._on_end()
        finally:
            self.is_over = True  # engines with GPUs wait for it
        if is_short:
            ready, wanted = rounded_bytes(self.ready_bytes), rounded_bytes(self._size_bytes)
            advice = "free memory, or raise the limit, and start the server anew"
            _log.error("%s; only the rows in %s of %s are used; %s", self.refusal, ready, wanted, advice)

    def _take(self) -> tuple[int, int] | None:
        """Return the offset and the length of the next chunk, once there is room for it; None if no chunk is left."""
        with self._waiting:
            while True:
                with self._lock:
                    offset, length = self._next, min(self._chunk_bytes, self._end - self._next)
                    if length <= 0:
                        return None
                    if self._allowed_bytes >= length:
                        self._next += length
                        self._allowed_bytes -= length
                        return offset, length
                self._await_room(length)

    def _await_room(self, wanted: int) -> None:
        """Look how much memory is free. If it is too little, wait once; after `LOOKS_MAX` looks, end the allocation."""
        assert self._room is not None, "reserved pages have room"
        with _looking:
            promised = sum(each._promised_bytes for each in _all if each is not self)
            room_bytes, why = self._room(wanted + promised)  # reads files of the kernel
            room_bytes -= promised
            if room_bytes >= wanted:
                self._looks = 0
                with self._lock:
                    self._allowed_bytes = room_bytes
                return
        if promised:
            why += f", and {rounded_bytes(promised)} are for the rows of other namespaces"
        if not self._may_wait or self._looks >= LOOKS_MAX:
            self._refuse(self._next, why)
            return
        self._looks += 1
        if self._looks == 1:
            begun, size = rounded_bytes(self._next), rounded_bytes(self._size_bytes)
            _log.warning("%s: the server uses the rows in %s of %s until more are free", why, begun, size)
        self._closed.wait(LOOK_AGAIN_S)

    def _allocate_chunk(self, offset: int, length: int) -> None:
        try:
            if self._collapse is not None:
                self._collapse.part(offset, length)
            allocate(self._fd, self._address, offset, length)  # what the kernel has not put on huge pages
        except OSError as error:
            self._refuse(offset, error.strerror or str(error))
            return
        with self._lock:
            before = 10 * self.ready_bytes // self._size_bytes
            self._finished[offset] = length
            self._done_bytes += length
            while ready := self._finished.pop(self.ready_bytes, 0):
                self.ready_bytes += ready
            now = 10 * self.ready_bytes // self._size_bytes
        if now > before and (self._running or now == 10):
            _log.info("%d0%% of the rows' %s are allocated", now, rounded_bytes(self._size_bytes))

    def _refuse(self, offset: int, why: str) -> None:
        with self._lock:
            self._end = min(self._end, offset)
            self.refusal = self.refusal or f"the rows' memory cannot be allocated: {why}"


def allocate(fd: int, address: int, offset: int, length: int) -> None:
    """Allocate the pages of a part of a file, mapped at `address`; other threads run meanwhile.

    The call goes through the mapping, for which huge pages were requested. Before Linux 5.14 it goes through the file.

    Raises:
        OSError: The system refuses the pages. A touch of them would have killed the process by a signal.
    """
    try:
        populate(address + offset, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.posix_fallocate(fd, offset, length)


def populate(address: int, length: int) -> None:
    """Touch the pages of a part of a mapping (MADV_POPULATE_WRITE); see `allocate`."""
    if _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def charge_of(rows_bytes: int) -> str:
    """Return a warning for the log: without prefault, this process pays for the rows that it writes."""
    least = min(Limits().memory(), key=lambda each: each.amount, default=Limit(rows_bytes, "not known"))
    return (
        f"the server does not allocate its rows, so up to {rounded_bytes(rows_bytes)} of memory may count for this "
        f"process, whose limit is {rounded_bytes(least.amount)} ({least.where}); leave primary.prefault out of the "
        "server's file, or set it to true"
    )
