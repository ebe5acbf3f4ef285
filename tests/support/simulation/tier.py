"""A tier whose transfers take simulated time, block by block, and whose moods a scenario decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from tests.support.simulation.storage import SimulatedStorage, World
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager, TierSpec

_WEDGED_POLL_S = 0.05
_REPORTED_KEPT = 8


class SimulatedTier(SecondaryTierManager):
    """A tier written from nothing but the interface, which may break every rule of it that its mood says."""

    is_nonblocking: ClassVar[bool] = True

    def __init__(
        self, world: World, spec: TierSpec, primary_kv_view: memoryview, *, records_max: int, can_reset: bool = True
    ) -> None:
        super().__init__(spec, primary_kv_view, spec.name)
        self.storage = SimulatedStorage(world, spec.namespace_digest, records_max)
        self.reset_refused = 0
        self.used_after_refusal = 0
        self.transfers_running = 0
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
        transfer = _Transfer(job, list(job.keys), job.block_ids.tolist(), self._epoch)
        self.transfers_running += 1
        assert job.deadline is not None
        self.deadlines_s[job.job_id] = job.deadline
        self._world.call_after(self._block_s(), lambda: self._step(transfer))

    def _step(self, transfer: _Transfer) -> None:
        """Move one block, and come back for the next, or report the job."""
        if self.storage.mood.is_wedged:
            self._world.call_after(_WEDGED_POLL_S, lambda: self._step(transfer))
            return
        if transfer.next_block < len(transfer.keys):
            key, row = transfer.keys[transfer.next_block], transfer.rows[transfer.next_block]
            transfer.next_block += 1
            block = self._flat[row * self._spec.block_bytes : (row + 1) * self._spec.block_bytes]
            move = self.storage.load if transfer.job.is_promotion else self.storage.store
            reason = "reset" if transfer.epoch != self._epoch else move(key, block)
            if reason:
                transfer.reason = reason
            else:
                transfer.done.append(key)
            self._world.call_after(self._block_s(), lambda: self._step(transfer))
            return
        self.transfers_running -= 1
        self._finished.append(transfer.result())

    # Lookups and chance.

    def _settle_question(self, question: tuple[str, OffloadKey]) -> None:
        if question not in self._answers:
            return
        if self.storage.mood.is_mute:  # for as long as it is: who asks has to give it up
            self._world.call_after(_WEDGED_POLL_S, lambda: self._settle_question(question))
        else:
            self._answers[question] = self.storage.has(question[1])

    def _block_s(self) -> float:
        return self._world.rng.random() * 2 * self.storage.mood.block_s


@dataclass(slots=True)
class _Transfer:
    """A job on its way."""

    job: JobMetadata
    keys: list[OffloadKey]
    rows: list[int]
    epoch: int
    next_block: int = 0
    done: list[OffloadKey] = field(default_factory=list)
    reason: str = ""

    def result(self) -> JobResult:
        if len(self.done) == len(self.keys):
            return JobResult(self.job.job_id, True)
        return JobResult(self.job.job_id, False, self.done, self.reason)
