"""A tier whose transfers take simulated time, block by block, and whose moods a scenario decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.simulation.world import World
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager, TierSpec
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record

_WEDGED_POLL_S = 0.05
_REPORTED_KEPT = 8


@dataclass(slots=True)
class Mood:
    """How a tier behaves just now; probabilities are from 0 to 1.

    Attributes:
        block_s: Seconds that a block takes, drawn evenly from 0 to twice this.
        answer_s: Seconds until a lookup is answered; 0 for at once.
        is_wedged: Transfers stand still. Those that have begun go on when it ends, whatever has expired meanwhile.
        is_mute: Nothing is reported and no lookup answered, though transfers go on.
        fails: How likely a block is not stored, or not loaded.
        raises: How likely a call raises.
        lies: How likely a lookup is answered with the contrary of what is true.
        babbles: How likely `get_finished` adds results that nobody waits for.
        tears: How likely only a part of a record is written, and called a success.
    """

    block_s: float = 0.005
    answer_s: float = 0.0
    is_wedged: bool = False
    is_mute: bool = False
    fails: float = 0.0
    raises: float = 0.0
    lies: float = 0.0
    babbles: float = 0.0
    tears: float = 0.0


class SimulatedTier(SecondaryTierManager):
    """Keeps records in a dictionary of limited size, the oldest out first.

    Args:
        world: Whose time it lives in.
        spec: Name and block size.
        primary_kv_view: The primary region.
        records_max: How many records it keeps.
        can_reset: Whether `reset_cache` works; if not, nobody must use the tier after one.

    Attributes:
        records: What it has stored; a scenario may damage it.
        mood: How it behaves; a scenario may change it.
        reset_refused: How often it was asked to forget and could not.
        used_after_refusal: How many jobs it was given after that.
        transfers_running: Jobs that have begun and not ended.
        deadlines_s: Of jobs that have not been reported.
    """

    is_nonblocking: ClassVar[bool] = True

    def __init__(
        self, world: World, spec: TierSpec, primary_kv_view: memoryview, *, records_max: int, can_reset: bool = True
    ) -> None:
        super().__init__(spec, primary_kv_view, spec.name)
        self.records: dict[OffloadKey, bytearray] = {}
        self.mood = Mood()
        self.reset_refused = 0
        self.used_after_refusal = 0
        self.transfers_running = 0
        self.deadlines_s: dict[JobId, float] = {}
        self._world = world
        self._spec = spec
        self._flat = primary_kv_view.cast("B")
        self._records_max = records_max
        self._can_reset = can_reset
        self._epoch = 0
        self._finished: list[JobResult] = []
        self._reported: list[JobResult] = []
        self._answers: dict[tuple[str, OffloadKey], bool | None] = {}
        self._lookup_failures = 0

    # What the manager calls.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._maybe_raise()
        if not self.mood.answer_s and not self.mood.is_mute:
            return self._answer(key)
        question = (req_context.req_id, key)
        if question not in self._answers:
            self._answers[question] = None
            self._world.call_after(self.mood.answer_s, lambda: self._settle_question(question))
        return self._answers[question]

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._begin(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._begin(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._maybe_raise()
        if self.mood.is_mute:
            return ()
        results, self._finished = self._finished, []
        for result in results:
            del self.deadlines_s[result.job_id]
        self._reported = (self._reported + results)[-_REPORTED_KEPT:]
        if self._chance(self.mood.babbles):
            stale = [JobResult(-1, True), *self._reported[:1]]
            return [*results, *stale]
        return results

    @property
    def lookup_failures(self) -> int:
        return self._lookup_failures

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._maybe_raise()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._maybe_raise()
        for question in [question for question in self._answers if question[0] == req_context.req_id]:
            del self._answers[question]

    def on_schedule_end(self) -> None:
        self._maybe_raise()

    def reset_cache(self) -> bool:
        if not self._can_reset:
            self.reset_refused += 1
            return False
        self._epoch += 1
        self.records.clear()
        self._answers.clear()
        return True

    def stats(self) -> Mapping[str, int]:
        return {"blocks": len(self.records)}

    # What fate may do.

    def damage(self, rng: Random) -> None:
        """Flip a bit of a record, cut it, or put another key's record in its place."""
        if not self.records:
            return
        keys = list(self.records)
        key, record = keys[rng.randrange(len(keys))], bytearray()
        match rng.randrange(3):
            case 0:
                record = self.records[key]
                if record:
                    record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
            case 1:
                record = self.records[key]
                del record[rng.randrange(len(record) + 1) :]
            case _:
                self.records[key] = bytearray(self.records[keys[rng.randrange(len(keys))]])

    # Transfers.

    def _begin(self, job: JobMetadata) -> None:
        self._maybe_raise()
        if self.reset_refused:
            self.used_after_refusal += 1
        transfer = _Transfer(job, list(job.keys), job.block_ids.tolist(), self._epoch)
        self.transfers_running += 1
        assert job.deadline is not None
        self.deadlines_s[job.job_id] = job.deadline
        self._world.call_after(self._block_s(), lambda: self._step(transfer))

    def _step(self, transfer: _Transfer) -> None:
        """Move one block, and come back for the next, or report the job."""
        if self.mood.is_wedged:
            self._world.call_after(_WEDGED_POLL_S, lambda: self._step(transfer))
            return
        if transfer.next_block < len(transfer.keys):
            key, row = transfer.keys[transfer.next_block], transfer.rows[transfer.next_block]
            transfer.next_block += 1
            block = self._flat[row * self._spec.block_bytes : (row + 1) * self._spec.block_bytes]
            move = self._load if transfer.job.is_promotion else self._store
            reason = "reset" if transfer.epoch != self._epoch else move(key, block)
            if reason:
                transfer.reason = reason
            else:
                transfer.done.append(key)
            self._world.call_after(self._block_s(), lambda: self._step(transfer))
            return
        self.transfers_running -= 1
        self._finished.append(transfer.result())

    def _store(self, key: OffloadKey, block: memoryview) -> str:
        if self._chance(self.mood.fails):
            return "io_error"
        header, payload = encode_record(key, block, self._spec.namespace_digest)
        record = bytearray(header + bytes(payload))
        if self._chance(self.mood.tears):
            del record[self._world.rng.randrange(len(record)) :]
        self.records.pop(key, None)
        while len(self.records) >= self._records_max:
            del self.records[next(iter(self.records))]
        self.records[key] = record
        return ""

    def _load(self, key: OffloadKey, block: memoryview) -> str:
        if self._chance(self.mood.fails):
            block[: len(block) // 2] = bytes(len(block) // 2)  # a transfer that breaks off leaves its beginning
            return "io_error"
        record = self.records.get(key)
        if record is None:
            return "absent"
        data = memoryview(record)
        status = decode_record(data[:HEADER_BYTES], data[HEADER_BYTES:], key, block, self._spec.namespace_digest)
        data.release()
        if status is not RecordStatus.OK:
            del self.records[key]
        return "" if status is RecordStatus.OK else status.value

    # Lookups and chance.

    def _answer(self, key: OffloadKey) -> bool:
        return (key in self.records) != self._chance(self.mood.lies)

    def _settle_question(self, question: tuple[str, OffloadKey]) -> None:
        if question not in self._answers:
            return
        if self.mood.is_mute:
            self._lookup_failures += 1
            self._answers[question] = False
        else:
            self._answers[question] = self._answer(question[1])

    def _block_s(self) -> float:
        return self._world.rng.random() * 2 * self.mood.block_s

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._world.rng.random() < probability

    def _maybe_raise(self) -> None:
        if self._chance(self.mood.raises):
            raise TierUnavailableError("the simulated tier is not to be reached")


class _Transfer:
    """A job on its way."""

    __slots__ = ("done", "epoch", "job", "keys", "next_block", "reason", "rows")

    def __init__(self, job: JobMetadata, keys: list[OffloadKey], rows: list[int], epoch: int) -> None:
        self.job = job
        self.keys = keys
        self.rows = rows
        self.epoch = epoch
        self.next_block = 0
        self.done: list[OffloadKey] = []
        self.reason = ""

    def result(self) -> JobResult:
        if len(self.done) == len(self.keys):
            return JobResult(self.job.job_id, True)
        return JobResult(self.job.job_id, False, self.done, self.reason)
