"""Stores snapshots of blocks in a stack, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ShutdownError
from tiered_kv.facade import Blocks
from tiered_kv.stack import Stack

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Consecutive blocks of one prompt; `on_loss` is called, by any thread, if not all of them could be stored."""

    keys: Sequence[OffloadKey]
    rows: Blocks
    on_loss: Callable[[], None]


class Saver:
    """Stores snapshots one after the other, bounded in blocks. Any thread may call any method.

    Args:
        stack: Where the blocks go.
        blocks_max: Blocks that may be promised or queued at one time.
        put_timeout_s: How long one snapshot may wait for room in the stack.
    """

    def __init__(self, stack: Stack, blocks_max: int, put_timeout_s: float) -> None:
        self._stack = stack
        self._blocks_max = blocks_max
        self._put_timeout_s = put_timeout_s
        self._pool = ThreadPoolExecutor(1, "tiered-kv-prefix-saver")
        self._changed = threading.Condition()
        """Guards the fields below, and tells of their changes."""
        self._is_stopped = False
        self._pending_blocks = 0
        self._stored_blocks = 0
        self._dropped_blocks = 0

    def reserve(self, blocks: int) -> int:
        """Promise room for a snapshot that is yet to be taken; return for how many blocks, the others being dropped.

        What was promised is to be given to `submit`, or back to `release`.

        Raises:
            ShutdownError: The saver was stopped.
        """
        with self._changed:
            if self._is_stopped:
                raise ShutdownError("the prefix cache is closed")
            granted = min(blocks, self._blocks_max - self._pending_blocks)
            self._pending_blocks += granted
            self._dropped_blocks += blocks - granted
            return granted

    def release(self, blocks: int) -> None:
        """Give back room that `reserve` promised."""
        with self._changed:
            self._pending_blocks -= blocks
            self._changed.notify_all()

    def submit(self, snapshot: Snapshot) -> bool:
        """Queue a snapshot that has its room; return False, and drop it, where the saver was stopped meanwhile."""
        with self._changed:
            if self._is_stopped:
                self._end(snapshot, 0)
                return False
            future = self._pool.submit(self._put, snapshot)
        future.add_done_callback(lambda future: self._end(snapshot, 0 if future.cancelled() else future.result()))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is pending, and return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_blocks == 0, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Take no more, wait for what is pending, then drop what has not begun; what has begun ends by itself."""
        with self._changed:
            self._is_stopped = True
        self.wait(timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def counts(self) -> tuple[int, int, int]:
        """Return how many blocks were stored, dropped, and are pending."""
        with self._changed:
            return self._stored_blocks, self._dropped_blocks, self._pending_blocks

    def _put(self, snapshot: Snapshot) -> int:
        try:
            return self._stack.put(snapshot.keys, snapshot.rows, timeout=self._put_timeout_s)
        except ShutdownError:
            return 0
        except Exception:  # whatever it is, it costs these blocks and not those to come
            _log.exception("%d blocks of a prompt could not be stored", len(snapshot.keys))
            return 0

    def _end(self, snapshot: Snapshot, stored: int) -> None:
        if stored < len(snapshot.keys):
            snapshot.on_loss()
        with self._changed:
            self._pending_blocks -= len(snapshot.keys)
            self._stored_blocks += stored
            self._dropped_blocks += len(snapshot.keys) - stored
            self._changed.notify_all()
