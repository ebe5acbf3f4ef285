"""The base class of tiers that wrap another tier, for example to add faults or latency.

A subclass replaces the methods that it changes. Every other call reaches the inner tier unchanged, on the
caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobResult, SecondaryTierManager


def _passed_on(name: str) -> Any:  # Any: a method as the contract has it
    """Return a method that calls the method `name` of the inner tier."""

    def method(self: WrapperTier, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    return method


class WrapperTier(SecondaryTierManager):
    """Passes every call to the wrapped tier, on the caller's thread. A subclass overrides the calls that it changes.

    A subclass may set `is_nonblocking` only if its own methods and the wrapped tier's return at once.

    Args:
        inner: The wrapped tier, which is shut down with the wrapper.
    """

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner.tier_spec, inner._primary_kv_view, inner.tier_type)
        self.inner = inner
        self.takes_offsets = inner.takes_offsets

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.inner.lookup(key, req_context)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if type(self).lookup is not WrapperTier.lookup:  # a subclass that overrides `lookup` changes both
            return super().lookup_many(keys, req_context)
        return self.inner.lookup_many(keys, req_context)

    submit_store = _passed_on("submit_store")
    submit_load = _passed_on("submit_load")
    touch = _passed_on("touch")
    take_absent = _passed_on("take_absent")
    on_new_request = _passed_on("on_new_request")
    on_request_finished = _passed_on("on_request_finished")
    on_schedule_end = _passed_on("on_schedule_end")
    take_events = _passed_on("take_events")
    stats = _passed_on("stats")
    describe = _passed_on("describe")
    explain_failure = _passed_on("explain_failure")
    shutdown = _passed_on("shutdown")

    def get_finished(self) -> Iterable[JobResult]:
        return self.inner.get_finished()

    def reset_cache(self) -> bool:
        return self.inner.reset_cache()

    @property
    def lookup_failures(self) -> int:
        return self.inner.lookup_failures

    @property
    def relocated_blocks(self) -> int:
        return self.inner.relocated_blocks

    @property
    def has_saved_reset(self) -> bool:
        return self.inner.has_saved_reset

    @property
    def reports_stored(self) -> bool:
        return self.inner.reports_stored
