"""The idle poll: an engine or program without requests notices the end of its server, and frees its memory.

`AttachedEngineManager`, an attached program and the host tier start one. It polls on a thread of its own, only while
the manager has no request. It holds a lock, and so does every other call that may run without a request.
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, suppress
from typing import Any, Final

from tiered_kv.errors import ResourceError
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
        with suppress(ResourceError):  # if there is no thread, the next call notices the server's end
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
            except Exception:  # the thread goes on: if it ended, a dead server's memory would be kept for good
                if limit.take() is not None:
                    _log.exception("the connection to the host's cache: an unexpected error; %s", limit.about)
