"""System calls that are recorded, fail, return a false success, or kill their process.

strace(1) counts the calls of each thread separately, and a thread can be attached to as soon as it begins. So a call is
named by the role of its thread, its name, and a number; a repeatable program makes the same calls in every run.

    calls = record(work, log=path)
    ended = run_with_fault(work, Fault.kill(calls[0]), log=path)

`work` runs in a forked child of this process, which must have one thread. It needs strace, and the right to trace a
child (`missing_for_tracing`).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHANGES: Final = (
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("open", "openat", "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("unlink", "unlinkat", "rmdir", "utimensat", "flock"),
)
"""Calls that change a disk, or its locks."""
READS: Final = ("read", "pread64", "preadv", "preadv2", "getdents64", "stat", "lstat", "fstat", "newfstatat", "statx")
SENDS: Final = ("sendto", "sendmsg", "write", "writev", "connect")
"""Calls that send to a server."""

RUN_S_MAX: Final = 300.0
"""For a run of `work`: longer than the sum of its timeouts."""
_MAIN: Final = "main"
"""The role of the thread that does the work."""
_ATTACH_S_MAX: Final = 30.0
"""How long a thread may take to start, or a tracer to attach."""
_POLL_S: Final = 0.001
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)
_LOG_S_MAX: Final = 30.0
"""How long strace may run once its tracees have ended: calls missing in its log count as not made."""

_LINE = re.compile(r"(?:(?P<tid>\d+) +)?(?P<name>[a-z_0-9]+)\((?P<text>.*)$")
_RESUMED = re.compile(r"(?:(?P<tid>\d+) +)?<\.\.\. (?P<name>[a-z_0-9]+) resumed>(?P<text>.*)$")
_RESULT = re.compile(r"= (-?\d+)")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that was made."""

    role: str  # its thread's
    name: str
    number: int  # of the calls of that name in its thread, from 1
    text: str  # its arguments as strace shows them, descriptors with their paths
    result: int | None  # None if it did not return

    @property
    def makes_file(self) -> bool:
        """Whether it creates the file if it is missing."""
        return "O_CREAT" in self.text or self.name == "creat"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call, or to all from one on."""

    role: str
    name: str
    number: int
    what: str  # for strace, as in its `inject=`; "kill" for the end of the process
    onwards: bool = False  # also to all later calls of that name in that thread

    @classmethod
    def kill(cls, call: Call) -> Fault:
        """Kill the process when it makes the call, which has no effect."""
        return cls(call.role, call.name, call.number, "kill")

    @classmethod
    def fail(cls, call: Call, error: str, *, onwards: bool = False) -> Fault:
        """Let the call have no effect and fail with an error such as "EIO"."""
        return cls(call.role, call.name, call.number, f"error={error}", onwards)

    @classmethod
    def lie(cls, call: Call) -> Fault:
        """Let the call have no effect and return the recorded result."""
        return cls(call.role, call.name, call.number, f"retval={call.result}")

    @property
    def kills(self) -> bool:
        return self.what == "kill"

    @property
    def expression(self) -> str:
        """strace's option."""
        what = "signal=KILL" if self.kills else self.what
        return f"inject={self.name}:{what}:when={self.number}{'+' if self.onwards else ''}"

    def __str__(self) -> str:
        return f"{self.what} at {self.role}/{self.name}#{self.number}{' and later' if self.onwards else ''}"


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    in_time: bool
    was_hit: bool
    error: str


@functools.cache
def missing_for_tracing() -> str:
    """Return why system calls cannot be recorded and failed here; "" if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) >= (3 if os.geteuid() == 0 else 2):
        return "this system lets nobody attach to a process (Yama's ptrace_scope)"
    with tempfile.TemporaryDirectory() as folder:
        # In a child: a traced process must have one thread, and this one may have more.
        probe = subprocess.run(
            ["strace", "-o", f"{folder}/log", "-e", "inject=unlink,unlinkat:error=EIO", "rm", f"{folder}/none"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_ATTACH_S_MAX,
        )
    if "Input/output error" in probe.stderr:
        return ""
    return f"strace cannot inject faults here: {(probe.stderr.strip() or 'it had no effect').splitlines()[0]}"


def record(work: Callable[[], None], *, log: Path, names: Sequence[str]) -> list[Call]:
    """Run `work` in a child and return the calls that it made, thread by thread."""
    with TracedChild(work, wanted=_MAIN, log=log) as child:
        trace = ["-f", "-e", "trace=" + ",".join(f"?{name}" for name in names)]
        with _tracing(child.wait_for_thread(), log, trace):
            child.let_go()
            child.wait()
    if child.status or not child.in_time:
        raise RuntimeError(f"the program that was to be recorded ended with {child.status}: {child.error}")
    roles = {str(tid): role for _, role, tid in child.threads.seen()}
    return list(_parsed(log.read_text(errors="replace"), roles))


def run_with_fault(work: Callable[[], None], fault: Fault, *, log: Path) -> Ended:
    """Run `work` in a child with a fault."""
    log.write_text("")
    with TracedChild(work, wanted=fault.role, log=log) as child:
        tid = child.wait_for_thread(RUN_S_MAX)
        if tid:
            with _tracing(tid, log, ["-e", f"trace={fault.name}", "-e", fault.expression]):
                child.let_go()
                child.wait()
    seen = log.read_text(errors="replace")
    killed = child.status == -signal.SIGKILL and child.in_time
    was_hit = killed if fault.kills else "(INJECTED)" in seen
    return Ended(child.status, child.in_time, was_hit, child.error)


def run_plain(work: Callable[[], None], *, log: Path) -> Ended:
    """Run `work`, which brings its fault, in a child."""
    with TracedChild(work, wanted="", log=log) as child:
        child.wait()
    return Ended(child.status, child.in_time, True, child.error)


@contextmanager
def _tracing(tid: int, log: Path, options: Sequence[str]) -> Iterator[None]:
    """Trace a thread from the start of the block."""
    command = ["strace", "-y", "-s", "0", "-e", "signal=none", *options, "-o", str(log), "-p", str(tid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        try:
            assert strace.stderr is not None
            line = strace.stderr.readline()
            if "attached" not in line:
                raise RuntimeError(f"strace cannot attach: {line.strip()}")
            yield
            strace.wait(_LOG_S_MAX)
        except subprocess.TimeoutExpired:  # its tracees are gone
            pass
        finally:
            strace.kill()


def _parsed(text: str, roles: dict[str, str]) -> Iterator[Call]:
    numbers: Counter[tuple[str, str]] = Counter()
    unfinished: dict[tuple[str, str], tuple[int, str]] = {}
    for line in text.splitlines():
        if resumed := _RESUMED.match(line):
            role = roles.get(resumed["tid"], "")
            number, begun = unfinished.pop((role, resumed["name"]), (0, ""))
            if number:
                yield Call(role, resumed["name"], number, begun + resumed["text"], _result_of(resumed["text"]))
        elif begun_line := _LINE.match(line):
            role, name, rest = roles.get(begun_line["tid"], ""), begun_line["name"], begun_line["text"]
            if not role:
                continue
            numbers[role, name] += 1
            if rest.endswith("<unfinished ...>"):
                unfinished[role, name] = (numbers[role, name], rest.removesuffix("<unfinished ...>"))
            else:
                yield Call(role, name, numbers[role, name], rest, _result_of(rest))


def _result_of(text: str) -> int | None:
    found = _RESULT.search(text[text.rfind(")") :])
    return int(found[1]) if found else None


# The child.


class TracedChild:
    """A forked child that runs `work`; the end of the context kills it, and so does the end of this process.

    Its threads report their roles before they do anything, so that a tracer can be attached to one of them. The role
    is the name without the project's prefix; the second thread of a name gets a number: `nvme-reclaimer#1`.
    """

    def __init__(self, work: Callable[[], None], *, wanted: str, log: Path) -> None:
        self.status = 0
        self.in_time = False
        self._wanted = wanted
        self.threads = _ThreadRoles(wanted)
        self._slot = -1
        self._has_ended = False
        self._error_path = log.with_suffix(".error")
        self._error_path.unlink(missing_ok=True)
        assert threading.active_count() == 1, "a process with several threads cannot be forked"
        self.pid = os.fork()  # noqa: TID251 (the only thread)
        if not self.pid:
            self._be_child(work)

    def __enter__(self) -> TracedChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def error(self) -> str:
        """The traceback of an exception of `work`."""
        return self._error_path.read_text() if self._error_path.exists() else ""

    def wait_for_thread(self, timeout_s: float = _ATTACH_S_MAX) -> int:
        """Return the id of the wanted thread once it waits; 0 if the child ended without it."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not self._poll():
            for slot, role, tid in self.threads.seen():
                if role == self._wanted:
                    self._slot = slot
                    return tid
            time.sleep(_POLL_S)
        self._end()
        return 0

    def let_go(self) -> None:
        self.threads.let_go(self._slot)

    def wait(self) -> None:
        """Wait for the child's end; kill it after `RUN_S_MAX`."""
        end_s = time.monotonic() + RUN_S_MAX
        while not self._poll() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        self._end()

    def _poll(self) -> bool:
        if not self._has_ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._has_ended = self.in_time = True
                self.status = os.waitstatus_to_exitcode(status)
        return self._has_ended

    def _end(self) -> None:
        if not self._poll():
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self._has_ended = True
            self.status = os.waitstatus_to_exitcode(status)

    def _be_child(self, work: Callable[[], None]) -> None:
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # or it would wait for a dead tracer
            if self._wanted:
                # Where only ancestors may trace (Yama's ptrace_scope 1), allow any: strace is this process's sibling.
                ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
                _announce_threads(self.threads)
                self.threads.enter(_MAIN)
            work()
            status = 0
        except BaseException:
            self._error_path.write_text(traceback.format_exc())
        finally:
            os._exit(status)


class _ThreadRoles:
    """The roles of threads, in memory that the child shares with its parent."""

    _SLOT = struct.Struct("<II56s")  # thread id, whether it may go on, role
    _SLOTS_MAX = 256

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._memory = mmap.mmap(-1, self._SLOT.size * self._SLOTS_MAX)
        self._names: Counter[str] = Counter()
        self._count = 0
        self._lock = threading.Lock()

    def enter(self, name: str) -> None:
        """In the child: register this thread; the wanted one waits until it is released."""
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
        """In the parent: yield slot, role and thread id of each thread so far."""
        for slot in range(self._SLOTS_MAX):
            tid, _, name = self._SLOT.unpack_from(self._memory, slot * self._SLOT.size)
            if not tid:
                return
            yield slot, name.rstrip(b"\0").decode(), tid

    def let_go(self, slot: int) -> None:
        """In the parent: release the thread in `slot`."""
        struct.pack_into("<I", self._memory, slot * self._SLOT.size + 4, 1)


def _announce_threads(roles: _ThreadRoles) -> None:
    """Register every thread that is started from now on before it does anything."""

    def announce(*_: object) -> None:  # called first when the thread enters `run`
        sys.setprofile(None)
        roles.enter(threading.current_thread().name.removeprefix("tiered-kv-"))

    threading.setprofile(announce)
