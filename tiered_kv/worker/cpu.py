"""Copies within CPU memory, for an engine that has its KV cache there.

The handlers of `handlers.py` submit plans on the engine's thread. One thread of each copier copies them, in the order
of their submission. A copy that fails is reported as failed, and changes no later one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from tiered_kv.errors import ResourceError
from tiered_kv.system.threads import DaemonThreads
from tiered_kv.worker.plan import CopyPlan

_log = logging.getLogger(__name__)


class CpuCopier:
    """Copies within the CPU's memory, each run by one `memmove`, on a thread of its own called `name`.

    The thread keeps the interpreter lock for a whole job. ctypes usually releases it for each call. While the engine's
    thread runs Python, the copying thread would then wait five milliseconds (the switch interval) after each run, and a
    run takes microseconds. So a job delays the engine's Python by the job's own copying at most.
    """

    def __init__(self, name: str) -> None:
        self._threads = DaemonThreads(name, 1)

    def submit(self, plan: CopyPlan) -> CpuCopy:
        try:
            return CpuCopy(self._threads.submit(copy_runs, plan))
        except ResourceError:  # no thread: the engine's thread copies, which delays it no longer
            copied: Future[float] = Future()
            copied.set_result(copy_runs(plan))
            return CpuCopy(copied)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._threads.join(math.inf)


class CpuCopy:
    """A plan on the copier's thread."""

    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def has_ended(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        # Not `concurrent.futures.wait`: it never returns for futures that a pool cancelled at its shutdown.
        with contextlib.suppress(CancelledError):
            self._future.exception()

    def seconds(self) -> float | None:
        """Return how long the ended copy took; None if it failed or was dropped."""
        if self._future.cancelled():
            return None
        error = self._future.exception()
        if error is not None:
            _log.warning("a copy in the CPU's memory failed: %s: %s", type(error).__name__, error)
            return None
        return self._future.result()


def copy_runs(plan: CopyPlan) -> float:
    """Copy all runs of a plan, and return how many seconds it took."""
    began = time.perf_counter()
    memmove = _memmove()
    runs = zip(plan.destinations.tolist(), plan.sources.tolist(), plan.lengths.tolist(), strict=True)
    for destination, source, length in runs:
        memmove(destination, source, length)
    return time.perf_counter() - began


@functools.cache
def _memmove() -> Callable[[int, int, int], None]:
    memmove = ctypes.PyDLL(None).memmove  # PyDLL: calls keep the interpreter lock
    memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memmove.restype = None
    return memmove
