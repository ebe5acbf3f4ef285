"""The base class of tiers that wrap another tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager


class WrapperTier(SecondaryTierManager):
    """Passes every call to the wrapped tier, on the caller's thread. A subclass overrides the calls that it changes.

    A subclass may set `is_nonblocking` only if its own methods and those of the wrapped tier return at once.

    Args:
        inner: The wrapped tier, which is shut down with the wrapper.
    """

    def __init__(self, inner: SecondaryTierManager) -> None:
        super().__init__(inner._offloading_spec, inner._primary_kv_view, inner.tier_type)
        self.inner = inner
        self.takes_offsets = inner.takes_offsets

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.inner.lookup(key, req_context)

    def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        if type(self).lookup is not WrapperTier.lookup:  # a subclass that overrides `lookup` changes both
            return super().lookup_many(keys, req_context)
        return self.inner.lookup_many(keys, req_context)

    @property
    def lookup_failures(self) -> int:
        return self.inner.lookup_failures

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.inner.submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.inner.submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        return self.inner.get_finished()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.inner.touch(keys, req_context)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return self.inner.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.inner.on_request_finished(req_context)

    def on_schedule_end(self) -> None:
        self.inner.on_schedule_end()

    def reset_cache(self) -> bool:
        return self.inner.reset_cache()

    @property
    def reports_stored(self) -> bool:
        return self.inner.reports_stored

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.inner.take_events()

    def stats(self) -> Mapping[str, Any]:
        return self.inner.stats()

    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    def shutdown(self) -> None:
        self.inner.shutdown()
