"""Workers that come late: calls of a product's functions are held up, while the deadlines of their jobs pass."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from tiered_kv.testing.gate import Gate


class Hindrance:
    """Holds up the workers of tiers: each call for a random time, and all of them while `gate` is closed."""

    def __init__(self, seed: int, delay_max_s: float) -> None:
        self.gate = Gate()
        self.held_up = 0
        self.under_way = 0
        self._lock = threading.Lock()  # guards both numbers
        self._chance = random.Random(seed)
        self._delay_max_s = delay_max_s

    def __call__(self) -> None:
        """Hold up the calling worker."""
        with self._lock:
            self.held_up += 1
        time.sleep(self._chance.random() * self._delay_max_s)
        self.gate.pass_through()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.under_way -= 1

    @contextmanager
    def before(self, *places: tuple[object, str]) -> Iterator[Hindrance]:
        """Hold up every call of functions, named by their module or class, until the end of the block."""
        patches = []
        for owner, name in places:
            function = getattr(owner, name)

            def late(*arguments: object, _function: Callable[..., object] = function, **named: object) -> object:
                with self._counted():
                    self()
                    return _function(*arguments, **named)

            patches.append(mock.patch.object(owner, name, late))
        try:
            for patch in patches:
                patch.start()
            yield self
        finally:
            self.gate.open()
            for patch in reversed(patches):
                patch.stop()
