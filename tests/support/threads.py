"""Work on other threads during a `with` block, and processes that can start no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Repeat `work` on threads until the `with` block ends, and raise its exceptions then."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            work()

    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(go_on) for _ in range(threads)]
        try:
            yield
        finally:
            is_over.set()
    for each in working:
        each.result()


@contextmanager
def no_threads() -> Iterator[None]:
    """Make the start of every thread fail within the block: its stack would exceed the memory."""
    stack_bytes = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(stack_bytes)
