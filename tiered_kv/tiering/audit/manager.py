"""The manager of a stack that audits: it shows the audit each lookup, store and request, and is a manager otherwise.

The engine's scheduler calls it, on the manager's thread, which owns the audit too. What must stay true: the lookups of
an audited request are misses, and the audit sees every store while the audit is active.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext, RequestOffloadingContext
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.step_timer import timed
from tiered_kv.tiering.audit.audit import Audit, AuditRules
from tiered_kv.tiering.audit.comparison import AuditedGroup
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager


class AuditedManager(TieringOffloadingManager):
    """Audits a share of the requests.

    Args:
        rules: The share of audited requests, the tolerated difference, and whether a tier is stopped beyond it.
        primary, secondary_tiers, settings: As in `TieringOffloadingManager`.
    """

    def __init__(
        self,
        rules: AuditRules,
        primary: PrimaryRows,
        secondary_tiers: Sequence[SecondaryTierManager] = (),
        **settings: Any,  # Any: as in `TieringOffloadingManager`
    ) -> None:
        super().__init__(primary, secondary_tiers, **settings)
        self._audit = Audit(rules, primary, self._requests, self._tiers, self._clock)
        self.registry.add(self._audit.measure)

    def audit_only(self, group: AuditedGroup) -> None:
        """Compare the blocks of one KV cache group of several; to be called before the first request."""
        self._audit.audit_only(group)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._audit.is_active and self._audit.note_lookup(key, req_context):
            return False
        return super().lookup(key, req_context)

    @timed
    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if self._is_withheld(keys, req_context):
            return [False] * len(keys)
        return super().lookup_many(keys, req_context)

    def contains_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        # This question loads no block: an audited request gets the answer too. The question marks no first key.
        if self._audit.withholds_all:
            return [False] * len(keys)
        return super().contains_many(keys, req_context)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if self._is_withheld(keys, req_context):
            return [False] * len(keys)
        return super().lookup_prefix(keys, req_context)

    def prefetch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        # An audited request loads no block. The first lookup marks where the request's computed blocks begin: a
        # prefetch of the same blocks would mark another place.
        if not (self._audit.withholds_all or self._audit.audits(req_context)):
            super().prefetch(keys, req_context)

    @timed
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is None or not self._audit.is_active or self.is_outdated(req_context):
            return output  # an outdated request began before a reset: its blocks are not compared with later ones
        return self._audit.prepare(keys, output, req_context)

    @timed
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        # Ask before the base class ends the store: afterwards none of these blocks is being written.
        written = self.primary.written_by(req_context.req_id, keys) if self._audit.is_active else []
        super().complete_store(keys, req_context, success)
        self._audit.complete(keys, written, req_context.req_id, self._requests.context_of(req_context), success)

    @timed
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        answer = super().on_new_request(req_context)
        hints = self._requests.state_of(req_context).hints
        if not (hints.skips_store or hints.skips_load):
            self._audit.begin(req_context)
        return answer

    @timed
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._audit.finish(req_context)
        super().on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        super().on_schedule_end()
        if self._audit.stopped:
            self._stop_tiers(self._audit.stopped)

    @property
    def jobs_in_flight(self) -> int:
        """As in the base class, with the comparisons that have not ended."""
        return super().jobs_in_flight + self._audit.in_flight

    def _is_withheld(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> bool:
        """Note the lookup of an audited request, and return whether all `keys` are answered with a miss.

        The audit needs only the first key that a request looks up. Keys come in the order of the prefix: so the first
        key of a call is enough.
        """
        return self._audit.is_active and bool(keys) and self._audit.note_lookup(keys[0], req_context)

    def _collect(self) -> None:
        super()._collect()
        self._audit.tick(self._clock())

    def _forget_primary(self) -> None:
        self._audit.reset()
        super()._forget_primary()

    def _close_tiers(self, timeout_s: float) -> None:
        super()._close_tiers(timeout_s)
        self._audit.close(timeout_s)

    def _stop_tiers(self, names: set[str]) -> None:
        """Disable tiers whose blocks differ, and empty the primary tier, which may have copies of these blocks."""
        stopped = [guarded for guarded in self._tiers if guarded.name in names and not guarded.is_disabled]
        for guarded in stopped:
            guarded.disable("the audit found another block")
        if stopped:
            self._forget_primary()
            self._search.refresh(self._clock())
