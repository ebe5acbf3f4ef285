"""Stores copies of blocks in a stack, on one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ResourceError, ShutdownError
from tiered_kv.facade import Blocks
from tiered_kv.stack import Stack
from tiered_kv.toolkit.threads import DaemonThreads

_log = logging.getLogger(__name__)


class Saver:
    """Stores prompts one after the other in a stack. Any thread may call any method.

    At most `blocks_max` blocks are copied or queued at one time. A prompt's blocks wait `put_timeout_s` for room.
    """

    def __init__(self, stack: Stack, blocks_max: int, put_timeout_s: float) -> None:
        self._stack = stack
        self._blocks_max = blocks_max
        self._put_timeout_s = put_timeout_s
        self._threads = DaemonThreads("tiered-kv-prefix-saver", 1)
        self._changed = threading.Condition()
        """Guards the fields below; notified of their changes."""
        self._is_stopped = False
        self._pending_blocks = 0
        self._stored_blocks = 0
        self._dropped_blocks = 0

    def save(
        self, keys: Sequence[OffloadKey], copy_blocks: Callable[[int], Blocks], on_loss: Callable[[], None], epoch: int
    ) -> int:
        """Queue as many of a prompt's next blocks as there is room for, drop the others, and return how many.

        Args:
            keys: In the order of their prefix.
            copy_blocks: Called here for the bytes of the first n blocks.
            on_loss: Called by any thread if a queued block could not be stored.
            epoch: The stack's epoch in which the blocks were computed. After a reset all are dropped.
        """
        with self._changed:
            if self._is_stopped:
                raise ShutdownError("the prefix cache is closed")
            granted = min(len(keys), self._blocks_max - self._pending_blocks) if epoch == self._stack.epoch else 0
            self._pending_blocks += granted
            self._dropped_blocks += len(keys) - granted
        if not granted:
            return 0
        try:
            rows = copy_blocks(granted)
            future = self._threads.submit(self._put, keys[:granted], rows, epoch)
        except BaseException as error:
            self._end(granted, 0)
            if isinstance(error, ResourceError):  # costs these blocks
                on_loss()
                return 0
            if isinstance(error, RuntimeError) and self._is_stopped:  # the pool was shut down meanwhile
                raise ShutdownError("the prefix cache is closed") from error
            raise

        def end(future: Future[int]) -> None:
            stored = 0
            try:
                stored = 0 if future.cancelled() else future.result()
                if stored < granted:
                    on_loss()
            finally:
                self._end(granted, stored)

        future.add_done_callback(end)
        return granted

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is pending, and return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_blocks == 0, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Refuse further blocks, wait for pending ones, and drop those that the thread has not begun."""
        with self._changed:
            self._is_stopped = True
        self.wait(timeout_s)
        self._threads.shutdown(cancel_futures=True)

    def counts(self) -> tuple[int, int, int]:
        """Return how many blocks were stored, dropped, and are pending."""
        with self._changed:
            return self._stored_blocks, self._dropped_blocks, self._pending_blocks

    def _put(self, keys: Sequence[OffloadKey], rows: Blocks, epoch: int) -> int:
        try:
            return self._stack.put(keys, rows, timeout=self._put_timeout_s, epoch=epoch)
        except ShutdownError:
            return 0
        except Exception:  # costs these blocks, but not later ones
            _log.exception("%d blocks of a prompt could not be stored", len(keys))
            return 0

    def _end(self, blocks: int, stored: int) -> None:
        with self._changed:
            self._pending_blocks -= blocks
            self._stored_blocks += stored
            self._dropped_blocks += blocks - stored
            self._changed.notify_all()
