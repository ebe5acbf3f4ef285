"""The time limit of a verb's call: the verb goes on in time, even if a mount or a device hangs.

A verb calls `TimeLimit.run` on the main thread. `run` makes the call on a new thread. If that thread hangs, it is left
behind: the kernel may keep the thread, and so the process, until the device answers. By then the command has printed
its results.

`system.threads.call_within` has one limit, known before the call. Here the call itself moves the limit while it runs:
a check begins a part with a new limit for each namespace. And the waiting main thread notices Ctrl-C.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from tiered_kv.config.settings import TierSettings
from tiered_kv.errors import TierUnavailableError
from tiered_kv.system.threads import start_thread

T = TypeVar("T")

_GRACE_S: Final = 3.0
"""Seconds that a call on a directory may go on after its limit. Most calls then end by themselves, with a better
message."""
_SERVER_GRACE_S: Final = 60.0
"""Seconds that a call on a server may go on after its limit: each request to a server has a limit of its own."""
_POLL_S: Final = 0.05


class TimeLimit:
    """How long a call may take. The thread of the call begins each part with a new limit; the caller's thread waits."""

    def __init__(self, limit_s: float) -> None:
        self.begin(limit_s)

    def begin(self, limit_s: float) -> None:
        """Begin a part of the call that may take `limit_s` seconds."""
        self._limit_s, self._end_s = limit_s, time.monotonic() + limit_s

    def run(self, work: Callable[[], T], settings: TierSettings) -> T:
        """Return what `work` returns, or raise what it raises.

        Raises:
            TierUnavailableError: `work` has not ended in time; the message has the tier's directory.
            ResourceError: The system gives no thread.
        """
        from_directory = settings.storage_facts().from_directory
        grace_s = _GRACE_S if from_directory else _SERVER_GRACE_S
        future: Future[T] = Future()
        ended = threading.Event()
        start_thread(partial(_run, future, work, ended), f"tiered-kv-{settings.name}-command")
        while not ended.wait(_POLL_S):  # short waits, so that the main thread notices Ctrl-C
            if time.monotonic() >= self._end_s + grace_s:
                advice = "; a mount or a device may hang" if from_directory else ""
                message = f"no answer in {self._limit_s:g} s{from_directory}{advice}"
                raise TierUnavailableError(message, tier=settings.name)
        try:
            return future.result()
        finally:
            del future


def _run(future: Future[T], work: Callable[[], T], ended: threading.Event) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    ended.set()
