"""Which class of manager a stack gets: one that audits, one that records, one that does both, or the plain one.

`open` calls it, on the thread that opens the stack. What must stay true: a stack without these settings imports nothing
of them, and its manager's calls cost nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from tiered_kv.config.stack_config import StackConfig
from tiered_kv.tiering.manager import TieringOffloadingManager

if TYPE_CHECKING:
    from tiered_kv.stack.exporters.events import EventPublisher
    from tiered_kv.tiering.audit.audit import AuditRules


def manager_type(
    config: StackConfig, events: EventPublisher | None, undo: ExitStack, *, is_program: bool
) -> Callable[..., TieringOffloadingManager]:
    """Return the class of the manager. `undo` closes a recorder that is opened here; later the manager closes it."""
    topic = None if config.events is None else config.events.recording
    if config.record is not None or topic is not None:
        from tiered_kv.tiering.recording.manager import RecordingAuditedManager, RecordingManager
        from tiered_kv.tiering.recording.recorder import Recorder, RequestSink, open_trace

        sinks: list[RequestSink] = []
        if config.record is not None:
            sinks.append(open_trace(config.record, config.block.tokens))
        if events is not None and topic is not None:
            from tiered_kv.stack.exporters.event_requests import PublishedRequests

            sinks.append(PublishedRequests(events, topic, config.block.tokens))
        recorder = Recorder(*sinks)
        undo.callback(recorder.close)
        if config.audit:
            return partial(RecordingAuditedManager, recorder, is_program, _audit_rules(config))
        return partial(RecordingManager, recorder, is_program)
    if config.audit:
        from tiered_kv.tiering.audit.manager import AuditedManager

        return partial(AuditedManager, _audit_rules(config))
    return TieringOffloadingManager


def _audit_rules(config: StackConfig) -> AuditRules:
    from tiered_kv.tiering.audit.audit import AuditRules

    return AuditRules(config.audit, config.audit_tolerance, config.audit_action == "stop", config.namespace.dtype)
