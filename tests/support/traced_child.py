"""A child whose threads say who they are before they do anything, so that a tracer can be attached to one of them.

It is forked from a process with one thread. The role of a thread is its name without the project's prefix, and from the
second of that name on its number: `main`, `nvme-reclaimer`, `nvme-reclaimer#1`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

MAIN: Final = "main"
"""The role of the thread that does the work."""
ATTACH_S_MAX: Final = 30.0
"""How long it may take until a thread is there, or a tracer attached."""
_POLL_S: Final = 0.001
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class TracedChild:
    """A forked child that does `work`; it is killed at the latest when the context is left."""

    def __init__(self, work: Callable[[], None], *, wanted: str, log: Path) -> None:
        self.status = 0
        self.in_time = False
        self._wanted = wanted
        self._roles = _ThreadRoles(wanted)
        self._slot = -1
        self._has_ended = False
        self._error_path = log.with_suffix(".error")
        self._error_path.unlink(missing_ok=True)
        assert threading.active_count() == 1, "a process with several threads cannot be forked"
        self._pid = os.fork()
        if not self._pid:
            self._be_child(work)

    def __enter__(self) -> TracedChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def error(self) -> str:
        """The traceback of what the work raised."""
        return self._error_path.read_text() if self._error_path.exists() else ""

    def roles(self) -> list[tuple[str, int]]:
        """Return role and thread id of each thread so far."""
        return [(role, tid) for _, role, tid in self._roles.seen()]

    def wait_for_thread(self, timeout_s: float = ATTACH_S_MAX) -> int:
        """Return the id of the wanted thread once it waits, or 0 if the child ended without it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not self._poll():
            for slot, role, tid in self._roles.seen():
                if role == self._wanted:
                    self._slot = slot
                    return tid
            time.sleep(_POLL_S)
        self._end()
        return 0

    def let_go(self) -> None:
        """Let the wanted thread go on."""
        self._roles.let_go(self._slot)

    def wait(self, timeout_s: float) -> None:
        """Wait for the child's end; kill it when the time is up."""
        end_s = time.monotonic() + timeout_s
        while not self._poll():
            if time.monotonic() >= end_s:
                self._end()
                return
            time.sleep(_POLL_S)

    def _poll(self) -> bool:
        if not self._has_ended:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._has_ended = self.in_time = True
                self.status = os.waitstatus_to_exitcode(status)
        return self._has_ended

    def _end(self) -> None:
        if not self._poll():
            os.kill(self._pid, signal.SIGKILL)
            _, status = os.waitpid(self._pid, 0)
            self._has_ended = True
            self.status = os.waitstatus_to_exitcode(status)

    def _be_child(self, work: Callable[[], None]) -> None:
        status = 1
        try:
            if self._wanted:
                # Where only ancestors may trace (Yama's ptrace_scope 1), allow any: strace is this process's sibling.
                ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
                _announce_threads(self._roles)
                self._roles.enter(MAIN)
            work()
            status = 0
        except BaseException:
            self._error_path.write_text(traceback.format_exc())
        finally:
            os._exit(status)


class _ThreadRoles:
    """Which thread plays which role, in memory that the child shares with its parent."""

    _SLOT = struct.Struct("<II56s")  # thread id, whether it may go on, role
    _SLOTS_MAX = 256

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._memory = mmap.mmap(-1, self._SLOT.size * self._SLOTS_MAX)
        self._names: Counter[str] = Counter()
        self._count = 0
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """Say who this thread is; the wanted one waits until it may go on. In the child."""
        with self._lock:
            number = self._names[name]
            self._names[name] += 1
            slot, self._count = self._count, self._count + 1
        role = f"{name}#{number}" if number else name
        at = slot * self._SLOT.size
        self._SLOT.pack_into(self._memory, at, threading.get_native_id(), 0, role.encode()[:56])
        while role == self._wanted and not self._SLOT.unpack_from(self._memory, at)[1]:
            time.sleep(_POLL_S)

    def seen(self) -> Iterator[tuple[int, str, int]]:
        """Yield slot, role and thread id of each thread so far. In the parent."""
        for slot in range(self._SLOTS_MAX):
            tid, _, name = self._SLOT.unpack_from(self._memory, slot * self._SLOT.size)
            if not tid:
                return
            yield slot, name.rstrip(b"\0").decode(), tid

    def let_go(self, slot: int) -> None:
        """Let the thread in `slot` go on. In the parent."""
        struct.pack_into("<I", self._memory, slot * self._SLOT.size + 4, 1)


def _announce_threads(roles: _ThreadRoles) -> None:
    """Have every thread that is started from now on say who it is before it does anything."""

    def announce(*_: object) -> None:  # called first when the thread enters `run`
        sys.setprofile(None)
        roles.enter(threading.current_thread().name.removeprefix("tiered-kv-"))

    threading.setprofile(announce)
