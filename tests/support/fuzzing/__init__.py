"""Fuzzing of everything that reads bytes from outside: targets, and inputs that are almost right.

A target takes bytes and returns; it raises where a promise is broken. `tests/trust/test_fuzz.py` runs all of them.
"""

from __future__ import annotations

from importlib import import_module

from tests.support.fuzzing.target import Target, inputs

__all__ = ["NAMES", "Target", "inputs", "target"]

_MODULES = {
    "record": "records",
    "segment": "segments",
    "small-files": "small_files",
    "replies": "replies",
    "answers": "answers",
    "stack-file": "stack_files",
}
NAMES = tuple(_MODULES)


def target(name: str) -> Target:
    """Return the target of that name; an ImportError says that a library is missing."""
    made: Target = import_module(f"tests.support.fuzzing.{_MODULES[name]}").make()
    return made
