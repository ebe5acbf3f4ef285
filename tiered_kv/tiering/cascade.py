"""The cascade: blocks of the primary tier are offered to the secondary tiers, and stored in the tiers that select them.

The manager calls it for blocks that an engine has written or loaded, and `Promotions` for promoted blocks, both on the
manager's thread. A block stays pinned until each tier that selected it has reported its store.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.admission import Offer
from tiered_kv.tiering.base import JobResult
from tiered_kv.tiering.breaker import BreakerState
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
        self._position_of = rows.table.position.__getitem__

    def stop(self) -> None:
        """Offer no promoted blocks any more: the tiers are being closed."""
        self._is_stopped = True

    def commit(
        self, written: list[int], keys: list[OffloadKey], tiers: Iterable[GuardedTier], req_context: ReqContext
    ) -> bool:
        """Make blocks ready that an engine has written, and offer them to `tiers`; return whether one selects all."""
        context, offer = self._requests.context_of(req_context), Offer(keys, written, self._position_of)
        selections = [(guarded, taken) for guarded in tiers if (taken := guarded.select(offer, context))]
        if all(len(taken) == len(written) for _, taken in selections):
            # The usual case: no pass over the blocks for each tier.
            self._rows.commit(written, keys, pins=len(selections))
        else:
            self._rows.commit(written, keys, pins=1)
            for _, taken in selections:
                self._rows.pin(taken.rows)
            self._rows.unpin(written)
        self._rows.note_stored(keys)
        self._submit(selections, context)
        return any(len(taken) == len(written) for _, taken in selections)

    def offer(self, offer: Offer, tiers: Iterable[GuardedTier], req_context: ReqContext) -> None:
        """Offer blocks that are already ready to `tiers`."""
        selections = [(guarded, taken) for guarded in tiers if (taken := guarded.select(offer, req_context))]
        for _, taken in selections:
            self._rows.pin(taken.rows)
        self._submit(selections, req_context)

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
            again = guarded.admission.again(self._offer_of(self._rows.ready(offered)), req_context.req_id)
            self.offer(again, (guarded,), self._requests.context_of(req_context))

    def offer_promoted(self, ready: list[int], req_context: ReqContext) -> None:
        """Offer blocks of a promotion to the tiers above their source that have the setting `fill_on_promotion`."""
        context = self._requests.context_of(req_context)
        state = self._requests.get(context)
        if self._is_stopped or (state is not None and state.hints.skips_store):
            return
        source = self._rows.table.source[ready[0]]
        upper = itertools.takewhile(lambda guarded: guarded.number != source, self._tiers)
        above = [guarded for guarded in upper if guarded.settings.fill_on_promotion]
        if above:
            self.offer(self._offer_of(ready), above, context)

    def offer_ended(self, state: RequestState) -> None:
        """Offer all blocks of a request that ends to the tiers that wait for its end."""
        if state.stores.request_level:
            ready = self._rows.ready(state.stores.keys)
            ready = state.chain_in(state.req_context).in_order(ready, self._rows.table)
            self.offer(self._offer_of(ready), state.stores.request_level, state.req_context)

    def ended(self, job: SubmittedJob, result: JobResult) -> None:
        """Release the blocks of a store."""
        self._rows.unpin(job.rows)

    def expired(self, job: SubmittedJob) -> None:
        """Keep the blocks pinned until the store has ended."""

    def _submit(self, selections: list[tuple[GuardedTier, Offer]], req_context: ReqContext) -> None:
        for guarded, taken in selections:
            for tenant, own in self._by_tenant(guarded, taken):
                keys = own.keys.copy()  # a tier may change its list
                if not guarded.submit(keys, own.rows, req_context, self, is_promotion=False, tenant=tenant):
                    self._rows.unpin(own.rows)

    def _by_tenant(self, guarded: GuardedTier, taken: Offer) -> Iterable[tuple[str, Offer]]:
        """Return the blocks of each tenant: another one's request may have used some, as of a shared prefix, since."""
        table = self._rows.table
        tenant, chains = table.tenant(taken.rows[0]), table.chain
        if not guarded.has_shares or len(set(map(chains.__getitem__, taken.rows))) == 1:
            return ((tenant, taken),)
        if guarded.breaker.state is not BreakerState.CLOSED:  # a probe is one job
            return ((tenant, taken),)
        places: dict[str, list[int]] = {}
        for place, row in enumerate(taken.rows):
            places.setdefault(table.tenant(row), []).append(place)
        return [(tenant, taken.at(own)) for tenant, own in places.items()]

    def _offer_of(self, rows: list[int]) -> Offer:
        table = self._rows.table
        is_promoted = bool(rows and table.source[rows[0]])
        return Offer([table.key[row] for row in rows], rows, self._position_of, is_promoted)
