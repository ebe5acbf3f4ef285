"""The budget of a guarded tier: blocks that may be in flight in one direction, to the tier or from it.

`GuardedTier` has one for stores and one for loads, on the scheduler's thread, and counts each job's blocks in and out.
A block of an expired job stays counted until the tier reports the job, since the tier may still use its row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    """The blocks in flight in one direction, and their limit."""

    blocks_max: int
    blocks: int = 0
    expired_blocks: int = 0
    """The part of `blocks` that belongs to expired jobs. When these blocks become free is unknown."""
    reserved_blocks: int = 0
    """Blocks of jobs that will be submitted later: promotions of this step, or blocks of `reserve_stores`."""

    @property
    def room(self) -> int:
        """Blocks that new jobs may take; at most 0 if there is no room."""
        return self.blocks_max - self.blocks - self.reserved_blocks

    @property
    def will_grow(self) -> bool:
        """Whether more room will become free: a job that has not expired uses some of the budget."""
        return self.reserved_blocks > 0 or self.blocks > self.expired_blocks


def blocks_of(budget_bytes: int | None, default_bytes: int, block_bytes: int) -> int:
    """Return the limit of a budget in blocks: at least one."""
    return max((default_bytes if budget_bytes is None else budget_bytes) // block_bytes, 1)
