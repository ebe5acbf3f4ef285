"""A tier of the toolkit whose workers live in simulated time: the queue, lookups, deadlines and epochs are real."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.support.simulation.storage import WEDGED_POLL_S, SimulatedStorage, World
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, TierSpec
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome, Part
from tiered_kv.toolkit.lookups import Probe
from tiered_kv.toolkit.queued import QueuedTier

_PART_BLOCKS = 3
_WORKERS = 3


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
            self._end(part, _outcome(part, reasons))

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
        if self.storage.mood.is_mute:  # it hangs, and answers what nobody asks any more
            self._world.call_after(WEDGED_POLL_S, lambda: self._answer(probe))
            return
        has = self.storage.has
        failed = self.storage.chance(self.storage.mood.raises)
        self._batched_lookups.answer(probe, [not failed and has(key) for key in probe.keys])
        self._next_probe()

    def _stop_workers(self, deadline: float) -> int:
        self._tokens = self._workers_idle = 0
        return 0


def _outcome(part: Part, reasons: Sequence[str]) -> Outcome:
    if not any(reasons):
        return ALL_DONE
    done = [key for key, reason in zip(part.keys, reasons, strict=True) if not reason]
    return Outcome(done, next(filter(None, reasons)))
