"""A process that can start no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_threads() -> Iterator[None]:
    """Let every thread that is started while the block runs fail: it would need more memory than there is."""
    stack_bytes = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(stack_bytes)
