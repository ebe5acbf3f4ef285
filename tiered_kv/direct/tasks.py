"""Tasks of a host, and what one tier has of them: waiting, or in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.base import JobId, JobResult
from tiered_kv.tiering.guarded import GuardedTier, Job

Done = Callable[[list[bool]], None]


@dataclass(slots=True, eq=False)
class Task:
    """One call of a host: keys, what to answer for each, and how many pieces of it are still open.

    `blocks` are its keys' places in the memory, `CPUBlock.position` being the place in `keys`; empty for a lookup.
    """

    keys: Sequence[OffloadKey]
    on_done: Done
    context: ReqContext
    blocks: list[CPUBlock] = field(default_factory=list)
    answers: list[bool] = field(init=False)
    pieces: int = 0
    asking: list[list[int]] = field(default_factory=list)
    """Of a lookup: for each tier, the places of the keys that it is asked for."""
    until_s: list[float] = field(default_factory=list)
    """Of a lookup: for each tier, when it is asked no more; 0 before the first question."""

    def __post_init__(self) -> None:
        self.answers = [False] * len(self.keys)


@dataclass(slots=True)
class _Piece:
    """Blocks of a task that wait for a tier's budget."""

    task: Task
    blocks: list[CPUBlock]


class TierQueue:
    """A guarded tier, and the blocks that wait for its budgets. Owned by the tiers' thread.

    Where the manager skips what is over a budget, here it waits. A piece leaves the queue without a job only where
    waiting is in vain: the tier is disabled, its breaker is open, or its whole budget belongs to expired jobs.

    Args:
        guarded: The tier.
        fall: Called with a task and those of its blocks that this tier could not load.
    """

    def __init__(self, guarded: GuardedTier, fall: Callable[[Task, list[CPUBlock]], None]) -> None:
        self.guarded = guarded
        self.waiting_blocks = 0
        """Blocks that wait for a budget."""
        self._fall = fall
        self._stores: deque[_Piece] = deque()
        self._loads: deque[_Piece] = deque()
        self._in_flight: dict[JobId, Task] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits here and no job is in flight, expired ones included."""
        return not (self._stores or self._loads or self._in_flight)

    def add(self, task: Task, blocks: list[CPUBlock], *, is_load: bool) -> None:
        """Let blocks of a task wait for their job."""
        task.pieces += 1
        self.waiting_blocks += len(blocks)
        (self._loads if is_load else self._stores).append(_Piece(task, blocks))

    def drop_waiting(self) -> None:
        """Give up what waits."""
        for piece in (*self._stores, *self._loads):
            piece.task.pieces -= 1
        self._stores.clear()
        self._loads.clear()
        self.waiting_blocks = 0

    def collect(self, now_s: float) -> None:
        """Take in the jobs that ended. One that expires stays in flight until the tier has reported it."""
        for job, result in self.guarded.collect():
            task = self._in_flight.pop(job.metadata.job_id)
            failed = _note(task, job, result)
            if failed and job.metadata.is_promotion:
                self._fall(task, failed)
            task.pieces -= 1
        self.guarded.expire(now_s)

    def submit(self) -> None:
        """Submit jobs as far as the budgets allow."""
        guarded = self.guarded
        while self._loads:
            room = guarded.load_room()
            if room <= 0 and guarded.is_loading and not guarded.refusal():
                break
            piece, blocks = self._take(self._loads, room)
            if room <= 0 or not self._submit(piece.task, blocks, is_load=True):
                self._fall(piece.task, blocks)
            piece.task.pieces -= 1
        while self._stores:
            room = guarded.store_room()
            if room <= 0 and guarded.is_storing and not guarded.refusal():
                break
            piece, blocks = self._take(self._stores, room)
            selected = guarded.select(blocks)
            if room > 0 and len(selected) < len(blocks):  # those that are not admitted yet are as they should be
                for block in blocks:
                    piece.task.answers[block.position] = True
                for block in selected:
                    piece.task.answers[block.position] = False
            if selected:
                self._submit(piece.task, selected, is_load=False)
            piece.task.pieces -= 1

    def _take(self, queue: deque[_Piece], room: int) -> tuple[_Piece, list[CPUBlock]]:
        """Take at most `room` blocks of the first piece, all of them if there is none; it then has one more open."""
        piece = queue[0]
        if 0 < room < len(piece.blocks):
            blocks, piece.blocks = piece.blocks[:room], piece.blocks[room:]
            piece.task.pieces += 1
        else:
            blocks = queue.popleft().blocks
        self.waiting_blocks -= len(blocks)
        return piece, blocks

    def _submit(self, task: Task, blocks: list[CPUBlock], *, is_load: bool) -> bool:
        job = self.guarded.submit([block.key for block in blocks], blocks, task.context, is_promotion=is_load)
        if job is None:
            return False
        self._in_flight[job.metadata.job_id] = task
        task.pieces += 1
        return True


def _note(task: Task, job: Job, result: JobResult) -> list[CPUBlock]:
    """Note a job's result in the answers of its task, and return the blocks that failed."""
    done = frozenset(job.metadata.keys if result.success else result.successful_keys or ())
    failed = []
    for block in job.blocks:
        if block.key in done:
            task.answers[block.position] = True
        else:
            failed.append(block)
    return failed
