"""Tiers whose transfers take simulated time, block by block, and whose moods a scenario decides.

One is written from the interface alone, one with the toolkit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from tests.support.simulation.storage import WEDGED_POLL_S, SimulatedStorage, World
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager, TierSpec
from tiered_kv.tiering.lookups import Probe
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome, Part
from tiered_kv.toolkit.queued import QueuedTier

_REPORTED_KEPT = 8
_PART_BLOCKS = 3
_WORKERS = 3


class SimulatedTier(SecondaryTierManager):
    """A tier written from the interface alone, which may break every rule that its mood names."""

    is_nonblocking: ClassVar[bool] = True

    def __init__(
        self, world: World, spec: TierSpec, primary_kv_view: memoryview, *, records_max: int, can_reset: bool = True
    ) -> None:
        super().__init__(spec, primary_kv_view, spec.name)
        self.storage = SimulatedStorage(world, spec.namespace_digest, records_max)
        self.reset_refused = 0
        self.used_after_refusal = 0
        self.deadlines_s: dict[JobId, float] = {}
        self._world = world
        self._spec = spec
        self._flat = primary_kv_view.cast("B")
        self._can_reset = can_reset
        self._epoch = 0
        self._finished: list[JobResult] = []
        self._reported: list[JobResult] = []
        self._answers: dict[tuple[str, OffloadKey], bool | None] = {}

    # What the manager calls.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self.storage.maybe_raise()
        if not self.storage.mood.answer_s and not self.storage.mood.is_mute:
            return self.storage.has(key)
        question = (req_context.req_id, key)
        if question not in self._answers:
            self._answers[question] = None
            self._world.call_after(self.storage.mood.answer_s, lambda: self._settle_question(question))
        return self._answers[question]

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._begin(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._begin(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self.storage.maybe_raise()
        if self.storage.mood.is_mute:
            return ()
        results, self._finished = self._finished, []
        for result in results:
            del self.deadlines_s[result.job_id]
        self._reported = (self._reported + results)[-_REPORTED_KEPT:]
        if self.storage.chance(self.storage.mood.babbles):
            stale = [JobResult(-1, True), *self._reported[:1]]
            return [*results, *stale]
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.storage.maybe_raise()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.storage.maybe_raise()
        for question in [question for question in self._answers if question[0] == req_context.req_id]:
            del self._answers[question]

    def on_schedule_end(self) -> None:
        self.storage.maybe_raise()

    def reset_cache(self) -> bool:
        if not self._can_reset:
            self.reset_refused += 1
            return False
        self._epoch += 1
        self.storage.records.clear()
        self._answers.clear()
        return True

    def stats(self) -> Mapping[str, int]:
        return {"blocks": len(self.storage.records)}

    # Transfers.

    def _begin(self, job: JobMetadata) -> None:
        self.storage.maybe_raise()
        if self.reset_refused:
            self.used_after_refusal += 1
        assert job.deadline is not None
        self.deadlines_s[job.job_id] = job.deadline
        size, epoch = self._spec.block_bytes, self._epoch
        self.storage.transfer(
            list(job.keys),
            [self._flat[row * size : (row + 1) * size] for row in job.block_ids.tolist()],
            is_load=job.is_promotion,
            refusal=lambda: "" if epoch == self._epoch else "reset",
            end=lambda reasons: self._finished.append(_result(job, _outcome(job.keys, reasons))),
        )

    def _settle_question(self, question: tuple[str, OffloadKey]) -> None:
        if question not in self._answers:
            return
        if self.storage.mood.is_mute:  # the manager must time out
            self._world.call_after(WEDGED_POLL_S, lambda: self._settle_question(question))
        else:
            self._answers[question] = self.storage.has(question[1])


def _result(job: JobMetadata, outcome: Outcome) -> JobResult:
    return JobResult(job.job_id, outcome is ALL_DONE, outcome.successful_keys, outcome.reason or "")


class SimulatedToolkitTier(QueuedTier):
    """A `BlockingTier` whose threads are calls that are due at some time.

    Each of its workers takes a part, moves block after block, and takes the next.
    """

    reset_refused = used_after_refusal = 0

    def __init__(
        self, world: World, spec: TierSpec, primary_kv_view: memoryview, *, records_max: int, lookup_timeout_s: float
    ) -> None:
        super().__init__(
            spec,
            primary_kv_view,
            spec.name,
            part_blocks=_PART_BLOCKS,
            stores_running_max=_WORKERS - 1,
            lookup_timeout_s=lookup_timeout_s,
            shutdown_timeout_s=0.0,
            clock=world.clock,
        )
        self.storage = SimulatedStorage(world, spec.namespace_digest, records_max)
        self.deadlines_s: dict[JobId, float] = {}
        self._world = world
        self._tokens = 0
        self._workers_idle = _WORKERS

    # What the manager calls.

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.deadlines_s[job_metadata.job_id] = job_metadata.deadline or 0.0
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.deadlines_s[job_metadata.job_id] = job_metadata.deadline or 0.0
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        if self.storage.mood.is_mute:
            return ()
        finished = list(super().get_finished())
        for result in finished:
            del self.deadlines_s[result.job_id]
        return finished

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self.storage.records.clear()
        return True

    def stats(self) -> Mapping[str, int]:
        return {**super().stats(), "blocks": len(self.storage.records)}

    # The workers.

    def _wake(self) -> None:
        self._tokens += 1
        self._world.call_after(0.0, self._start_workers)

    def _start_workers(self) -> None:
        while self._tokens and self._workers_idle:
            self._tokens -= 1
            if self._part_queue.take_lookups():
                self._workers_idle -= 1
                self._next_probe()
            elif (part := self._part_queue.take()) is not None:
                self._workers_idle -= 1
                self._start(part)

    def _rest(self) -> None:
        self._workers_idle += 1
        self._start_workers()

    def _start(self, part: Part) -> None:
        refused = self._begin_part(part)
        if refused is not None:
            self._end(part, refused)
            return
        blocks = self._blocks_of(part)

        def end(reasons: list[str]) -> None:
            for block in blocks:
                block.release()
            self._end(part, _outcome(part.keys, reasons))

        self.storage.transfer(
            part.keys,
            blocks,
            is_load=part.job.metadata.is_promotion,
            refusal=lambda: self._refusal(part),
            end=end,
        )

    def _refusal(self, part: Part) -> str:
        if part.job.epoch != self.epoch:  # as an author compares `part_epoch` before a store is published
            return "reset"
        return "unavailable" if self.storage.chance(self.storage.mood.raises) else ""

    def _end(self, part: Part, outcome: Outcome) -> None:
        self._end_part(part, outcome)
        self._rest()

    def _next_probe(self) -> None:
        probe = self._batched_lookups.take()
        if probe is None:
            self._rest()
            return
        self._world.call_after(self.storage.mood.answer_s, lambda: self._answer(probe))

    def _answer(self, probe: Probe) -> None:
        if self.storage.mood.is_mute:  # answered late, after the lookup timed out
            self._world.call_after(WEDGED_POLL_S, lambda: self._answer(probe))
            return
        has = self.storage.has
        failed = self.storage.chance(self.storage.mood.raises)
        self._batched_lookups.answer(probe, [not failed and has(key) for key in probe.keys])
        self._next_probe()

    def _stop_workers(self, deadline: float) -> int:
        self._tokens = self._workers_idle = 0
        return 0


def _outcome(keys: Collection[OffloadKey], reasons: Sequence[str]) -> Outcome:
    if not any(reasons):
        return ALL_DONE
    done = [key for key, reason in zip(keys, reasons, strict=True) if not reason]
    return Outcome(done, next(filter(None, reasons)))
