"""Work on other threads for as long as a test does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def meanwhile(work: Callable[[], object], threads: int = 1) -> Iterator[None]:
    """Do something again and again until the `with` block ends, and raise then what it has raised."""
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
