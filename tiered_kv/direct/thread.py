"""The thread that drives tiers over a caller's memory.

`DirectTiers` posts tasks from any thread. This thread calls the guarded tiers and the callbacks, and does no I/O. These
things stay true:

- Each task is answered once, also after an error of this thread.
- No answer comes while a tier may still use the task's memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Final

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.direct.tasks import PlacedBlock, Task, TierQueue
from tiered_kv.errors import ShutdownError
from tiered_kv.metrics.counters import Counters
from tiered_kv.metrics.metric import Metric
from tiered_kv.system.log_limit import LogLimit
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.many_lookups import ask_tier
from tiered_kv.tiering.uses import TOLD_AT_ONCE

_log = logging.getLogger(__name__)

TICK_S: Final = 0.02
"""How often deadlines are checked while a task is open. The end of a job or lookup wakes the thread at once."""
IDLE_TICK_S: Final = 0.5
"""How often the thread wakes while no task is open."""
SHUTDOWN_TIMEOUT_S: Final = 6.0
"""How long `close` waits for each tier to shut down; a tier takes less."""
_CLOSE_POLL_S: Final = 0.001
METRICS: Final = (
    Metric("callback_errors_total", "Exceptions of the caller's functions."),
    Metric("tasks_total", "Tasks that were begun.", ("method",)),
)


_Message = Task | Callable[[], None] | None
"""A task to begin, something to call, or only to wake the thread."""


class TierThread:
    """Owns the tiers. Other threads send it messages by `post`, and call `wake` when a job or lookup has ended.

    Other threads use only the queue and single assignments, which an interrupt leaves whole
    (`tiered_kv.system.interrupts`).
    """

    def __init__(self, on_removed: Callable[[str, Sequence[OffloadKey]], None] | None) -> None:
        self.queues: list[TierQueue] = []
        self._log_limit = LogLimit()
        self.counters = Counters(METRICS)
        self._open: dict[Task, None] = {}  # tasks without an answer
        self._on_removed = on_removed
        self._pid = os.getpid()
        self._messages: SimpleQueue[_Message] = SimpleQueue()
        self.wake = partial(self._messages.put, None)
        self._close_by_s: float | None = None
        """When transfers must have ended; None before `close`."""
        self._has_failed = False
        self._is_over: bool | None = None  # whether all transfers have ended; None until the tiers are shut down
        self._has_ended = False  # the thread takes no message any more
        # Only the thread uses these.
        self._lookups: dict[Task, None] = {}
        self._ended: list[Task] = []  # tasks that the next `_report` answers
        self._is_shut_down = False
        self._thread = threading.Thread(target=self._run, name="tiered-kv-direct", daemon=True)

    # Any thread.

    def add(self, guarded: GuardedTier) -> None:
        """Add a tier to the end of the search order; before `start`."""
        self.queues.append(TierQueue(guarded, self._end_item, partial(self._load_at, len(self.queues) + 1)))

    def start(self) -> None:
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def open_tasks(self) -> int:
        return len(self._open)

    def post(self, message: _Message) -> None:
        """Send a message; raises `ShutdownError` if the tiers are closed, and in a forked child."""
        if os.getpid() != self._pid:
            raise ShutdownError(f"the tiers belong to process {self._pid}; open others after a fork")
        if self._has_failed:
            raise ShutdownError("the tiers were closed after an error, which is in the log")
        if self._close_by_s is not None:
            raise ShutdownError("the tiers are closed")
        self._messages.put(message)
        if self._has_ended:  # the tiers were closed meanwhile
            self._take_messages(0)

    def close(self, timeout_s: float) -> bool:
        """See `DirectTiers.close`."""
        if os.getpid() != self._pid:
            return True
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + timeout_s
        self.wake()
        if self.is_current:
            return False
        end_s = time.monotonic() + timeout_s + SHUTDOWN_TIMEOUT_S * len(self.queues)
        while self._is_over is None and time.monotonic() < end_s:
            time.sleep(_CLOSE_POLL_S)
        if self._is_over:
            self._thread.join()
        return bool(self._is_over)

    # Messages: they run on the thread.

    def _begin(self, task: Task) -> None:
        self._open[task] = None
        self.counters.add("tasks_total", task.kind)
        {"contains": self._look_up, "store": self._store, "load": self._load}[task.kind](task)

    def _store(self, task: Task) -> None:
        for queue in self.queues if task.blocks else ():
            queue.add(task, task.blocks, is_load=False)
        self._end_item(task)

    def _load(self, task: Task) -> None:
        for blocks in _each_key_once(task.blocks):
            self._load_at(0, task, blocks)
        self._end_item(task)

    def _look_up(self, task: Task) -> None:
        task.asked = [list(range(len(task.keys))), *([] for _ in self.queues)]
        # The guarded tier's own timeout ends before this one. The tiers are asked one after the other.
        timeouts_s = [queue.guarded.settings.lookup_timeout + TICK_S for queue in self.queues]
        task.until_s = [time.monotonic() + until_s for until_s in accumulate(timeouts_s)]
        self._lookups[task] = None

    def touch(self, keys: list[OffloadKey]) -> None:
        for queue in self.queues:
            for start in range(0, len(keys), TOLD_AT_ONCE):
                queue.guarded.call("touch", keys[start : start + TOLD_AT_ONCE], ReqContext())

    def reset(self) -> None:
        for queue in self.queues:
            queue.reset()
        for task in self._lookups:
            task.is_outdated = True
            self._end_item(task)
        self._lookups.clear()

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:  # no bug may leave a caller waiting for its answers
            self._has_failed = True
            _log.exception("the tiers over the caller's memory are closed: an unexpected error")
            self._end_after_error()
        self._has_ended = True
        self._take_messages(0)

    def _serve(self) -> None:
        while not self._is_over:
            self._take_messages(TICK_S if self._open else IDLE_TICK_S)
            is_closing, now_s = self._close_by_s is not None, time.monotonic()
            self._step(now_s)
            if is_closing:
                self._end_soon(now_s)

    def _take_messages(self, timeout_s: float) -> None:
        """Wait for a message; process it, and all others in the queue."""
        with suppress(Empty):
            self._process(self._messages.get(timeout=timeout_s))
            for _ in range(self._messages.qsize()):
                self._process(self._messages.get_nowait())

    def _process(self, message: _Message) -> None:
        if isinstance(message, Task):
            if self._is_shut_down:  # it was posted while the tiers were closed
                self._call(message.on_done, message.answers)
            else:
                self._begin(message)
        elif message is not None and not self._is_shut_down:
            message()

    def _step(self, now_s: float) -> None:
        for queue in self.queues:
            queue.guarded.poll(now_s)
        for queue in self.queues:
            queue.submit(now_s)
        for task in list(self._lookups):
            self._ask(task, now_s)
        for queue in self.queues:
            queue.guarded.call("on_schedule_end")
        self._report()

    def _end_item(self, task: Task) -> None:
        task.open_items -= 1
        if not task.open_items:
            self._ended.append(task)

    def _load_at(self, level: int, task: Task, blocks: list[PlacedBlock]) -> None:
        if level < len(self.queues) and blocks and not (self._is_shut_down or task.is_outdated):
            self.queues[level].add(task, blocks, is_load=True)

    def _ask(self, task: Task, now_s: float) -> None:
        for level, queue in enumerate(self.queues):
            places, task.asked[level] = task.asked[level], []
            if places:
                answers = ask_tier(queue.guarded, [task.keys[place] for place in places], task.context, now_s)
                is_late = now_s >= task.until_s[level]
                for place, answer in zip(places, answers, strict=True):
                    if answer:
                        task.answers[place] = True
                    else:
                        task.asked[level + (is_late or answer is not None)].append(place)
        if not any(task.asked[:-1]):
            del self._lookups[task]
            self._end_item(task)

    def _report(self) -> None:
        ended, self._ended = self._ended, []
        for task in ended:
            for queue in self.queues:
                queue.guarded.call("on_request_finished", task.context)
            self._answer(task)
        for queue in self.queues if self._on_removed is not None else ():
            events = queue.guarded.account.take_events()
            if keys := [key for event in events if event.removed for key in event.keys]:
                assert self._on_removed is not None
                self._call(self._on_removed, queue.guarded.name, keys)

    def _answer(self, task: Task) -> None:
        del self._open[task]
        for place, first in task.repeats:
            task.answers[place] = task.answers[first]
        is_gone = task.is_outdated and task.kind != "load"  # no tier has its blocks any more
        self._call(task.on_done, [False] * len(task.keys) if is_gone else task.answers)

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except BaseException:  # SystemExit too: the thread continues
            self.counters.add("callback_errors_total")
            if self._log_limit.take() is not None:
                _log.exception("a callback raised; %s", self._log_limit.about)

    def _end_soon(self, now_s: float) -> None:
        """Fail blocks that wait, and shut down the tiers when no job is in flight or the timeout is over."""
        assert self._close_by_s is not None
        is_idle = all(queue.is_idle for queue in self.queues)
        if not self._is_shut_down and (is_idle or now_s >= self._close_by_s):
            self._is_shut_down = True
            for queue in self.queues:
                queue.guarded.call("shutdown")
                queue.guarded.poll(now_s)
        for queue in self.queues:
            queue.drop_waiting()
        for task in self._lookups:
            self._end_item(task)
        self._lookups.clear()
        self._report()
        if self._is_shut_down:
            self._is_over = all(queue.is_idle for queue in self.queues)

    def _end_after_error(self) -> None:
        """Close the tiers, and answer each task as soon as no tier uses its memory."""
        self._close_by_s, self._is_shut_down = time.monotonic(), True
        for queue in self.queues:
            queue.guarded.call("shutdown")
        self._take_messages(0)
        while not self._is_over:
            busy = {task for queue in self.queues for task in queue.tasks_in_flight()}
            self._is_over = not busy  # set before the answers are given: after the last answer the program may close
            for task in [task for task in self._open if task not in busy]:
                self._answer(task)
            if busy:
                self._take_messages(TICK_S)


def _each_key_once(blocks: Sequence[PlacedBlock]) -> list[list[PlacedBlock]]:
    """Divide blocks so that no job has a key twice: a tier could load one of the two blocks, and report their key."""
    batches: list[list[PlacedBlock]] = []
    times: dict[OffloadKey, int] = {}
    for block in blocks:
        before = times.get(block.key, 0)
        times[block.key] = before + 1
        if before == len(batches):
            batches.append([])
        batches[before].append(block)
    return batches
