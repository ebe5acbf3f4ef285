"""All fuzz targets, by name. Those of a tier need its extra."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tests.support.fuzzing.target import Target

_MAKERS = {
    "record": "records:record_target",
    "segment": "segments:segment_target",
    "small-files": "small_files:small_files_target",
    "replies": "replies:reply_target",
    "answers": "answers:answer_target",
    "stack-file": "stack_files:stack_file_target",
    "trace": "traces:trace_target",
}

NAMES = tuple(_MAKERS)


def target(name: str) -> Target:
    """Return the target of that name.

    Raises:
        KeyError: There is none.
        ImportError: The library that it needs is not installed.
    """
    module, _, maker = _MAKERS[name].partition(":")
    make: Callable[[], Target] = getattr(import_module(f"tests.support.fuzzing.{module}"), maker)
    return make()
