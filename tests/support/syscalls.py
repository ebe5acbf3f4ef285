"""System calls as a proof wants them: recorded, failed, answered with a lie, or the last ones of their process.

strace(1) counts the calls of each thread by themselves, and a thread can be attached to as soon as it begins. So a call
is named by the role of its thread (`traced_child`), the call's name, and a number, and a program that does the same
thing in every run makes the same calls in every run.

    calls = record(work, log=path)                                     # what `work` does to the disk
    ended = run_with_fault(work, Fault.kill(calls[0]), log=path)       # ... and is killed there

`work` runs in a forked child of this process, which may have one thread only. It needs strace, and the right to trace a
child (`missing_for_tracing`).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.traced_child import ATTACH_S_MAX, MAIN, TracedChild

CHANGES: Final = (
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("open", "openat", "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("unlink", "unlinkat", "rmdir", "utimensat", "flock"),
)
"""Calls that change a disk, or who may change it."""
READS: Final = ("read", "pread64", "preadv", "preadv2", "getdents64", "stat", "lstat", "fstat", "newfstatat", "statx")
SENDS: Final = ("sendto", "sendmsg", "write", "writev", "connect")
"""Calls by which something leaves for a server."""

_LOG_S_MAX: Final = 30.0
"""How long strace may go on once its tracees have ended: what is missing in its log counts as not having happened."""

_LINE = re.compile(r"(?:(?P<tid>\d+) +)?(?P<name>[a-z_0-9]+)\((?P<text>.*)$")
_RESUMED = re.compile(r"(?:(?P<tid>\d+) +)?<\.\.\. (?P<name>[a-z_0-9]+) resumed>(?P<text>.*)$")
_RESULT = re.compile(r"= (-?\d+)")


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that was made.

    Args:
        role: Its thread's.
        name: Which call.
        number: The how manieth of that name in its thread, from 1.
        text: Its arguments as strace shows them, descriptors with their paths.
        result: What it returned; None if it did not return.
    """

    role: str
    name: str
    number: int
    text: str
    result: int | None

    @property
    def makes_file(self) -> bool:
        """Whether it opens a file that is made if it is missing."""
        return "O_CREAT" in self.text or self.name == "creat"


@dataclass(frozen=True, slots=True)
class Fault:
    """What shall happen to one call, or to all from one on.

    Args:
        role, name, number: Which, as in `Call`.
        what: What strace shall do, as in its `inject=`; "kill" for the end of the process.
        onwards: Whether it also happens to all later calls of that name in that thread.
    """

    role: str
    name: str
    number: int
    what: str
    onwards: bool = False

    @classmethod
    def kill(cls, call: Call) -> Fault:
        """Kill the process when it makes the call, which does nothing any more."""
        return cls(call.role, call.name, call.number, "kill")

    @classmethod
    def fail(cls, call: Call, error: str, *, onwards: bool = False) -> Fault:
        """Let the call do nothing and fail with an error such as "EIO"."""
        return cls(call.role, call.name, call.number, f"error={error}", onwards)

    @classmethod
    def lie(cls, call: Call) -> Fault:
        """Let the call do nothing and return what it returned when it was recorded."""
        return cls(call.role, call.name, call.number, f"retval={call.result}")

    @property
    def kills(self) -> bool:
        """Whether the process ends by it."""
        return self.what == "kill"

    @property
    def expression(self) -> str:
        """What strace is told."""
        what = "signal=KILL" if self.kills else self.what
        return f"inject={self.name}:{what}:when={self.number}{'+' if self.onwards else ''}"

    def __str__(self) -> str:
        return f"{self.what} at {self.role}/{self.name}#{self.number}{' and later' if self.onwards else ''}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended."""

    status: int
    in_time: bool
    was_hit: bool
    error: str


@functools.cache
def missing_for_tracing() -> str:
    """Return why system calls cannot be recorded and failed here, or an empty string."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and int(scope.read_text()) >= (3 if os.geteuid() == 0 else 2):
        return "this system lets nobody attach to a process (Yama's ptrace_scope)"
    with tempfile.TemporaryDirectory() as folder:
        # In a child of its own: a process that is traced must have one thread, and this one may have more.
        probe = subprocess.run(
            ["strace", "-o", f"{folder}/log", "-e", "inject=unlink,unlinkat:error=EIO", "rm", f"{folder}/none"],
            capture_output=True,
            text=True,
            check=False,
            timeout=ATTACH_S_MAX,
        )
    if "Input/output error" in probe.stderr:
        return ""
    return f"strace cannot inject faults here: {(probe.stderr.strip() or 'it had no effect').splitlines()[0]}"


def record(
    work: Callable[[], None], *, log: Path, names: Sequence[str] = CHANGES, timeout_s: float = 300.0
) -> list[Call]:
    """Have `work` done in a child and return the calls that it made, thread by thread."""
    with TracedChild(work, wanted=MAIN, log=log) as child:
        trace = ["-f", "-e", "trace=" + ",".join(f"?{name}" for name in names)]
        with _tracing(child.wait_for_thread(), log, trace):
            child.let_go()
            child.wait(timeout_s)
    if child.status or not child.in_time:
        raise RuntimeError(f"the program that was to be recorded ended with {child.status}: {child.error}")
    roles = {str(tid): role for role, tid in child.roles()}
    return list(_parsed(log.read_text(errors="replace"), roles))


def run_with_fault(work: Callable[[], None], fault: Fault, *, log: Path, timeout_s: float = 300.0) -> Ended:
    """Have `work` done in a child with a fault in it, and return how the child ended."""
    log.write_text("")
    with TracedChild(work, wanted=fault.role, log=log) as child:
        tid = child.wait_for_thread(timeout_s)
        if tid:
            with _tracing(tid, log, ["-e", f"trace={fault.name}", "-e", fault.expression]):
                child.let_go()
                child.wait(timeout_s)
    seen = log.read_text(errors="replace")
    killed = child.status == -signal.SIGKILL and child.in_time
    was_hit = killed if fault.kills else "(INJECTED)" in seen
    return Ended(child.status, child.in_time, was_hit, child.error)


def run_plain(work: Callable[[], None], *, log: Path, timeout_s: float = 300.0) -> Ended:
    """Have `work`, which brings its own fault, done in a child, and return how the child ended."""
    with TracedChild(work, wanted="", log=log) as child:
        child.wait(timeout_s)
    return Ended(child.status, child.in_time, True, child.error)


@contextmanager
def _tracing(tid: int, log: Path, options: Sequence[str]) -> Iterator[None]:
    """Trace a thread; it is attached to when the block is entered."""
    command = ["strace", "-y", "-s", "0", "-e", "signal=none", *options, "-o", str(log), "-p", str(tid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        try:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            if "attached" not in said:
                raise RuntimeError(f"strace cannot attach: {said.strip()}")
            yield
            strace.wait(_LOG_S_MAX)
        except subprocess.TimeoutExpired:  # whatever keeps it: its tracees are gone
            pass
        finally:
            strace.kill()


def _parsed(text: str, roles: dict[str, str]) -> Iterator[Call]:
    """Yield the calls in a log of several threads."""
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
