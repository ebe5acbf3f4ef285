"""The cascade: blocks of the primary tier are offered to the secondary tiers, and stored in the tiers that select them.

The manager calls it for blocks that an engine has written or loaded, and `Promotions` for promoted blocks, both on the
manager's thread. A block stays pinned until each tier that selected it has reported its store.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv.tiering.requests import RequestState, RequestTable


class Cascade:
    """Pins the blocks that each tier selects, and submits their stores. Owned by the manager's thread."""

    def __init__(self, rows: PrimaryRows, tiers: Sequence[GuardedTier], requests: RequestTable) -> None:
        self._rows = rows
        self._tiers = tiers
        self._requests = requests
        self.counting_tiers = tuple(guarded for guarded in tiers if not guarded.admission.is_open())
        """The tiers that count how often a block is offered."""
        self._is_stopped = False

    def stop(self) -> None:
        """Offer no promoted blocks any more: the tiers are being closed."""
        self._is_stopped = True

    def commit(
        self, written: list[CPUBlock], keys: list[OffloadKey], tiers: Iterable[GuardedTier], req_context: ReqContext
    ) -> bool:
        """Make blocks ready that an engine has written, and offer them to `tiers`; return whether one selects all."""
        context = self._requests.context_of(req_context)
        selections = [(guarded, blocks) for guarded in tiers if (blocks := guarded.select(written, context))]
        if all(len(blocks) == len(written) for _, blocks in selections):
            # The usual case: no pass over the blocks for each tier.
            self._rows.commit(written, pins=len(selections))
        else:
            self._rows.commit(written, pins=1)
            for _, blocks in selections:
                self._rows.pin(blocks)
            self._rows.unpin(written)
        self._rows.note_stored(keys)
        self._submit(selections, context, keys)
        return any(len(blocks) == len(written) for _, blocks in selections)

    def offer(self, ready: list[CPUBlock], tiers: Iterable[GuardedTier], req_context: ReqContext) -> None:
        """Offer blocks that are already ready to `tiers`."""
        selections = [(guarded, blocks) for guarded in tiers if (blocks := guarded.select(ready, req_context))]
        for _, blocks in selections:
            self._rows.pin(blocks)
        self._submit(selections, req_context, [block.key for block in ready])

    def offer_loaded(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Offer blocks that a request has loaded to the tiers that count how often a block is offered."""
        state = self._requests.get(req_context)
        if state is not None and state.hints.skips_store:
            return
        for guarded in self.counting_tiers:
            if state is not None and guarded in state.stores.request_level:
                continue  # it is offered the blocks at the request's end
            # A load counts as an offer, except to the tier that the block came from.
            sources = {} if state is None else state.loads.sources
            offered = [key for key in dict.fromkeys(keys) if sources.get(key, PRIMARY_NAME) != guarded.name]
            again = guarded.admission.again(self._rows.ready(offered), req_context.req_id)
            self.offer(again, (guarded,), self._requests.context_of(req_context))

    def offer_promoted(self, ready: list[CPUBlock], req_context: ReqContext) -> None:
        """Offer blocks of a promotion to the tiers above their source that have the setting `fill_on_promotion`."""
        context = self._requests.context_of(req_context)
        state = self._requests.get(context)
        if self._is_stopped or (state is not None and state.hints.skips_store):
            return
        source = ready[0].source
        upper = itertools.takewhile(lambda guarded: guarded.name != source, self._tiers)
        above = [guarded for guarded in upper if guarded.settings.fill_on_promotion]
        if above:
            self.offer(ready, above, context)

    def offer_ended(self, state: RequestState) -> None:
        """Offer all blocks of a request that ends to the tiers that wait for its end."""
        if state.stores.request_level:
            ready = state.chain_in(state.req_context).in_order(self._rows.ready(state.stores.keys))
            self.offer(ready, state.stores.request_level, state.req_context)

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Release the blocks of a store."""
        self._rows.unpin(job.blocks)

    def expired(self, job: SubmittedJob) -> None:
        """Keep the blocks pinned until the store has ended."""

    def _submit(
        self, selections: list[tuple[GuardedTier, list[CPUBlock]]], req_context: ReqContext, offered: list[OffloadKey]
    ) -> None:
        for guarded, blocks in selections:
            keys = offered.copy() if len(blocks) == len(offered) else [block.key for block in blocks]
            if not guarded.submit(keys, blocks, req_context, self, is_promotion=False):
                self._rows.unpin(blocks)
