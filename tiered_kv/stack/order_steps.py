"""Steps for prefetch orders and removals of tiers in a program's stack, which makes steps only in its calls.

`Stack` makes it. Its thread runs while there are some, and calls the manager under the stack's lock, as any call of
the program does. What must stay true: without orders and removals there is no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tiered_kv.errors import ResourceError, ShutdownError
from tiered_kv.system.threads import start_thread
from tiered_kv.tiering.orders import PrefetchOrders
from tiered_kv.tiering.removal import Removals

STEP_S: Final = 0.002
"""Between two steps while blocks are looked up or loaded."""
HOLD_S: Final = 0.1
"""Between two steps while orders only hold blocks."""


class OrderSteps:
    """Any thread may call. `step` makes one step of the manager."""

    def __init__(self, orders: PrefetchOrders, removals: Removals, step: Callable[[], object]) -> None:
        self._orders, self._removals, self._step = orders, removals, step
        self._lock = threading.Lock()  # guards `_thread`
        self._thread: threading.Thread | None = None
        self._given = threading.Event()  # an order was given, or the stack closes
        self._is_closed = False
        orders.wake = removals.wake = self.wake
        if orders.exist:  # of a warm start, which has begun
            self.wake()

    def wake(self) -> None:
        """See that steps are made."""
        self._given.set()
        with self._lock, suppress(ResourceError):  # without a thread the program's own calls make the steps
            if self._thread is None and not self._is_closed:
                self._thread = start_thread(self._run, "tiered-kv-orders")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self._given.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            self._given.clear()
            with self._lock:
                if self._is_closed or not (self._orders.exist or self._removals.exist):
                    self._thread = None
                    return
            with suppress(ShutdownError):
                self._step()
            self._given.wait(STEP_S if self._orders.has_work else HOLD_S)
