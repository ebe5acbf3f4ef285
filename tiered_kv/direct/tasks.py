"""Tasks of a host, and what each tier still has to do of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.base import JobId
from tiered_kv.tiering.guarded import GuardedTier

Done = Callable[[list[bool]], None]
"""Gets an answer for each key of a task."""


@dataclass(slots=True, eq=False)
class Task:
    """One call of a host. It has ended when none of its pieces is open: blocks that wait, a job, a lookup.

    Args:
        context: The request that the tiers see.
        blocks: Where the keys' blocks lie: `block_id` is the offset, `position` the place in `keys`.
        begin_by_s: When blocks that have no job yet are given up.
    """

    keys: Sequence[OffloadKey]
    on_done: Done
    context: ReqContext
    blocks: list[CPUBlock] = field(default_factory=list)
    begin_by_s: float = math.inf
    answers: list[bool] = field(init=False)
    pieces: int = 1
    """Open pieces; the first is the call itself, until it has been divided."""
    asked: list[list[int]] = field(default_factory=list)
    """Of a lookup, for each tier and for none: the places of the keys that it is asked for now."""
    until_s: float = 0.0
    """Of a lookup: when keys without an answer become misses."""

    def __post_init__(self) -> None:
        self.answers = [False] * len(self.keys)


class TierQueue:
    """A guarded tier, and the blocks that wait for its budgets. Owned by the tiers' thread.

    Where the manager skips what is over a budget, here it waits. Blocks stop waiting without a job only where nothing
    will become free for them: the tier is disabled, its breaker open, or its budget taken by expired jobs.

    Args:
        end: Called with a task when one of its pieces has ended.
        load_below: Called with a task and blocks that this tier could not load, before their piece ends.
    """

    def __init__(
        self,
        guarded: GuardedTier,
        end: Callable[[Task], None],
        load_below: Callable[[Task, list[CPUBlock]], None],
    ) -> None:
        self.guarded = guarded
        self.waiting_blocks = 0
        self._end = end
        self._load_below = load_below
        self._loads: deque[tuple[Task, list[CPUBlock]]] = deque()
        self._stores: deque[tuple[Task, list[CPUBlock]]] = deque()
        self._in_flight: dict[JobId, Task] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no job is in flight, expired ones included."""
        return not self._in_flight

    def add(self, task: Task, blocks: list[CPUBlock], *, is_load: bool) -> None:
        """Let blocks wait for their job."""
        task.pieces += 1
        self.waiting_blocks += len(blocks)
        (self._loads if is_load else self._stores).append((task, blocks))

    def drop_waiting(self) -> None:
        """Give up what waits."""
        for waiting in (self._loads, self._stores):
            while waiting:
                self._end(waiting.popleft()[0])
        self.waiting_blocks = 0

    def collect(self, now_s: float) -> None:
        """Take in the jobs that ended. One that expires stays in flight until the tier has reported it."""
        for job, result in self.guarded.collect():
            task = self._in_flight.pop(job.metadata.job_id)
            done = frozenset(job.metadata.keys if result.success else result.successful_keys or ())
            failed = [block for block in job.blocks if block.key not in done]
            for block in job.blocks:
                task.answers[block.position] |= block.key in done
            if failed and job.metadata.is_promotion:
                self._load_below(task, failed)
            self._end(task)
        self.guarded.expire(now_s)

    def submit(self, now_s: float) -> None:
        """Submit jobs as far as the budgets allow, loads first."""
        guarded = self.guarded
        while self._keeps(self._loads, now_s) and (
            (room := guarded.load_room()) > 0 or guarded.refusal() or not guarded.is_loading
        ):
            task, blocks = self._take(self._loads, room)
            if room <= 0 or not self._submit(task, blocks, is_load=True):
                self._load_below(task, blocks)
            self._end(task)
        while self._keeps(self._stores, now_s) and (
            (room := guarded.store_room()) > 0 or guarded.refusal() or not guarded.is_storing
        ):
            task, blocks = self._take(self._stores, room)
            selected = guarded.select(blocks, task.context)
            if room > 0 and len(selected) < len(blocks):  # the others are not admitted yet, as they should be
                chosen = {block.position for block in selected}
                for block in blocks:
                    task.answers[block.position] |= block.position not in chosen
            if selected:
                self._submit(task, selected, is_load=False)
            self._end(task)

    def _keeps(self, waiting: deque[tuple[Task, list[CPUBlock]]], now_s: float) -> bool:
        """Give up first pieces that have waited too long, and return whether others wait."""
        while waiting and waiting[0][0].begin_by_s <= now_s:
            task, blocks = waiting.popleft()
            self.waiting_blocks -= len(blocks)
            if waiting is self._stores:
                self.guarded.observer.skipped("budget", blocks)
            self._end(task)
        return bool(waiting)

    def _take(self, waiting: deque[tuple[Task, list[CPUBlock]]], room: int) -> tuple[Task, list[CPUBlock]]:
        """Take a piece, at most `room` blocks of it; without room the whole piece, which does not wait any more."""
        task, blocks = waiting.popleft()
        if 0 < room < len(blocks):
            task.pieces += 1
            waiting.appendleft((task, blocks[room:]))
            blocks = blocks[:room]
        self.waiting_blocks -= len(blocks)
        return task, blocks

    def _submit(self, task: Task, blocks: list[CPUBlock], *, is_load: bool) -> bool:
        job = self.guarded.submit([block.key for block in blocks], blocks, task.context, is_promotion=is_load)
        if job is not None:
            self._in_flight[job.metadata.job_id] = task
            task.pieces += 1
        return job is not None
