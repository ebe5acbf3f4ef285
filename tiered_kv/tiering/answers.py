"""Checks of the values that a tier returns: a third-party tier may return anything.

All users of a tier in this package call these functions, each on its own thread, before a value reaches the engine.
Each function returns a value of the right type, or raises `WrongValueError`. No value is converted by its truth: the
text "no" is true, and so is the coroutine of an `async` method.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tiered_kv.base import OffloadingEvent, OffloadKey
from tiered_kv.reasons import Reason
from tiered_kv.tiering.base import JobResult

_REASON = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""The form of a failure reason: a label of counters and metrics, not a sentence."""


class WrongValueError(TypeError):
    """A tier has returned a value of the wrong type. The error's text omits the value, which might be a secret."""

    def __init__(self, wanted: str, found: object) -> None:
        super().__init__(f"expected {wanted}, found {type(found).__name__}")


def tier_exceptions() -> tuple[type[BaseException], ...]:
    """Return the types of a tier's exceptions that the scheduler's thread catches. Python asks only after an exception.

    `KeyboardInterrupt` and `SystemExit` pass: a signal handler may have raised them while the tier was called.
    """
    cancelled = getattr(sys.modules.get("asyncio"), "CancelledError", Exception)  # the core does not import asyncio
    return Exception, GeneratorExit, cancelled


def checked_flag(value: object, wanted: str = "True or False") -> bool:
    """Return a bool, of Python or numpy."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise WrongValueError(wanted, value)


def checked_answer(answer: object) -> bool | None:
    """Return the answer of `lookup`."""
    return None if answer is None else checked_flag(answer, "True, False or None")


def checked_answers(answers: Any, count: int) -> list[bool | None]:  # Any: from a third-party tier
    """Return the answers of `lookup_many` for `count` keys."""
    listed = answers if isinstance(answers, list) else list(answers)
    if len(listed) != count:
        raise WrongValueError(f"{count} answers", answers)
    if listed.count(False) == count:  # this case is by far the most frequent
        return listed
    return listed if {*map(type, listed)} <= {bool, type(None)} else [*map(checked_answer, listed)]


def checked_result(result: object) -> JobResult:
    """Return a result of `get_finished`. If only its job's id is valid, the job has failed."""
    if not isinstance(result, JobResult):
        raise WrongValueError("a JobResult", result)
    job_id = result.job_id
    if isinstance(job_id, bool) or not isinstance(job_id, (int, np.integer)):
        raise WrongValueError("a JobResult with the job's id", job_id)
    try:
        keys = result.successful_keys
        if isinstance(keys, Mapping):  # perhaps from keys to their success
            raise WrongValueError("a collection of keys", keys)
        keys = None if keys is None else frozenset(checked_keys(keys))
        reason = _reason(str(result.reason)) if result.reason else ""
        ended_s = None if result.ended_s is None else float(result.ended_s)
        return JobResult(int(job_id), checked_flag(result.success), keys, reason, ended_s)
    except tier_exceptions():
        return JobResult(int(job_id), False, reason=Reason.NONSENSE)


def _reason(word: str) -> str:
    """Return a tier's word for a failure: a `Reason`, unless it is one of the tier's own."""
    known = Reason.of(word) if _REASON.fullmatch(word) else Reason.ERROR
    return word if known is Reason.OTHER else known


def checked_keys(keys: Any) -> list[OffloadKey]:  # Any: from a third-party tier
    """Return a collection of keys as a list."""
    listed = list(keys)
    if not {*map(type, listed)} <= {bytes}:
        raise WrongValueError("a collection of keys", keys)
    return listed


def checked_event(event: Any) -> OffloadingEvent:  # Any: from a third-party tier
    """Return an event of `take_events`. Only `keys` and `removed` are checked: the caller replaces the other fields."""
    if not isinstance(event, OffloadingEvent):
        raise WrongValueError("an OffloadingEvent", event)
    return OffloadingEvent(checked_keys(event.keys), event.block_size, event.medium, checked_flag(event.removed))


def checked_stats(stats: Any) -> dict[str, Any]:  # Any: from a third-party tier; a number, or numbers by label
    """Return the numbers of `stats`: a copy of the mapping and of the mappings in it."""
    if not isinstance(stats, Mapping):
        raise WrongValueError("a mapping of numbers", stats)
    return {
        str(name): checked_stats(value) if isinstance(value, Mapping) else value for name, value in [*stats.items()]
    }
