"""The heap of a process that keeps millions of blocks: what Python's collector walks, and what the C library holds.

Indexes call it, on any thread. What must stay true: only containers of bytes, text and numbers are hidden.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, TypeVar

Container = TypeVar("Container", list[Any], dict[Any, Any])  # Any: of bytes, text and numbers

_untrack: Any = getattr(getattr(ctypes, "pythonapi", None), "PyObject_GC_UnTrack", None)  # Any: a C function, or None
if _untrack is not None:
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def untracked(container: Container) -> Container:
    """Hide a list or dictionary from the collector, and return it. Any thread.

    A full collection would visit each of its items, with the interpreter's lock held: some 50 ns for one that is not in
    the processor's cache. Only for bytes, text and numbers: objects without references are in no cycle, and their
    reference counts free them. An interpreter that is not CPython collects in its own way, and keeps the container as
    it is.
    """
    if _untrack is not None:
        _untrack(container)
    return container


def give_back_free_memory() -> None:
    """Give the kernel the memory that the C library keeps for later, after much was freed. Takes milliseconds.

    Without glibc nothing happens.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
