"""Touched blocks, which a background thread notes in a storage that evicts by use, or by age.

A tier calls `note` from its `touch`. The scheduler's thread calls all methods but `set_interval`, without I/O. Each
block is noted at most once in half an interval, and a limited number of calls of `note` waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.errors import TieredKVError
from tiered_kv.system.step import give_way
from tiered_kv.system.threads import BackgroundTask

WRITTEN_AT_ONCE: Final = 256  # keys in one call of `write`
WAITING_MAX: Final = 64  # calls of `note` that wait; while the storage hangs, the oldest are dropped
KNOWN_MAX: Final = 1 << 15
"""About the limit of the keys in `_young`, and of the keys in `_old`."""
ABSENT_MAX: Final = 4096  # keys that wait for `take_absent`
PAUSE_S: Final = 1.0  # between two runs of the background thread, at least


class Touches:
    """Notes each touched block at most once in half of `interval_s`, and once in `interval_s` while it is used.

    The thread `name` (or `set_interval`) calls `write` with some blocks. `write` may do I/O. It returns the blocks that
    the storage lacks. Its `OSError`s and errors of this project are ignored: the next use tries again. After `stop`,
    `write` is not called any more.
    """

    def __init__(
        self, write: Callable[[Sequence[OffloadKey]], Iterable[OffloadKey]], name: str, interval_s: float
    ) -> None:
        self._write = write
        self._interval_s = interval_s
        self._begun_s = time.monotonic()
        self._asked_s = -math.inf
        """When the thread was last asked to write."""
        self._young: set[OffloadKey] = set()  # noted since `_begun_s`
        self._old: set[OffloadKey] = set()  # noted in the time before
        self._waiting: deque[list[OffloadKey]] = deque(maxlen=WAITING_MAX)
        self._absent: deque[OffloadKey] = deque(maxlen=ABSENT_MAX)
        self._is_stopped = False
        self._task = BackgroundTask(self._write_all, name)

    def note(self, keys: Iterable[OffloadKey]) -> None:
        """Note that blocks are used."""
        now_s = time.monotonic()
        passed_s = now_s - self._begun_s
        if passed_s >= self._interval_s / 2 or len(self._young) >= KNOWN_MAX:
            self._old = self._young if passed_s < self._interval_s else set()  # all keys are due again after a pause
            self._young, self._begun_s = set(), now_s
        young, old = self._young, self._old
        if new := [key for key in keys if key not in young and key not in old]:
            young.update(new)
            self._waiting.append(new)
        pause_s = min(PAUSE_S, self._interval_s / 2)  # the present interval counts: a sweep may have made it shorter
        if self._waiting and now_s >= self._asked_s + pause_s and not self._is_stopped:
            self._asked_s = now_s
            self._task.ask()

    def take_absent(self) -> list[OffloadKey]:
        """Return the noted blocks that the storage lacks, since the last call."""
        absent: list[OffloadKey] = []
        with suppress(IndexError):  # the thread adds to it meanwhile
            while self._absent:
                absent.append(self._absent.popleft())
        return absent

    def clear(self) -> None:
        """Forget all blocks, at a reset."""
        self._waiting.clear()
        self._absent.clear()
        self._young, self._old = set(), set()

    def set_interval(self, interval_s: float) -> None:
        """Change the interval. If it is much shorter now, the calling thread writes the last noted blocks."""
        is_shorter = interval_s < self._interval_s / 2
        self._interval_s = interval_s
        if is_shorter:
            self._note_in_storage([*self._young, *self._old])

    def stop(self, timeout_s: float, *, writes_rest: bool = False) -> None:
        """End the thread, in bounded time; `writes_rest` if it first notes the blocks that wait."""
        end_s = time.monotonic() + timeout_s
        if writes_rest and self._waiting:
            self._task.ask()
            self._task.join(timeout_s)
        self._is_stopped = True
        self._task.join(max(0.0, end_s - time.monotonic()))

    def _write_all(self) -> None:
        while self._waiting and not self._is_stopped:
            with suppress(IndexError):  # cleared
                self._note_in_storage(self._waiting.popleft())

    def _note_in_storage(self, keys: Sequence[OffloadKey]) -> None:
        for start in range(0, len(keys), WRITTEN_AT_ONCE):
            if self._is_stopped:
                return
            give_way()
            with suppress(OSError, TieredKVError):
                self._absent.extend(self._write(keys[start : start + WRITTEN_AT_ONCE]))
