"""The managers of a stack that records: each shows the recorder what its requests load and store, and is one otherwise.

The engine's scheduler calls, on the manager's thread. What must stay true: a call costs the recorder one or two
microseconds, and some nanoseconds for each key. A lookup costs nothing: what a request asked for is what it loads, and
what it computes and stores instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext, RequestOffloadingContext
from tiered_kv.hints import SESSION_KEY
from tiered_kv.metrics.step_timer import timed
from tiered_kv.tiering.audit.manager import AuditedManager
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.recording.recorder import Recorder
from tiered_kv.tiering.requests import RequestState

_SESSION_CHARACTERS_MAX: Final = 1024


class RecordingManager(TieringOffloadingManager):
    """Records its requests.

    Args:
        recorder: Takes them; `shutdown` closes it.
        is_program: Whether a program calls, whose `put` may name blocks that its `get` has loaded. Then a block that is
            stored already is not noted again.
        arguments, settings: As in the class that it extends.
    """

    def __init__(self, recorder: Recorder, is_program: bool, *arguments: Any, **settings: Any) -> None:  # Any: as there
        super().__init__(*arguments, **settings)
        self._recorder = recorder
        self._is_program = is_program
        self.registry.add(recorder.measure)

    @timed
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        answer = super().on_new_request(req_context)
        if req_context.req_id:
            hints = self._requests.state_of(req_context).hints
            self._recorder.begin(req_context.req_id, session_of(req_context), hints, self._clock())
        return answer

    @timed
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if not self._is_program:
            self._recorder.use(req_context.req_id, keys)
        elif output is not None:
            self._recorder.use(req_context.req_id, output.keys_to_store)
        return output

    def store_granted(self, keys: Sequence[OffloadKey], rows: Sequence[int], req_context: ReqContext) -> list[int]:
        self._recorder.use(req_context.req_id, keys)
        return super().store_granted(keys, rows, req_context)

    @timed
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().touch(keys, req_context)
        self._recorder.use(req_context.req_id, keys)

    @timed
    def on_request_finished(self, req_context: ReqContext) -> None:
        super().on_request_finished(req_context)
        self._recorder.end(req_context.req_id)

    def _note_load(self, keys: Collection[OffloadKey], state: RequestState) -> None:
        super()._note_load(keys, state)
        self._recorder.use(state.req_context.req_id, keys)

    def _forget_primary(self) -> None:
        super()._forget_primary()
        self._recorder.reset()

    def _close_tiers(self, timeout_s: float) -> None:
        super()._close_tiers(timeout_s)
        self._recorder.close()  # before the publisher of events, to which it gives its last requests


class RecordingAuditedManager(RecordingManager, AuditedManager):
    """Records its requests, and audits a share of them."""


def session_of(req_context: ReqContext) -> str:
    """Return the session that a request's parameters name; empty if they name none."""
    params = req_context.kv_transfer_params
    if params is None:
        return ""
    session = params.get(SESSION_KEY) if isinstance(params, Mapping) else None
    return session[:_SESSION_CHARACTERS_MAX] if isinstance(session, str) else ""
