"""The calls of a program as tasks, and the queue of each tier.

The tiers' thread (`thread.TierThread`) owns all of it. A task ends once, when its last open item has ended. Until a job
is reported, its blocks belong to the tier, also after a deadline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.reasons import Reason
from tiered_kv.tiering.admission import Offer
from tiered_kv.tiering.base import JobId, JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob

Kind = Literal["contains", "store", "load"]
Done = Callable[[list[bool]], None]
"""Called with an answer for each key of a task."""


class PlacedBlock(NamedTuple):
    """A block of a task."""

    key: OffloadKey
    offset: int
    """Where it begins in the memory, in bytes."""
    place: int
    """Its place in the keys of the task."""


@dataclass(slots=True, eq=False)
class Task:
    """One call of a program. Its items are jobs, lookups, and blocks that wait for a job; it ends with the last one."""

    kind: Kind
    keys: Sequence[OffloadKey]
    on_done: Done
    context: ReqContext
    blocks: list[PlacedBlock] = field(default_factory=list)
    begin_by_s: float = math.inf
    """Until when blocks wait for a job."""
    repeats: list[tuple[int, int]] = field(default_factory=list)  # (place without a block, place with its answer)
    answers: list[bool] = field(init=False)
    open_items: int = 1  # the call itself is one, until it has been divided
    is_outdated: bool = False  # it began before a reset
    # Only a lookup has these.
    asked: list[list[int]] = field(default_factory=list)
    """Places in `keys`, by the tier to ask next. The last list has the places for which no tier is left."""
    until_s: list[float] = field(default_factory=list)
    """When keys without an answer become misses, by tier."""

    def __post_init__(self) -> None:
        self.answers = [False] * len(self.keys)


_Waiting = deque[tuple[Task, list[PlacedBlock]]]


class TierQueue:
    """A guarded tier, and the blocks that wait for its budgets. Owned by the tiers' thread.

    Blocks over a budget wait. They fail without a job if the tier is disabled, its breaker is open, expired jobs hold
    its budget, or they have waited too long. For blocks that this tier could not load, the queue calls `load_below`,
    and then `end`, which ends their item.
    """

    def __init__(
        self,
        guarded: GuardedTier,
        end: Callable[[Task], None],
        load_below: Callable[[Task, list[PlacedBlock]], None],
    ) -> None:
        self.guarded = guarded
        self.waiting_blocks = 0
        self._end = end
        self._load_below = load_below
        self._loads: _Waiting = deque()
        self._stores: _Waiting = deque()
        self._in_flight: dict[JobId, tuple[Task, list[PlacedBlock]]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no job is in flight, not even an expired one."""
        return not self._in_flight

    def state(self) -> dict[str, int | bool]:
        """Return the counts of the queue, without the counts of the tier itself. Any thread may call."""
        return {"waiting_blocks": self.waiting_blocks, "is_disabled": self.guarded.is_disabled}

    def tasks_in_flight(self) -> list[Task]:
        """Return the tasks of jobs that the tier has not reported. Only after an error: it drops the jobs' results."""
        for result in self.guarded.call("get_finished") or ():
            with suppress(TypeError):  # an id that cannot be hashed
                self.guarded.jobs.pop(getattr(result, "job_id", None), None)  # type: ignore[arg-type]
        return [task for job_id, (task, _) in self._in_flight.items() if job_id in self.guarded.jobs]

    def add(self, task: Task, blocks: list[PlacedBlock], *, is_load: bool) -> None:
        task.open_items += 1
        self.waiting_blocks += len(blocks)
        (self._loads if is_load else self._stores).append((task, blocks))

    def reset(self) -> None:
        """Reset the tier. Its tasks are outdated from now on, and their blocks that wait fail."""
        for task, _ in (*self._in_flight.values(), *self._loads, *self._stores):
            task.is_outdated = True
        self.drop_waiting()
        self.guarded.reset_cache()

    def drop_waiting(self) -> None:
        """Fail all blocks that wait."""
        for waiting in (self._loads, self._stores):
            while waiting:
                self._end(waiting.popleft()[0])
        self.waiting_blocks = 0

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Process a job that ended."""
        task, blocks = self._in_flight.pop(job.metadata.job_id)
        done = frozenset() if task.is_outdated else job.loaded_keys(result)
        failed = [block for block in blocks if block.key not in done]
        for block in blocks:
            task.answers[block.place] |= block.key in done
        if failed and job.metadata.is_promotion:
            self._load_below(task, failed)
        self._end(task)

    def expired(self, job: SubmittedJob) -> None:
        """Do nothing: the caller may not use the blocks before the tier has reported the job."""

    def submit(self, now_s: float) -> None:
        """Submit jobs while the budgets allow, loads first."""
        guarded = self.guarded
        while self._has_waiting(self._loads, now_s):
            room = guarded.load_room()
            if room <= 0 and guarded.loads.will_grow and not guarded.refusal():
                break  # room will become free
            task, blocks = self._take(self._loads, room)
            if room <= 0 or not self._submit(task, blocks, is_load=True):
                self._load_below(task, blocks)
            self._end(task)
        while self._has_waiting(self._stores, now_s):
            room = guarded.store_room()
            if room <= 0 and guarded.stores.will_grow and not guarded.refusal():
                break
            task, blocks = self._take(self._stores, room)
            places = {block.offset: block.place for block in blocks}
            offer = Offer([block.key for block in blocks], [block.offset for block in blocks], places.__getitem__)
            selected = guarded.select(offer, task.context)
            if len(selected) < len(blocks):
                chosen = set(selected.keys)
                if room > 0:  # the other blocks are not admitted, which is a success
                    for block in blocks:
                        task.answers[block.place] |= block.key not in chosen
                blocks = [block for block in blocks if block.key in chosen]
            if blocks:
                self._submit(task, blocks, is_load=False)
            self._end(task)

    def _has_waiting(self, waiting: _Waiting, now_s: float) -> bool:
        """Fail blocks that have waited too long; return whether others wait."""
        while waiting and waiting[0][0].begin_by_s <= now_s:
            task, blocks = waiting.popleft()
            self.waiting_blocks -= len(blocks)
            if waiting is self._stores:
                self.guarded.account.skipped(Reason.BUDGET, [block.key for block in blocks])
            self._end(task)
        return bool(waiting)

    def _take(self, waiting: _Waiting, room: int) -> tuple[Task, list[PlacedBlock]]:
        """Take at most `room` blocks of the task that waits longest; without room all its blocks, which will fail."""
        task, blocks = waiting.popleft()
        if 0 < room < len(blocks):
            task.open_items += 1
            waiting.appendleft((task, blocks[room:]))
            blocks = blocks[:room]
        self.waiting_blocks -= len(blocks)
        return task, blocks

    def _submit(self, task: Task, blocks: list[PlacedBlock], *, is_load: bool) -> bool:
        keys, offsets = [block.key for block in blocks], [block.offset for block in blocks]
        job = self.guarded.submit(keys, offsets, task.context, self, is_promotion=is_load)
        if job is not None:
            self._in_flight[job.metadata.job_id] = task, blocks
            task.open_items += 1
        return job is not None
