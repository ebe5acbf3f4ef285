"""Cascade: offering blocks of the primary tier to the secondary tiers."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_kv.base import ReqContext
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.tiering.jobs import Job
from tiered_kv.tiering.lane import Lane
from tiered_kv.tiering.promotion import JobFactory


class Cascade:
    """Pins blocks for the tiers that want them, within each tier's budget, and submits the stores.

    Owned by the manager's thread.
    """

    def __init__(self, primary: CPUOffloadingManager, make_job: JobFactory) -> None:
        self._primary = primary
        self._make_job = make_job

    def commit(self, written: list[CPUBlock], lanes: Iterable[Lane], req_context: ReqContext) -> None:
        """Make blocks that an engine has just written ready, and offer them to `lanes`."""
        selections = [(lane, blocks) for lane in lanes if (blocks := self._select(lane, written))]
        if all(len(blocks) == len(written) for _, blocks in selections):
            # The usual case, without a pass over the blocks for each tier.
            self._primary.commit(written, pins=len(selections))
        else:
            self._primary.commit(written, pins=1)
            for _, blocks in selections:
                self._primary.pin(blocks)
            self._primary.unpin(written)
        self._submit(selections, req_context)

    def offer(self, ready: list[CPUBlock], lanes: Iterable[Lane], req_context: ReqContext) -> None:
        """Offer blocks that are ready already to `lanes`."""
        selections = [(lane, blocks) for lane in lanes if (blocks := self._select(lane, ready))]
        for _, blocks in selections:
            self._primary.pin(blocks)
        self._submit(selections, req_context)

    def finish(self, job: Job) -> None:
        """Release the blocks of a store that was reported."""
        self._primary.unpin(job.blocks)

    def _select(self, lane: Lane, blocks: list[CPUBlock]) -> list[CPUBlock]:
        """Return the blocks that `lane` gets: admitted ones, head first, as far as its budget goes."""
        reason = lane.refusal()
        if reason:
            lane.skip(reason, len(blocks))
            return []
        room = max(lane.store_room(), 0)
        admission = lane.admission
        if admission.is_open():
            selected = blocks[:room]
            lane.skip("budget", len(blocks) - len(selected))
            return selected
        selected = []
        for number, block in enumerate(blocks):
            if len(selected) == room:  # an offer that finds no room does not count
                lane.skip("budget", len(blocks) - number)
                break
            if admission.admit(block.key):
                selected.append(block)
            else:
                lane.skip("admission", 1)
        return selected

    def _submit(self, selections: list[tuple[Lane, list[CPUBlock]]], req_context: ReqContext) -> None:
        for lane, blocks in selections:
            job = self._make_job(lane, [block.key for block in blocks], blocks, is_promotion=False)
            if not lane.submit(job, req_context):
                self._primary.unpin(blocks)
