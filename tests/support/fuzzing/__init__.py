"""Fuzzing of everything that reads bytes from outside: targets, and inputs that are almost right.

A target takes bytes and returns; it raises where a promise is broken. `tests/trust/test_fuzz.py` runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from tests.support.fuzzing.target import Target, inputs

__all__ = ["NAMES", "Target", "inputs", "target"]

_MAKERS = {
    "record": "records:record_target",  # the block record and its codecs
    "segment": "segments:segment_target",  # nvme's segment files, marker and epoch
    "small-files": "small_files:small_files_target",  # fs' ledger, owners' files, epochs and markers
    "replies": "replies:reply_target",  # Redis' replies, and loads of blocks out of them
    "answers": "answers:answer_target",  # S3's answers: heads, errors, marks of epochs
    "stack-file": "stack_files:stack_file_target",  # the YAML of a stack, and the configuration that comes of it
}
NAMES = tuple(_MAKERS)


def target(name: str) -> Target:
    """Return the target of that name; a KeyError says that there is none, an ImportError that a library is missing."""
    module, _, maker = _MAKERS[name].partition(":")
    make: Callable[[], Target] = getattr(import_module(f"tests.support.fuzzing.{module}"), maker)
    return make()
