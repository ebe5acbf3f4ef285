"""The limits of a manager, and of its tiers' queues, as they are held against what is there at a moment."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.toolkit.lookups import PENDING_KEYS_MAX
from tiered_kv.toolkit.queued import QueuedTier

JOB_GRACE_S = 20.0
"""How much later than its deadline a job may be reported: calls to storage have timeouts of their own, of a second."""
REQUESTS_MAX = 64
"""Of the replay's requests, those that the manager, or a tier, may remember at one time."""
HELD_UP_S = 2.0
"""Looks that are further apart tell of a machine, or a disk, that stood still; lateness counts from its end."""
_SPARE_DEADLINES = 64
"""As in `QueuedTier`, which keeps up to twice as many deadlines as it has jobs, and these."""


class LimitsWatch:
    """Looks at one manager. Its thread.

    Args:
        manager: The manager.

    Attributes:
        late_s_max: The most by which a job was reported after its deadline, as far as looks show.
        held_up_s_max: The longest time between two looks.
    """

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self.late_s_max = 0.0
        self.held_up_s_max = 0.0
        self._manager = manager
        self._looked_s = self._resumed_s = time.monotonic()

    def note_time(self) -> None:
        """Note that a look begins, or ends: a disk that hangs holds up those who look at its directories, too."""
        now_s = time.monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        self.held_up_s_max = max(self.held_up_s_max, gap_s)
        if gap_s > HELD_UP_S:
            self._resumed_s = now_s

    def problems(self) -> Iterator[str]:
        """Yield what is over its limit now, as sentences."""
        for guarded in self._manager._tiers:
            yield from budget_problems(guarded)
            yield from queue_problems(guarded)
            yield from self._late_jobs(guarded)
        promotions = self._manager._promotions
        if promotions.blocks_taken > promotions._blocks_max:
            yield f"{promotions.blocks_taken} blocks are being promoted or held, {promotions._blocks_max} allowed"
        requests = sum(1 for _ in self._manager._requests)
        if requests > REQUESTS_MAX:
            yield f"the manager remembers {requests} requests"

    def _late_jobs(self, guarded: GuardedTier) -> Iterator[str]:
        now_s = time.monotonic()
        for job in guarded.jobs.values():
            late_s = now_s - max(job.deadline_s, self._resumed_s)
            self.late_s_max = max(self.late_s_max, late_s)
            if late_s > JOB_GRACE_S:
                what = "load" if job.is_promotion else "store"
                yield f"{what} {job.job_id} of tier {guarded.name} is {late_s:.1f} s over its deadline"


def budget_problems(guarded: GuardedTier) -> Iterator[str]:
    """Yield which of a guarded's budgets does not hold."""
    if guarded.store_blocks > guarded.store_blocks_max:
        yield f"tier {guarded.name} has stores of {guarded.store_blocks} blocks, {guarded.store_blocks_max} allowed"
    load_blocks = guarded.load_blocks + guarded.load_blocks_reserved
    if load_blocks > guarded.load_blocks_max:
        yield f"tier {guarded.name} has loads of {load_blocks} blocks, {guarded.load_blocks_max} allowed"
    if len(guarded.jobs) > guarded.store_blocks_max + guarded.load_blocks_max:
        yield f"tier {guarded.name} has {len(guarded.jobs)} jobs"


def queue_problems(guarded: GuardedTier) -> Iterator[str]:
    """Yield what a tier that is made with the toolkit keeps in its own queues beyond what it was given, or may."""
    tier = guarded.tier
    if not isinstance(tier, QueuedTier):
        return
    jobs = len(tier._jobs_in_flight)
    if jobs > len(guarded.jobs):
        yield f"tier {guarded.name} keeps {jobs} jobs, the manager knows of {len(guarded.jobs)}"
    blocks = sum(len(job.keys) for job in tier._jobs_in_flight.values())
    blocks_max = guarded.store_blocks_max + guarded.load_blocks_max
    if blocks > blocks_max:
        yield f"tier {guarded.name} has jobs of {blocks} blocks in its queue, {blocks_max} allowed"
    deadlines = len(tier._job_deadlines)  # of jobs that have ended, too, until as many again are submitted
    if deadlines > 2 * blocks_max + _SPARE_DEADLINES:
        yield f"tier {guarded.name} keeps {deadlines} deadlines of jobs"
    lookups = tier._batched_lookups
    keys = max(len(lookups._pending), len(lookups._gathered))
    if keys > PENDING_KEYS_MAX:
        yield f"tier {guarded.name} has {keys} lookups waiting, {PENDING_KEYS_MAX} allowed"
    if len(lookups._answers) > REQUESTS_MAX:
        yield f"tier {guarded.name} keeps the answers of {len(lookups._answers)} requests"
