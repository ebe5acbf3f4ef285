"""How long a thread stood ready to run while others had the processors."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")
_SCHEDSTAT = "/proc/thread-self/schedstat"
_BYTES_MAX = 128


class RunQueue:
    """The calling thread's time in the run queue: what a busy machine takes from it, and no code of this project can.

    The second number of schedstat, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst). Where the kernel
    does not tell it, it is 0, and times are judged as they are. To be made, read and closed by one thread.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def waited_s(self) -> float:
        """Return the seconds that the thread has stood in the queue since it began."""
        if self._fd < 0:
            return 0.0
        return int(os.pread(self._fd, _BYTES_MAX, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OtherThreads:
    """The time in the run queue of this process's threads but the calling one.

    Of these one may have the interpreter, and then everybody waits with it. A thread that waits for a server stands in
    no queue, so nothing of that is hidden.
    """

    def __init__(self) -> None:
        self._before_ns: dict[str, int] = {}
        self.note()

    def note(self) -> None:
        """Begin anew."""
        self._before_ns = self._now_ns()

    def queued_s(self) -> float:
        """Return the longest time that one of them has stood in the queue since `note`, and begin anew."""
        before_ns, self._before_ns = self._before_ns, self._now_ns()
        return max((ns - before_ns.get(thread, 0) for thread, ns in self._before_ns.items()), default=0) / 1e9

    @staticmethod
    def _now_ns() -> dict[str, int]:
        own, found = str(threading.get_native_id()), {}
        for thread in os.listdir(_TASKS):
            if thread != own:
                with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
                    found[thread] = int((_TASKS / thread / "schedstat").read_bytes().split()[1])
        return found
