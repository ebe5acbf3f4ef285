"""The manager that vLLM gets from a host's server: an attached manager, and the poll of an engine that is idle.

`tiered_kv_vllm.attached` opens it, and the scheduler's thread calls it. While the engine has no request, the thread of
`IdlePoll` polls. So each call that begins or ends a request, ends a step or resets holds the lock; lookups and
transfers need none, since they have a request.
"""

from __future__ import annotations

import threading

from tiered_kv.base import ReqContext
from tiered_kv.server.attach import Attachment
from tiered_kv.server.attached_request import AttachedRequest
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.idle import IdlePoll


class AttachedEngineManager(AttachedManager):
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
