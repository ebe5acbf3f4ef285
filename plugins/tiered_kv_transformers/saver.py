"""Stores copies of blocks in a stack, on one thread of its own.

`PrefixCache` calls it, on the program's threads. At most `blocks_max` blocks are pending. Each `save` ends once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from tiered_kv.errors import ResourceError, ShutdownError
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import Stack
from tiered_kv.system.interrupts import CallThread
from tiered_kv.system.threads import DaemonThreads

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.001  # between two checks of `wait`


class Saver:
    """Stores prompts one after the other in a stack. Any thread may call any method.

    At most `blocks_max` blocks are copied or queued at one time. A prompt's blocks wait `put_timeout_s` for room.
    """

    def __init__(self, stack: Stack, blocks_max: int, put_timeout_s: float) -> None:
        self._stack = stack
        self._blocks_max = blocks_max
        self._put_timeout_s = put_timeout_s
        self._threads = DaemonThreads("tiered-kv-prefix-saver", 1)
        self._call_thread = CallThread("tiered-kv-prefix-calls")
        self._lock = threading.Lock()
        """Guards the fields below. Unlike a Condition, no interrupt leaves it held (`tiered_kv.system.interrupts`)."""
        self._is_stopped = False
        self._pending: dict[object, int] = {}  # blocks of each call of `save`
        self._stored_blocks = 0
        self._dropped_blocks = 0

    def save(
        self, keys: Sequence[bytes], copy_blocks: Callable[[int], Blocks], on_loss: Callable[[], None], epoch: int
    ) -> int:
        """Queue a prompt's next blocks as far as there is room, and drop the others. Return how many are queued.

        Args:
            keys: In the order of their prefix.
            copy_blocks: Called on this thread; returns the bytes of the first n blocks.
            on_loss: Called if a queued block could not be stored: on this thread, on the saver's, or on the thread that
                calls `stop`.
            epoch: The stack's epoch in which the blocks were computed. After a reset all are dropped.
        """
        saving, count = object(), len(keys)
        try:
            with self._lock:
                if self._is_stopped:
                    raise ShutdownError("the prefix cache is closed")
                room = self._blocks_max - sum(self._pending.values())
                granted = min(count, room) if epoch == self._stack.epoch else 0
                self._dropped_blocks += count - granted
                if not granted:
                    return 0
                self._pending[saving] = granted
            rows = copy_blocks(granted)
            self._call_thread.run(partial(self._submit, saving, keys[:granted], rows, on_loss, epoch))
        except BaseException as error:
            self._end(saving, 0)
            on_loss()
            if isinstance(error, ResourceError):  # these blocks are lost
                return 0
            if isinstance(error, RuntimeError) and self._is_stopped:  # the pool was shut down meanwhile
                raise ShutdownError("the prefix cache is closed") from error
            raise
        return granted

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is pending, and return False after the timeout."""
        end_s = time.monotonic() + timeout_s
        while self._pending:
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)
        return True

    def stop(self, timeout_s: float) -> None:
        """Refuse further blocks, wait for pending ones, and drop those that the thread has not begun."""
        self._is_stopped = True
        self.wait(timeout_s)
        with suppress(ShutdownError):  # a forked child has no such threads
            self._call_thread.run(partial(self._threads.shutdown, cancel_futures=True))
        self._call_thread.stop()

    def counts(self) -> tuple[int, int, int]:
        """Return how many blocks were stored, dropped, and are pending."""
        with self._lock:
            return self._stored_blocks, self._dropped_blocks, sum(self._pending.values())

    def _submit(
        self, saving: object, keys: Sequence[bytes], rows: Blocks, on_loss: Callable[[], None], epoch: int
    ) -> None:
        future = self._threads.submit(self._put, keys, rows, epoch)

        def end(future: Future[int]) -> None:
            stored = 0
            try:
                stored = 0 if future.cancelled() else future.result()
                if stored < len(keys):
                    on_loss()
            finally:
                self._end(saving, stored)

        future.add_done_callback(end)

    def _put(self, keys: Sequence[bytes], rows: Blocks, epoch: int) -> int:
        try:
            return self._stack.put(keys, rows, timeout=self._put_timeout_s, epoch=epoch)
        except ShutdownError:
            return 0
        except Exception:  # these blocks are lost, but not later ones
            _log.exception("%d blocks of a prompt could not be stored", len(keys))
            return 0

    def _end(self, saving: object, stored: int) -> None:
        """End a call of `save`. Only the first end counts: an interrupted call may end before its queued blocks do."""
        with self._lock:
            blocks = self._pending.pop(saving, 0)
            self._stored_blocks += min(stored, blocks)
            self._dropped_blocks += max(blocks - stored, 0)
