"""A secondary tier of vLLM's own tiering, made of one of our tiers.

vLLM's manager makes one call at a time: on the scheduler's thread, or on its own thread that polls tiers. Only
`drain_jobs` and `shutdown` wait. vLLM's manager has no budgets, deadlines or breakers for its tiers. So this adapter
calls the tier through a `GuardedTier`, as our own manager does. What must stay true: vLLM reuses a row only after the
tier has reported its job.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadPolicy, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from tiered_kv.base import OffloadKey
from tiered_kv.config.entries import tier_settings
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.reading import fill_variables
from tiered_kv.config.validation import suggestion
from tiered_kv.engines.keywords import known_to_base
from tiered_kv.errors import ConfigError
from tiered_kv.hints import DEFAULT_TENANT, HintReader, Hints
from tiered_kv.metrics.registry import Registry
from tiered_kv.metrics.series import CounterView
from tiered_kv.reasons import Reason
from tiered_kv.system.limits import compare, require
from tiered_kv.tiering.admission import Offer
from tiered_kv.tiering.answers import checked_answer, tier_exceptions
from tiered_kv.tiering.base import JobMetadata, TierSpec
from tiered_kv.tiering.base import JobResult as OurResult
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.tiering.gauges import report_tier
from tiered_kv.tiering.guarded import GuardedTier, SubmittedJob
from tiered_kv_vllm.engine import (
    VLLM_ROW_LAYOUT,
    check_stages,
    chunk_tokens,
    environment,
    namespace_of,
)
from tiered_kv_vllm.groups import check_groups
from tiered_kv_vllm.metrics import CounterReport, hit_source, metric_definitions, vllm_events

_log = logging.getLogger(__name__)

ROOM_WAIT_S = 10.0
"""How long a request is answered RETRY while other requests' loads take all of the load budget; then it misses."""
DRAIN_WARNING_S = 5.0
CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.0005
_REQUESTS_MAX = 100_000
"""Requests with notes; beyond it the oldest is forgotten."""


@dataclass(slots=True)
class RequestNotes:
    """One request, from `on_new_request` to `on_request_finished`.

    Attributes:
        failed: Keys of failed loads; they are misses for this request.
        asked_s: Time at which a key was first answered RETRY.
        hits: Keys that were hits, each of which takes a row of the primary tier.
        has_timed_out: Whether it has waited as long as it may; then all its lookups miss.
        skips_load: Whether it has the hint `skip: load`; then all its lookups miss.
    """

    failed: set[OffloadKey] = field(default_factory=set)
    asked_s: dict[OffloadKey, float] = field(default_factory=dict)
    hits: int = 0
    has_timed_out: bool = False
    skips_load: bool = False

    def may_wait(self, key: OffloadKey, now_s: float, wait_max_s: float) -> bool:
        """Return whether the request may be answered RETRY once more for `key`; if not, it has timed out."""
        self.has_timed_out = now_s - self.asked_s.setdefault(key, now_s) >= wait_max_s
        return not self.has_timed_out


class TieredKVTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Configured as `{"type": "TieredKVTier", "module_path": "tiered_kv_vllm", "tier": {...}}`.

    The module says which threads call it.

    Args:
        offloading_spec: vLLM's spec, whose `config` describes the blocks.
        primary_kv_view: The primary tier's memory, of shape (num_chunks, row bytes).
        tier_type: This class in vLLM's configuration. Metrics show the tier's name instead.
        backpressure_detector: Optional; from vLLM's configuration. It works beside the tier's `store_budget`.
        tier: One entry of `secondary` in a stack's file.
        namespace: See `engine.VllmNamespace`.
        locality: "LOCAL" or "REMOTE", for vLLM's events and load filters.

    Raises:
        ConfigError: A setting cannot be used, or a library is missing.
        TierError: The tier cannot be opened.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # Any: vLLM's OffloadingSpec
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # Any: vLLM's BackpressureDetector
        *,
        tier: Mapping[str, object],
        namespace: Mapping[str, object] | None = None,
        locality: str | None = None,
        **unknown: object,
    ) -> None:
        _refuse_written(offloading_spec, unknown)
        passed_on = known_to_base(TieredKVTier, unknown)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector, **passed_on)
        config = offloading_spec.config
        check_stages(config)
        check_groups(config)
        entry = fill_variables({"tier": dict(tier)}, environment(config))["tier"]
        settings = tier_settings(entry)
        self._num_blocks, self._block_bytes = primary_kv_view.shape or (0, 0)
        identity = namespace_of(
            config, namespace, row_layout=getattr(offloading_spec, "row_layout", VLLM_ROW_LAYOUT)
        ).identify(block_bytes=self._block_bytes, block_tokens=chunk_tokens(config))
        self._has_events = offloading_spec.kv_events_config.enable_kv_cache_events
        spec = TierSpec(
            settings.name,
            self._block_bytes,
            identity.digest,
            identity.described,
            self._has_events,
            limits=TenantLimits.of_entry(settings),
        )
        # A view of our own, of unsigned bytes: vLLM releases its view while our tier may still hold this one.
        view = primary_kv_view.cast("B").cast("B", (self._num_blocks, self._block_bytes))
        require(compare(settings.takes(self._block_bytes)))
        opened = SecondaryTierFactory.create(spec, view, settings)
        self.tier_type = settings.name
        self.locality = None if locality is None else Locality(locality.upper())
        self.cache_hit_source = hit_source(settings)
        self._info = {"tiered_kv_type": settings.type, "tiered_kv_namespace": identity.digest.hex()}
        budget_bytes = self._block_bytes * self._num_blocks // 4
        self._guarded = GuardedTier(
            opened, settings, self._block_bytes, budget_bytes, time.monotonic, reports_events=self._has_events
        )
        self._registry = Registry()
        report_tier(self._guarded, self._registry)
        self._reporting = frozenset((settings.name,) if opened.reports_stored else ())
        self._is_closed = False
        self._hint_reader = HintReader()
        self._requests: dict[str, RequestNotes] = {}
        self._report = CounterReport(settings.secret_texts())
        self._ended: list[JobResult] = []

    # Lookups.

    def lookup(self, key: OffloadKey, req_context: Any) -> LookupResult:
        guarded, notes = self._guarded, self._requests.get(req_context.req_id) or self._begin(req_context.req_id)
        if notes.has_timed_out or notes.skips_load or key in notes.failed or not guarded.is_searched:
            return LookupResult.MISS
        try:
            answer = checked_answer(guarded.tier.lookup(key, req_context))
        except tier_exceptions():
            guarded.account.note_exception("lookup")
            return self._fail_lookup(notes)
        if answer is None:
            if notes.may_wait(key, time.monotonic(), guarded.settings.lookup_timeout):
                return LookupResult.RETRY
            guarded.account.lookups_timed_out()
            return self._fail_lookup(notes)
        return self._hit(key, notes) if answer else LookupResult.MISS

    def _begin(self, req_id: str) -> RequestNotes:
        self._requests.pop(req_id, None)
        if len(self._requests) >= _REQUESTS_MAX:
            del self._requests[next(iter(self._requests))]
        notes = self._requests[req_id] = RequestNotes()
        return notes

    def _hit(self, key: OffloadKey, notes: RequestNotes) -> LookupResult:
        """Answer for a stored key; vLLM takes a row for each hit, and submits the load at the end of the step."""
        guarded = self._guarded
        # vLLM lets a request's promotions evict each other. A request that wants more rows than the load budget has
        # would load for ever, so it gets the head of its prefix that fits.
        if notes.hits < guarded.loads.blocks_max:
            if guarded.load_room() > 0:
                notes.hits += 1
                guarded.loads.reserved_blocks += 1
                notes.asked_s.pop(key, None)
                return LookupResult.HIT
            if guarded.loads.will_grow and notes.may_wait(key, time.monotonic(), ROOM_WAIT_S):
                return LookupResult.RETRY
        guarded.account.refused_promotion()
        return LookupResult.MISS

    def _fail_lookup(self, notes: RequestNotes) -> LookupResult:
        notes.has_timed_out = True
        self._guarded.breaker.fail(time.monotonic(), "a lookup was not answered in time")
        return LookupResult.MISS

    # Jobs.

    def submit_store(self, job_metadata: TransferJob) -> None:
        hints = job_metadata.req_context.get_state(Hints)
        if hints is not None and hints.skips_store:
            self._guarded.account.skipped(Reason.BY_REQUEST, job_metadata.keys)
            self._end(job_metadata.job_id, is_success=True)
            return
        offered = dict(_in_prefix_order(job_metadata))  # each block once
        taken = self._guarded.select(Offer([*offered], [*offered.values()]), job_metadata.req_context)
        if taken:
            self._submit(job_metadata, taken.keys, taken.rows)
        else:
            # No block was taken. The job has failed if the tier had no room, and not if it wanted none of the blocks.
            self._end(job_metadata.job_id, is_success=self._guarded.store_room() > 0)

    def submit_load(self, job_metadata: TransferJob) -> None:
        guarded = self._guarded
        guarded.loads.reserved_blocks = max(guarded.loads.reserved_blocks - len(job_metadata.keys), 0)
        if guarded.refusal():  # the breaker may have opened since the lookup
            self._fail(job_metadata)
        else:
            blocks = _in_prefix_order(job_metadata)
            self._submit(job_metadata, [key for key, _ in blocks], [row for _, row in blocks])

    def _submit(self, job_metadata: TransferJob, keys: list[OffloadKey], rows: list[int]) -> None:
        hints = job_metadata.req_context.get_state(Hints)
        job = self._guarded.submit(
            keys,
            rows,
            job_metadata.req_context,
            self,
            is_promotion=job_metadata.is_promotion,
            job_id=job_metadata.job_id,
            tenant=(hints and hints.tenant) or DEFAULT_TENANT,
        )
        if job is None:
            self._fail(job_metadata)

    def _fail(self, job_metadata: TransferJob) -> None:
        self._note_failed(job_metadata, job_metadata.keys)
        self._end(job_metadata.job_id, is_success=False)

    def _end(self, job_id: int, *, is_success: bool) -> None:
        """Let the next `get_finished_jobs` report a job that moved nothing."""
        self._ended.append(JobResult(job_id, is_success, transfer_time=0.0, transfer_bytes=0))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._guarded.poll(time.monotonic())
        ended, self._ended = self._ended, []
        return ended

    def ended(self, job: SubmittedJob, result: OurResult) -> None:
        """Let the next `get_finished_jobs` report a job of the guarded tier."""
        metadata, keys = job.metadata, job.metadata.keys
        done = job.loaded_keys(result).intersection(keys)
        is_partial = len(done) < len(set(keys))
        if is_partial:
            self._note_failed(metadata, [key for key in keys if key not in done])
        began_s = (metadata.deadline or 0.0) - self._guarded.settings.job_timeout
        self._ended.append(
            JobResult(
                metadata.job_id,
                success=not is_partial,
                successful_keys=tuple(done) if metadata.is_promotion and is_partial else None,
                transfer_time=max(0.0, time.monotonic() - began_s),
                transfer_bytes=len(done) * self._block_bytes,
            )
        )

    def expired(self, job: SubmittedJob) -> None:
        """Do nothing: the job goes on, since vLLM may not use its rows before the tier has reported it."""

    def _note_failed(self, job: TransferJob | JobMetadata, keys: Iterable[OffloadKey]) -> None:
        """Note for a load's request the keys that it must not load again."""
        if job.is_promotion and job.req_context.req_id in self._requests:
            self._requests[job.req_context.req_id].failed.update(keys)

    def drain_jobs(self) -> None:
        """Wait until the tier uses no row any more; vLLM then reuses the rows.

        There is no deadline: vLLM has no quarantine, and a row that is reused too early would get wrong bytes. The tier
        drops jobs that it has not begun after its `job_timeout`, so only a call that hangs delays this.
        """
        guarded = self._guarded
        warn_s = time.monotonic() + DRAIN_WARNING_S
        guarded.poll(time.monotonic())
        while guarded.jobs:
            time.sleep(_POLL_S)
            guarded.poll(time.monotonic())
            if time.monotonic() >= warn_s:
                warn_s += DRAIN_WARNING_S
                _log.warning(
                    "tier '%s' still works on %d jobs; vLLM waits for it to reset its cache",
                    guarded.name,
                    len(guarded.jobs),
                )

    # Requests and steps.

    def touch(self, keys: Collection[OffloadKey], req_context: Any) -> None:
        self._guarded.call("touch", keys, req_context)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        notes = self._begin(req_context.req_id)
        hints = self._hint_reader.read(req_context)
        if hints is not None:
            notes.skips_load = hints.skips_load
            req_context.set_state(hints)
        if self._guarded.wants_all_of(req_context):
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.pop(req_context.req_id, None)
        self._guarded.call("on_request_finished", req_context)

    def on_schedule_end(self, context: Any) -> None:
        guarded = self._guarded
        # All loads of the step have been submitted. Reserved blocks that remain found no room in the primary tier.
        guarded.loads.reserved_blocks = 0
        guarded.call("on_schedule_end")
        guarded.poll(time.monotonic())

    # Events, metrics, the end.

    def take_events(self) -> Iterable[Any]:
        return vllm_events(self._guarded.account.take_events(), self._reporting, self.locality)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        tier = extra_config.get("tier")
        return metric_definitions([str(tier.get("type"))] if isinstance(tier, Mapping) else ())

    def get_stats(self) -> Any:
        return self._report.take(self._registry.snapshot)

    def counters(self) -> CounterView:
        """Return the tier's counters by its name; those that the tier counts itself are under "tier"."""
        return CounterView(self._registry.snapshot())

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return ("tiered_kv_type", "tiered_kv_namespace")

    def config_info(self) -> Mapping[str, str]:
        return self._info

    def shutdown(self) -> None:
        """Wait a limited time for jobs, and close the tier. Only this may be called afterwards.

        vLLM unmaps the primary tier's memory next, unless a view of it exists. So this drops the tier, and with it the
        tier's views. Only a thread that still works on a row keeps one.
        """
        if not self._is_closed:
            self._is_closed = True
            end_s = time.monotonic() + CLOSE_TIMEOUT_S
            while self._guarded.jobs and time.monotonic() < end_s:
                time.sleep(_POLL_S)
                self._guarded.poll(time.monotonic())
            self._guarded.call("shutdown")
            del self._guarded
            gc.collect()  # a tier and its callbacks hold each other


def _in_prefix_order(job_metadata: TransferJob) -> list[tuple[OffloadKey, int]]:
    """Return a job's keys and rows, head of the prefix first.

    vLLM passes keys through sets, which lose their order; its request knows the token at which each ends. Blocks that
    are stored in order are read back in fewer, larger reads.
    """
    blocks = list(zip(job_metadata.keys, np.asarray(job_metadata.chunk_ids).tolist(), strict=True))
    position_of = job_metadata.req_context.get_offload_key_position
    positions = {key: position_of(key) for key, _ in blocks}
    return blocks if None in positions.values() else sorted(blocks, key=lambda block: positions[block[0]])


def _refuse_written(offloading_spec: Any, unknown: Iterable[str]) -> None:
    """Raise ConfigError for an option that a user wrote and this class does not know; vLLM adds keywords of its own."""
    tiers = offloading_spec.config.extra_config.get("secondary_tiers") or ()
    written = {name for tier in tiers if isinstance(tier, Mapping) for name in tier}
    known = ("tier", "namespace", "locality")
    for name in unknown:
        if name in written:
            raise ConfigError(
                f"unknown option of TieredKVTier{suggestion(name, known)}; known options: {', '.join(known)}",
                location=f"secondary_tiers.{name}",
            )
