"""How long a thread stood ready to run while others had the processors."""

from __future__ import annotations

import os

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
