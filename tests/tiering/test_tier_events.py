"""What the manager tells of the blocks of any tier, from the results of its jobs and from its own events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, make_offload_key
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 64
Told = list[tuple[str, bool, list[OffloadKey]]]


class ToldTier(SecondaryTierManager):
    """Its jobs end, and its events come, as the test says."""

    is_nonblocking = True

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "told")
        self.has = False
        self.exact = False
        self.jobs: list[JobMetadata] = []
        self.results: list[JobResult] = []
        self.events: list[object] = []

    @property
    def tells_stored(self) -> bool:
        return self.exact

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return self.has

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self.jobs.append(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        results, self.results = self.results, []
        return results

    def reset_cache(self) -> bool:
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        taken, self.events = self.events, []
        return taken  # type: ignore[return-value]  # also what no event is


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.told: Told = []
        self.is_closed = False

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        assert events
        self.told += [(event.medium, event.removed, event.keys) for event in events]

    def clear(self) -> None:
        self.told.append(("", True, []))

    def counted(self) -> dict[str, int]:
        return {"event_messages_total": len(self.told)}

    def close(self) -> None:
        self.is_closed = True

    def take(self, medium: str = "told") -> list[tuple[bool, list[OffloadKey]]]:
        """Return what was told of one medium since the last call."""
        told, self.told = self.told, []
        return [(is_removed, keys) for where, is_removed, keys in told if where == medium]


class Bench:
    """A manager with one such tier."""

    def __init__(self, *, exact: bool = False) -> None:
        region = PrimaryRegion(8, BLOCK_BYTES)
        self.tier = ToldTier(region.kv_view)
        self.tier.exact = exact
        self.sink = Sink()
        self.manager = TieringOffloadingManager(
            CPUOffloadingManager(CPUBackend(region), enable_events=True),
            [self.tier],
            settings=[TierSettings(type="told", store_budget=1 << 20, load_budget=1 << 20)],
            event_sink=self.sink,
        )

    def store(self, *numbers: int) -> None:
        context = ReqContext("store")
        output = self.manager.prepare_store(keys(*numbers), context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)

    def load(self, *numbers: int) -> None:
        self.tier.has = True
        assert self.manager.lookup_many(keys(*numbers), ReqContext("load")) == [None] * len(numbers)
        self.manager.on_schedule_end()

    def end(self, success: bool = True, only: Sequence[OffloadKey] | None = None, reason: str = "") -> None:
        self.tier.results.append(JobResult(self.tier.jobs.pop(0).job_id, success, only, reason))
        self.manager.on_schedule_end()

    def close(self) -> None:
        while self.tier.jobs:
            self.end(False)
        self.manager.shutdown(timeout_s=0)


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(b"hash-%d" % number, 0) for number in numbers]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.fixture
def exact() -> Iterator[Bench]:
    made = Bench(exact=True)
    yield made
    made.close()


def test_blocks_are_stored_in_a_tier_once_their_job_has_ended(bench: Bench) -> None:
    bench.store(1, 2)
    bench.manager.on_schedule_end()
    assert bench.sink.told == [("CPU", False, keys(1, 2))]
    bench.sink.take()
    bench.end()
    assert bench.sink.told == [("told", False, keys(1, 2))]


def test_of_a_job_that_failed_those_are_told_that_were_stored(bench: Bench) -> None:
    bench.store(1, 2, 3)
    bench.end(False, only=[*keys(3, 1), OffloadKey(b"strange")], reason="io_error")
    assert bench.sink.take() == [(False, keys(1, 3))]
    bench.store(4)
    bench.end(False, reason="no_space")
    assert bench.sink.take() == []


@pytest.mark.parametrize(
    ("reason", "is_gone"),
    [("absent", True), ("checksum", True), ("truncated", True), ("io_error", False), ("reset", False), ("", False)],
)
def test_a_load_that_finds_a_block_gone_tells_that_it_is_removed(bench: Bench, reason: str, is_gone: bool) -> None:
    bench.load(1, 2)
    bench.sink.take()
    bench.end(False, only=keys(1), reason=reason)
    assert bench.sink.told == [("CPU", False, keys(1))] + ([("told", True, keys(2))] if is_gone else [])


def test_promoted_blocks_of_one_job_are_one_event(bench: Bench) -> None:
    bench.load(1, 2, 3)
    bench.end()
    assert bench.sink.told == [("CPU", False, keys(1, 2, 3))]


def test_what_a_tier_removes_is_told_under_its_name_in_the_stack(bench: Bench) -> None:
    bench.tier.events = [
        OffloadingEvent(keys(1), 7, "whatever", removed=True),
        OffloadingEvent(keys(2), 7, "whatever", removed=False),
    ]
    bench.manager.on_schedule_end()
    assert bench.sink.take() == [(True, keys(1))], "what it stored, its jobs tell"


def test_a_tier_that_tells_what_it_stored_is_believed_instead_of_its_jobs(exact: Bench) -> None:
    exact.store(1, 2)
    exact.tier.events = [
        OffloadingEvent(keys(1), BLOCK_BYTES, "", removed=False),
        OffloadingEvent(keys(1), BLOCK_BYTES, "", removed=True),
    ]
    exact.end()
    assert exact.sink.take() == [(False, keys(1)), (True, keys(1))]


def test_nonsense_among_a_tier_s_events_is_counted_and_ends_nothing(bench: Bench) -> None:
    bench.store(1)
    bench.tier.events = ["no event"]
    bench.end()
    assert bench.manager.counters()["told"]["exceptions_total"] == 1
    bench.manager.on_schedule_end()
    assert bench.sink.take() == [(False, keys(1))]


def test_after_a_reset_nothing_from_before_it_is_told(bench: Bench) -> None:
    bench.store(1)
    bench.end()
    bench.sink.take()
    bench.store(2)
    bench.tier.events = [OffloadingEvent(keys(9), BLOCK_BYTES, "", removed=True)]
    bench.manager.reset_cache()
    assert bench.sink.told == [("", True, [])]
    bench.sink.take()
    bench.end()  # the job from before
    assert bench.sink.told == []
    bench.store(3)
    bench.end()
    assert bench.sink.told == [("CPU", False, keys(3)), ("told", False, keys(3))]


def test_what_the_last_jobs_did_is_told_before_the_sink_is_closed(bench: Bench) -> None:
    bench.store(1)
    bench.tier.results.append(JobResult(bench.tier.jobs.pop().job_id, True))
    bench.manager.shutdown()
    assert bench.sink.take() == [(False, keys(1))]
    assert bench.sink.is_closed
    assert bench.manager.counters()["cpu"]["event_messages_total"] == 0
