"""The cascade: blocks of the primary tier are offered to the secondary tiers, and stored in those that select them.

The manager calls it, on its thread: for blocks that an engine has written, that a tier has brought, or that were used.
A block stays pinned until each tier that selected it has reported its store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob


class Cascade:
    """Pins the blocks that each tier selects, and submits their stores. Owned by the manager's thread."""

    def __init__(self, primary: CPUOffloadingManager) -> None:
        self._primary = primary

    def commit(
        self, written: list[CPUBlock], keys: list[OffloadKey], tiers: Iterable[GuardedTier], req_context: ReqContext
    ) -> bool:
        """Offer blocks that an engine has just written, now ready, to `tiers`; return whether one selects all."""
        selections = [(guarded, blocks) for guarded in tiers if (blocks := guarded.select(written, req_context))]
        if all(len(blocks) == len(written) for _, blocks in selections):
            # The usual case: no pass over the blocks for each tier.
            self._primary.commit(written, pins=len(selections))
        else:
            self._primary.commit(written, pins=1)
            for _, blocks in selections:
                self._primary.pin(blocks)
            self._primary.unpin(written)
        self._primary.note_stored(keys)
        self._submit(selections, req_context, keys)
        return any(len(blocks) == len(written) for _, blocks in selections)

    def offer(self, ready: list[CPUBlock], tiers: Iterable[GuardedTier], req_context: ReqContext) -> None:
        """Offer blocks that are already ready to `tiers`."""
        selections = [(guarded, blocks) for guarded in tiers if (blocks := guarded.select(ready, req_context))]
        for _, blocks in selections:
            self._primary.pin(blocks)
        self._submit(selections, req_context, [block.key for block in ready])

    def fill(self, ready: list[CPUBlock], tiers: Sequence[GuardedTier], req_context: ReqContext) -> None:
        """Offer blocks that were promoted from one tier to the tiers above it that have `fill_on_promotion`."""
        source = ready[0].source
        upper = itertools.takewhile(lambda guarded: guarded.name != source, tiers)
        above = [guarded for guarded in upper if guarded.settings.fill_on_promotion]
        if above:
            self.offer(ready, above, req_context)

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Release the blocks of a store."""
        self._primary.unpin(job.blocks)

    def expired(self, job: SubmittedJob) -> None:
        """Keep the blocks pinned until the store has ended."""

    def _submit(
        self, selections: list[tuple[GuardedTier, list[CPUBlock]]], req_context: ReqContext, offered: list[OffloadKey]
    ) -> None:
        for guarded, blocks in selections:
            keys = offered.copy() if len(blocks) == len(offered) else [block.key for block in blocks]
            if not guarded.submit(keys, blocks, req_context, self, is_promotion=False):
                self._primary.unpin(blocks)
