"""Containers that grow with the stored blocks, and that Python's garbage collector need not walk.

Tiers keep one or more Python references for each stored block. A full collection would visit all of them, on any
thread, and hold the interpreter's lock meanwhile: 17 ns for each.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

Container = TypeVar("Container", list[Any], dict[Any, Any])  # Any: of bytes, text and numbers

_untrack: Any = getattr(getattr(ctypes, "pythonapi", None), "PyObject_GC_UnTrack", None)  # Any: a C function, or None
if _untrack is not None:
    _untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def untracked(container: Container) -> Container:
    """Hide a list or dictionary from the collector, and return it. Any thread.

    Only for bytes, text and numbers: objects without references are in no cycle, and their reference counts free them.
    An interpreter that is not CPython collects in its own way, and keeps the container as it is.
    """
    if _untrack is not None:
        _untrack(container)
    return container
