"""The idle poll: an engine or program without requests notices the end of its server, and frees its memory."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from tiered_kv.base import ReqContext
from tiered_kv.errors import ResourceError
from tiered_kv.server.attach import Attachment
from tiered_kv.server.attached_request import AttachedRequest
from tiered_kv.server.client import AttachedManager
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.system.threads import start_thread

_PAUSE_S: Final = 0.5

_log = logging.getLogger(__name__)


class IdlePoll:
    """Polls a manager on a thread, while it has no request.

    Args:
        manager: Every other call that may run while it has no request holds `lock`.
    """

    def __init__(self, manager: AttachedManager, lock: AbstractContextManager[Any]) -> None:
        self._manager = manager
        self._lock = lock
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        with suppress(ResourceError):  # without it, the next call notices what has become of the server
            self._thread = start_thread(self._run, "tiered-kv-idle")

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        limit = LogLimit()
        while not self._over.wait(_PAUSE_S):
            try:
                with self._lock:
                    if self._manager.is_unused and not self._over.is_set():
                        self._manager.poll()
            except Exception:  # without this thread, a dead server's memory would be kept for good
                if limit.take() is not None:
                    _log.exception("the connection to the host's cache: an unexpected error; %s", limit.about)


class EngineManager(AttachedManager):
    """The manager of an engine that makes no steps while it has no requests."""

    def __init__(self, attachment: Attachment) -> None:
        self._lock = threading.RLock()
        super().__init__(attachment)
        self._idle_poll = IdlePoll(self, self._lock)

    def _begin(self, req_context: ReqContext) -> AttachedRequest:
        with self._lock:
            return super()._begin(req_context)

    def _end_if_over(self, request: AttachedRequest) -> None:
        with self._lock:
            super()._end_if_over(request)

    def on_schedule_end(self) -> None:
        with self._lock:
            super().on_schedule_end()

    def reset_cache(self) -> None:
        with self._lock:
            super().reset_cache()

    def shutdown(self, timeout_s: float = 5.0) -> None:
        self._idle_poll.stop()
        super().shutdown(timeout_s)
