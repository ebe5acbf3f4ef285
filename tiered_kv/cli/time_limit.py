"""Calls of a verb that end in time, even if a mount or a device hangs.

A verb calls `TimeLimit.run` on the main thread, which makes the call on a new thread. A thread that hangs is left
behind. The kernel may keep it, and so the process, until the device answers. By then the command has printed its
results.
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
"""How long a call on a directory may go on after its time: most calls end by themselves, with a better message."""
_SERVER_GRACE_S: Final = 60.0
"""The same for a tier without a directory: its requests have limits of their own."""
_POLL_S: Final = 0.05


class TimeLimit:
    """How long a call may take. The call's own thread begins each part with a new limit; the caller's thread waits."""

    def __init__(self, limit_s: float) -> None:
        self.begin(limit_s)

    def begin(self, limit_s: float) -> None:
        """Begin a part of the call that may take `limit_s` seconds."""
        self._limit_s, self._end_s = limit_s, time.monotonic() + limit_s

    def run(self, work: Callable[[], T], settings: TierSettings) -> T:
        """Return what `work` returns, or raise what it raises.

        Raises:
            TierUnavailableError: It has not ended in time; the message has the tier's directory.
            ResourceError: The system gives no thread.
        """
        from_directory = settings.storage_facts().from_directory
        grace_s = _GRACE_S if from_directory else _SERVER_GRACE_S
        future: Future[T] = Future()
        ended = threading.Event()
        start_thread(partial(_run, future, work, ended), f"tiered-kv-{settings.name}-command")
        while not ended.wait(_POLL_S):  # so that Ctrl-C is noticed
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
