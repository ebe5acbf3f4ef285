"""Forks of a process that has threads, as a program of a user's may make them."""

from __future__ import annotations

import os
import warnings


def fork() -> int:
    """Call `os.fork` without the warning that there are other threads: what holds beside them is what a test tries."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"This process .* is multi-threaded, use of fork\(\)", DeprecationWarning)
        return os.fork()  # noqa: TID251 (the subject of tests)
