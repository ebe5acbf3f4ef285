"""The tiering manager, step by step: a tier whose jobs end when the test says so, and a clock that it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tiered_kv.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext, make_offload_key
from tiered_kv.config.settings import TierSettings
from tiered_kv.counters import count_of
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.clock import ManualClock
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.limits import ManagerLimits
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 64


class ManualTier(SecondaryTierManager):
    """Holds its jobs until the test ends them."""

    is_nonblocking = True

    def __init__(self, view: memoryview, name: str) -> None:
        super().__init__(None, view, name)
        self.present: dict[OffloadKey, bool | None] = {}
        self.jobs: list[JobMetadata] = []
        self.results: list[JobResult] = []
        self.raises = ""
        self.can_reset = True
        self.policy = OffloadPolicy.BLOCK_LEVEL
        self.failures = 0

    @property
    def lookup_failures(self) -> int:
        return self.failures

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._maybe_raise("lookup")
        return self.present.get(key, False)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._maybe_raise("submit_store")
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._maybe_raise("submit_load")
        self.jobs.append(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._maybe_raise("get_finished")
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(self.policy)

    def reset_cache(self) -> bool:
        self.present.clear()
        return self.can_reset

    def end(self, success: bool = True, only: Sequence[OffloadKey] | None = None, reason: str = "") -> JobMetadata:
        """End the oldest job; with `only`, in part."""
        job = self.jobs.pop(0)
        succeeded = list(job.keys) if success else list(only or ())
        if not job.is_promotion:
            self.present.update(dict.fromkeys(succeeded, True))
        self.results.append(JobResult(job.job_id, success, only, reason))
        return job

    def _maybe_raise(self, method: str) -> None:
        if self.raises == method:
            raise RuntimeError(method)


@dataclass
class Bench:
    """A manager over manual tiers."""

    num_blocks: int = 8
    settings: Sequence[TierSettings] = (TierSettings(type="tier", store_budget=1 << 20, load_budget=1 << 20),)
    limits: ManagerLimits = field(default_factory=lambda: ManagerLimits(promotion_blocks_max=6))
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.region = PrimaryRegion(self.num_blocks, BLOCK_BYTES)
        self.primary = CPUOffloadingManager(CPUBackend(self.region), enable_events=True)
        self.tiers = [ManualTier(self.region.kv_view, f"tier{index}") for index in range(len(self.settings))]
        settings = [
            each.model_copy(update={"name": tier.tier_type})
            for each, tier in zip(self.settings, self.tiers, strict=True)
        ]
        for tier in self.tiers:
            tier.policy = self.policy
        self.manager = TieringOffloadingManager(
            self.primary, self.tiers, settings=settings, limits=self.limits, clock=self.clock
        )

    @property
    def tier(self) -> ManualTier:
        return self.tiers[0]

    @property
    def free(self) -> int:
        return self.primary.backend.get_num_free_blocks()

    def counter(self, *path: str, tier: str = "tier0") -> int:
        return count_of(self.manager.counters()[tier], *path)

    def request(self, req_id: str) -> ReqContext:
        context = ReqContext(req_id)
        self.manager.on_new_request(context)
        return context

    def store(self, keys: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)

    def lookup(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[bool | None]:
        return [self.manager.lookup(key, context) for key in keys]

    def step(self) -> None:
        self.manager.on_schedule_end()

    def promote(self, *numbers: int) -> ReqContext:
        """Return a request that waits for blocks which the tier has been told to load."""
        self.tier.present = dict.fromkeys(keys(*numbers), True)
        context = self.request("a")
        self.lookup(keys(*numbers), context)
        self.step()
        return context

    def end(self, success: bool = True, only: Sequence[OffloadKey] | None = None, reason: str = "") -> None:
        self.tier.end(success, only, reason)
        self.step()


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(b"hash-%d" % number, 0) for number in numbers]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: object) -> Bench:
        benches.append(Bench(**options))  # type: ignore[arg-type]  # options are Bench's own fields
        return benches[-1]

    yield make
    for bench in benches:
        for tier in bench.tiers:
            tier.raises = ""
            while tier.jobs:
                tier.end(success=False)
        bench.manager.shutdown(timeout_s=0)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench()


# Cascade.


def test_stored_blocks_cascade_and_stay_pinned_until_the_tier_has_them(bench: Bench) -> None:
    bench.store(keys(*range(8)), bench.request("a"))
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(*range(8))]
    assert not bench.tier.jobs[0].is_promotion
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is None
    bench.end()
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is not None
    assert bench.counter("stored_blocks_total") == 8
    assert bench.counter("stored_bytes_total") == 8 * BLOCK_BYTES


def test_a_tier_over_its_budget_skips_stores_and_pins_nothing(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", store_budget=3 * BLOCK_BYTES)])
    bench.store(keys(0, 1), bench.request("a"))
    bench.store(keys(2, 3, 4), bench.request("b"))
    bench.store(keys(5), bench.request("c"))
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(0, 1), keys(2)]
    assert bench.counter("skipped_blocks_total", "budget") == 3
    assert bench.manager.prepare_store(keys(10, 11, 12, 13, 14), bench.request("d")) is not None
    bench.end()
    bench.store(keys(20), bench.request("e"))
    assert list(bench.tier.jobs[-1].keys) == keys(20)


def test_admission_stores_a_block_when_it_is_offered_again(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", admit_after=2)])
    bench.store(keys(0, 1), bench.request("a"))
    assert not bench.tier.jobs
    assert bench.counter("skipped_blocks_total", "admission") == 2
    bench.store(keys(*range(10, 18)), bench.request("b"))  # evicts them
    bench.store(keys(1, 2), bench.request("c"))
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(1)]


def test_a_failed_engine_store_does_not_cascade(bench: Bench) -> None:
    context = bench.request("a")
    bench.manager.prepare_store(keys(1, 2), context)
    bench.manager.complete_store(keys(1, 2), context, success=False)
    assert not bench.tier.jobs
    assert bench.free == bench.num_blocks


def test_a_request_level_tier_gets_the_whole_request_at_its_end(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(policy=OffloadPolicy.REQUEST_LEVEL)
    bench.store(keys(0, 1), bench.request("earlier"))
    bench.manager.on_request_finished(ReqContext("earlier"))
    bench.end()
    context = ReqContext("a")
    assert bench.manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
    output = bench.manager.prepare_store(keys(0, 1, 2, 3), context)
    assert output is not None
    assert output.keys_to_store == keys(2, 3)
    bench.manager.on_request_finished(context)
    assert not bench.tier.jobs, "its last blocks are not written yet"
    bench.manager.complete_store(output.keys_to_store, context)
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(0, 1, 2, 3)]


# Promotion.


def test_a_hit_below_is_promoted_once_for_all_who_ask(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(1, 2), True)
    first, second = bench.request("a"), bench.request("b")
    assert bench.lookup(keys(1, 2, 3), first) == [None, None, False]
    assert bench.lookup(keys(1, 2), second) == [None, None]
    assert not bench.tier.jobs, "submitted at the end of the step"
    bench.step()
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(1, 2)]
    assert bench.tier.jobs[0].is_promotion
    assert bench.lookup(keys(1, 2), first) == [None, None]
    bench.end()
    assert bench.lookup(keys(1, 2), first) == [True, True]
    assert bench.lookup(keys(1, 2), second) == [True, True]
    assert bench.manager.hit_tier(keys(1)[0], first) == "tier0"
    assert bench.manager.hit_tier(keys(1)[0], bench.request("c")) == "cpu"
    assert bench.counter("loaded_blocks_total") == 2


def test_tiers_are_searched_in_order(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier"), TierSettings(type="tier")])
    bench.tiers[1].present = dict.fromkeys(keys(1, 2), True)
    bench.tiers[0].present = dict.fromkeys(keys(1), True)
    bench.lookup(keys(1, 2), bench.request("a"))
    bench.step()
    assert [list(job.keys) for tier in bench.tiers for job in tier.jobs] == [keys(1), keys(2)]


def test_a_promoted_block_is_kept_for_the_request_that_waits_for_it(bench: Bench) -> None:
    context = bench.promote(1)
    bench.end()
    assert bench.manager.prepare_store(keys(*range(10, 18)), bench.request("b")) is None
    assert bench.lookup(keys(1), context) == [True]
    bench.manager.prepare_load(keys(1), context)
    bench.manager.complete_load(keys(1), context)
    bench.step()
    assert bench.manager.prepare_store(keys(*range(10, 18)), bench.request("b")) is not None


@pytest.mark.parametrize("how", ["finished", "time"])
def test_a_promoted_block_that_nobody_loads_is_let_go(bench: Bench, how: str) -> None:
    context = bench.promote(1)
    bench.end()
    if how == "finished":
        bench.manager.on_request_finished(context)
    else:
        bench.clock.advance(bench.limits.hold_s)
        bench.step()
        assert bench.counter("released_holds_total", tier="cpu") == 1
    assert bench.manager.prepare_store(keys(*range(10, 18)), bench.request("b")) is not None


def test_promotions_do_not_flush_the_primary_tier(bench: Bench) -> None:
    bench.store(keys(*range(20, 28)), bench.request("a"))
    bench.end()
    bench.tier.present = dict.fromkeys(keys(*range(10)), True)
    one, other = bench.request("one"), bench.request("other")
    assert bench.lookup(keys(*range(8)), one) == [None] * 6 + [False] * 2, "it takes what it has got"
    assert bench.lookup(keys(8), other) == [None], "it waits for what the others hold"
    bench.step()
    assert len(bench.tier.jobs) == 1
    bench.tier.end()
    bench.manager.on_request_finished(one)
    bench.step()
    assert bench.lookup(keys(8), other) == [None]
    bench.step()
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(8)]


# One bound on waiting.


def answers_nothing(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(6), None)


def has_no_room(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(*range(7)), True)
    bench.lookup(keys(*range(6)), bench.request("hoarder"))


def is_stored_by_another(bench: Bench) -> None:
    bench.manager.prepare_store(keys(6), bench.request("writer"))


def is_on_its_way(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(6), True)


@pytest.fixture
def patient_bench(make_bench: Callable[..., Bench]) -> Bench:
    """A manager whose tier may take as long as it likes."""
    return make_bench(
        settings=[
            TierSettings(type="tier", store_budget=1 << 20, load_budget=1 << 20, job_timeout=86400, lookup_timeout=3600)
        ]
    )


def ask_on(bench: Bench, wanted: list[OffloadKey], context: ReqContext, seconds: float) -> list[object]:
    """Ask twice a second, each time in a step of its own; return the answers without repetitions."""
    told: list[object] = []
    for _ in range(int(2 * seconds)):
        answers = bench.lookup(wanted, context)
        if answers != told[-1:]:
            told += answers
        bench.step()
        bench.clock.advance(0.5)
        bench.step()
    return told


CAUSES = (answers_nothing, has_no_room, is_stored_by_another, is_on_its_way)


@pytest.mark.parametrize("block", CAUSES)
def test_a_request_waits_until_its_bound_and_not_again(patient_bench: Bench, block: Callable[[Bench], None]) -> None:
    bench, wait_s = patient_bench, patient_bench.limits.wait_max_s
    block(bench)
    context = bench.request("a")
    assert ask_on(bench, keys(6), context, wait_s) == [None]
    assert ask_on(bench, keys(6), context, 2 * wait_s) == [False], "a miss, and for good"
    assert bench.lookup(keys(6), bench.request("b")) == [None], "others have a bound of their own"


def test_all_that_a_request_waits_for_has_one_bound(patient_bench: Bench) -> None:
    bench = patient_bench
    context = bench.request("a")
    answers_nothing(bench)
    assert ask_on(bench, keys(6), context, 12) == [None]
    has_no_room(bench)
    assert ask_on(bench, keys(6), context, 12) == [None]
    is_stored_by_another(bench)
    assert ask_on(bench, keys(6), context, bench.limits.wait_max_s - 24) == [None]
    assert bench.lookup(keys(6), context) == [False]


def test_a_request_that_has_waited_takes_no_room_any_more(patient_bench: Bench) -> None:
    bench = patient_bench
    answers_nothing(bench)
    bench.store(keys(1), bench.request("other"))
    context = bench.request("a")
    ask_on(bench, keys(6), context, bench.limits.wait_max_s)
    bench.tier.end()
    is_on_its_way(bench)
    assert bench.manager.lookup_many(keys(1, 6), context) == [True, False], "what is ready is found"
    bench.step()
    assert not bench.tier.jobs


def test_a_request_that_loads_what_it_waited_for_may_wait_anew(patient_bench: Bench) -> None:
    bench = patient_bench
    context = bench.request("a")
    for number in range(4):
        bench.tier.present = dict.fromkeys(keys(number), True)
        assert ask_on(bench, keys(number), context, bench.limits.wait_max_s - 1) == [None]
        bench.end()
        assert bench.lookup(keys(number), context) == [True]
        bench.manager.prepare_load(keys(number), context)
        bench.manager.complete_load(keys(number), context)


def test_loading_what_was_ready_anyway_does_not_lengthen_the_wait(patient_bench: Bench) -> None:
    bench = patient_bench
    bench.store(keys(1), bench.request("other"))
    is_on_its_way(bench)
    context = bench.request("a")
    for _ in range(int(bench.limits.wait_max_s)):
        assert ask_on(bench, keys(6), context, 1) == [None]
        bench.manager.prepare_load(keys(1), context)
        bench.manager.complete_load(keys(1), context)
    assert bench.lookup(keys(6), context) == [False]


def test_an_engine_that_does_not_ask_does_not_wait(patient_bench: Bench) -> None:
    bench = patient_bench
    is_on_its_way(bench)
    context = bench.request("a")
    for _ in range(10):
        assert bench.lookup(keys(6), context) == [None]
        bench.clock.advance(bench.limits.wait_max_s)
        bench.step()


def test_a_tiers_load_budget_bounds_its_loads(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", load_budget=2 * BLOCK_BYTES)])
    bench.tier.present = dict.fromkeys(keys(1, 2, 3), True)
    context = bench.request("a")
    assert bench.lookup(keys(1, 2, 3), context) == [None] * 3
    bench.step()
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(1, 2)]
    bench.end()
    assert bench.lookup(keys(1, 2, 3), context) == [True, True, None]
    bench.step()
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(3)]


def test_promoted_blocks_fill_the_tiers_above_that_want_them(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", fill_on_promotion=True), TierSettings(type="tier")])
    bench.tiers[1].present = dict.fromkeys(keys(1), True)
    context = bench.request("a")
    bench.lookup(keys(1), context)
    bench.step()
    bench.tiers[1].end()
    bench.step()
    assert [list(job.keys) for job in bench.tiers[0].jobs] == [keys(1)]
    assert not bench.tiers[0].jobs[0].is_promotion


def test_prefetch_follows_up_answers_that_come_late(bench: Bench) -> None:
    bench.tier.present = {keys(1)[0]: True, keys(2)[0]: None}
    context = bench.request("a")
    bench.manager.prefetch(keys(1, 2, 3), context)
    bench.step()
    bench.tier.present[keys(2)[0]] = True
    bench.step()
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(1), keys(2)]
    bench.tier.end()
    bench.end()
    assert bench.lookup(keys(1, 2, 3), context) == [True, True, False]


@pytest.mark.parametrize("tier_raises", [False, True])
def test_lookup_many_answers_like_lookup(make_bench: Callable[..., Bench], tier_raises: bool) -> None:
    answers: list[object] = []
    for many in (False, True):
        bench = make_bench(settings=[TierSettings(type="tier"), TierSettings(type="tier")])
        bench.store(keys(1), bench.request("a"))
        bench.manager.prepare_store(keys(2), bench.request("a"))
        bench.tiers[0].present.update({**dict.fromkeys(keys(3, 3), True), **dict.fromkeys(keys(4), None)})
        bench.tiers[1].present.update(dict.fromkeys(keys(3, 5), True))
        bench.tiers[0].raises = "lookup" if tier_raises else ""
        wanted, context = keys(1, 2, 3, 3, 4, 5, 6, 1), bench.request("b")
        answers.append(bench.manager.lookup_many(wanted, context) if many else bench.lookup(wanted, context))
        bench.step()
        answers.append([sorted(key for job in tier.jobs for key in job.keys) for tier in bench.tiers])
    assert answers[:2] == answers[2:]


# Failure.


def test_a_failed_load_is_a_miss_for_its_request_and_no_loop(bench: Bench) -> None:
    context = bench.promote(1)
    bench.end(success=False, reason="io_error")
    assert bench.lookup(keys(1), context) == [False]
    assert bench.free == bench.num_blocks
    assert bench.counter("failed_blocks_total", "load", "io_error") == 1
    assert bench.lookup(keys(1), bench.request("b")) == [None], "another request may try again"


def test_a_load_that_fails_on_one_block_keeps_the_others(bench: Bench) -> None:
    context = bench.promote(1, 2, 3)
    bench.end(success=False, only=[*keys(1, 3), *keys(99)], reason="checksum")
    assert bench.lookup(keys(1, 2, 3), context) == [True, False, True]
    assert bench.counter("failed_blocks_total", "load", "checksum") == 1
    assert bench.counter("loaded_blocks_total") == 2


def test_a_block_that_one_tier_fails_on_is_asked_of_the_next(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier"), TierSettings(type="tier")])
    for tier in bench.tiers:
        tier.present = dict.fromkeys(keys(1), True)
    context = bench.request("a")
    bench.lookup(keys(1), context)
    bench.step()
    bench.tiers[0].end(success=False)
    bench.step()
    assert bench.lookup(keys(1), context) == [None]
    bench.step()
    bench.tiers[1].end()
    bench.step()
    assert bench.lookup(keys(1), context) == [True]
    assert bench.manager.hit_tier(keys(1)[0], context) == "tier1"


def test_blocks_of_an_expired_load_are_not_reused_before_the_tier_lets_go(bench: Bench) -> None:
    context = bench.promote(1, 2)
    bench.clock.advance(TierSettings(type="tier").job_timeout)
    bench.step()
    assert bench.lookup(keys(1, 2), context) == [False, False]
    assert bench.counter("expired_jobs_total") == 1
    assert bench.counter("quarantined_bytes") == 2 * BLOCK_BYTES
    assert bench.free == bench.num_blocks - 2
    rows = set(bench.tier.jobs[0].block_ids.tolist())
    output = bench.manager.prepare_store(keys(*range(10, 16)), bench.request("b"))
    assert output is not None
    assert not rows & set(output.store_spec.block_ids.tolist())  # type: ignore[attr-defined]  # a CPULoadStoreSpec
    bench.end()
    assert bench.free == 2
    assert bench.counter("quarantined_bytes") == 0
    assert bench.counter("late_jobs_total") == 1
    assert bench.lookup(keys(1), context) == [False], "what came late does not count"


def test_blocks_of_an_expired_store_stay_readable_and_pinned(bench: Bench) -> None:
    context = bench.request("a")
    bench.store(keys(*range(8)), context)
    bench.clock.advance(TierSettings(type="tier").job_timeout)
    bench.step()
    assert bench.lookup(keys(0), context) == [True]
    bench.step()
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is None
    bench.end()
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is not None


def test_a_tier_that_never_reports_takes_its_budget_and_no_more(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(
        num_blocks=16,
        settings=[TierSettings(type="tier", store_budget=4 * BLOCK_BYTES, job_timeout=1, breaker_failures=1000)],
    )
    for number in range(50):
        bench.store(keys(number), bench.request(f"r{number}"))
        bench.clock.advance(1)
        bench.step()
    assert len(bench.tier.jobs) == 4
    assert bench.counter("quarantined_bytes") == 4 * BLOCK_BYTES
    assert bench.counter("skipped_blocks_total", "budget") == 46


def test_the_breaker_opens_closes_and_lets_one_probe_through(make_bench: Callable[..., Bench]) -> None:
    limits = TierSettings(type="tier", breaker_failures=2, breaker_cooldown=5)
    bench = make_bench(num_blocks=16, settings=[limits])
    for number in range(2):
        bench.store(keys(number), bench.request("a"))
        bench.end(success=False, reason="io_error")
    bench.tier.present = dict.fromkeys(keys(50), True)
    assert bench.lookup(keys(50), bench.request("b")) == [False]
    bench.store(keys(10), bench.request("b"))
    assert not bench.tier.jobs
    assert bench.counter("skipped_blocks_total", "breaker") == 1
    bench.clock.advance(5)
    bench.step()
    bench.store(keys(11), bench.request("c"))
    bench.store(keys(12), bench.request("c"))
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(11)], "one probe at a time"
    bench.end()
    bench.store(keys(13), bench.request("c"))
    assert len(bench.tier.jobs) == 1
    assert bench.lookup(keys(50), bench.request("d")) == [None]
    assert bench.counter("breaker_opened_total") == 1


def test_a_lookup_that_is_never_answered_is_a_miss_in_time(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(1, 2), None)
    context = bench.request("a")
    assert bench.lookup(keys(1, 2), context) == [None, None]
    bench.clock.advance(TierSettings(type="tier").lookup_timeout)
    assert bench.lookup(keys(1, 2, 3), context) == [False, False, False]
    assert bench.counter("lookup_timeouts_total") == 1


def test_lookups_that_a_tier_itself_gives_up_open_its_breaker(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", breaker_failures=2)])
    for _ in range(2):
        assert bench.counter("breaker_opened_total") == 0
        bench.tier.failures += 10  # one probe of many keys
        bench.step()
    assert bench.counter("breaker_opened_total") == 1
    bench.step()
    assert bench.counter("breaker_opened_total") == 1


@pytest.mark.parametrize("method", ["lookup", "submit_load", "submit_store", "get_finished"])
def test_a_tier_that_raises_costs_hits_and_nothing_else(
    bench: Bench, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.tier.raises = method
    bench.tier.present = dict.fromkeys(keys(50), True)
    for number in range(3):
        context = bench.request(f"r{number}")
        bench.store(keys(number), context)
        bench.lookup(keys(50), context)
        bench.step()
        bench.manager.on_request_finished(context)
    assert bench.lookup(keys(0, 1, 2), bench.request("last")) == [True] * 3
    assert bench.counter("exceptions_total") >= 3
    assert len([record for record in caplog.records if record.exc_info]) == 1, "a broken tier does not flood the log"


def test_a_load_budget_full_of_wedged_loads_is_a_miss_at_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", load_budget=2 * BLOCK_BYTES, job_timeout=1)])
    bench.tier.present = dict.fromkeys(keys(1, 2, 3), True)
    bench.lookup(keys(1, 2), bench.request("a"))
    bench.step()
    bench.clock.advance(1)
    bench.step()
    assert bench.lookup(keys(3), bench.request("b")) == [False]
    bench.end()
    assert bench.lookup(keys(3), bench.request("c")) == [None], "the tier has let go"


def test_a_request_does_not_wait_again_for_a_tier_that_failed_it(bench: Bench) -> None:
    context = bench.promote(1)
    bench.end(success=False, reason="checksum")
    assert bench.lookup(keys(1), bench.request("other")) == [None]
    assert bench.lookup(keys(1), context) == [False], "the other's promotion comes from the same tier"


def test_a_request_without_an_id_asks_in_vain_for_a_while_only(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(1), None)
    assert bench.lookup(keys(1), ReqContext()) == [None]
    bench.clock.advance(TierSettings(type="tier").lookup_timeout)
    assert bench.lookup(keys(1), ReqContext()) == [False]
    bench.tier.present = dict.fromkeys(keys(2), True)
    bench.clock.advance(2 * bench.limits.wait_max_s)
    assert bench.lookup(keys(2), ReqContext()) == [None]
    bench.step()
    bench.end(success=False)
    assert bench.lookup(keys(2), ReqContext()) == [False], "no loop between lookup and load"
    bench.clock.advance(2 * bench.limits.wait_max_s)
    assert bench.lookup(keys(2), ReqContext()) == [None]
    assert False in ask_on(bench, keys(2), ReqContext(), 2 * bench.limits.wait_max_s)


def test_waiting_is_counted_anew_after_an_answer(bench: Bench) -> None:
    bench.tier.present = dict.fromkeys(keys(1), None)
    context = bench.request("a")
    bench.lookup(keys(1), context)
    bench.tier.present = {}
    assert bench.lookup(keys(1), context) == [False]
    bench.clock.advance(5)
    bench.tier.present = dict.fromkeys(keys(1), None)
    assert bench.lookup(keys(1), context) == [None]
    assert bench.counter("lookup_timeouts_total") == 0


def test_blocks_held_for_many_requests_count_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(limits=ManagerLimits(promotion_blocks_max=3))
    bench.tier.present = dict.fromkeys(keys(1, 2, 3), True)
    waiting = [bench.request(f"r{number}") for number in range(10)]
    for context in waiting:
        assert bench.lookup(keys(1, 2), context) == [None, None]
    bench.step()
    bench.end()
    assert bench.counter("promotion_blocks", tier="cpu") == 2
    assert bench.lookup(keys(3), bench.request("other")) == [None]
    bench.step()
    assert len(bench.tier.jobs) == 1
    for context in waiting:
        bench.manager.on_request_finished(context)
    assert bench.counter("promotion_blocks", tier="cpu") == 1


def test_completing_twice_releases_no_other_pin(bench: Bench) -> None:
    context = bench.request("a")
    bench.store(keys(*range(8)), context)  # pinned by the cascade
    bench.manager.prepare_load(keys(0), context)
    for _ in range(3):
        bench.manager.complete_load(keys(0, 1), context)
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is None, "the tier still reads them"
    bench.end()
    assert bench.manager.prepare_store(keys(9), bench.request("b")) is not None


def test_completing_a_store_names_each_key_once(bench: Bench) -> None:
    context = bench.request("a")
    bench.manager.prepare_store(keys(1, 2), context)
    bench.manager.complete_store(keys(1, 1), context)
    bench.manager.complete_store(keys(2, 2), context, success=False)
    bench.end()
    assert len(bench.primary.policy) == 1
    assert bench.free == bench.num_blocks - 1


def test_an_engine_does_not_free_a_row_that_a_reset_left_to_a_tier(bench: Bench) -> None:
    bench.promote(0)
    context = bench.request("b")
    bench.manager.prepare_store(keys(0, 1), context)
    bench.manager.reset_cache()
    bench.manager.complete_store(keys(0, 1), context)
    assert bench.free == bench.num_blocks - 1, "the tier is still writing"
    bench.end()
    assert bench.free == bench.num_blocks


def test_a_block_that_is_loaded_again_is_admitted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", admit_after=2)])
    context = bench.request("a")
    bench.store(keys(1, 2), context)
    assert not bench.tier.jobs
    bench.manager.prepare_load(keys(1), context)
    bench.manager.complete_load(keys(1), context)
    assert [list(job.keys) for job in bench.tier.jobs] == [keys(1)]


# Reset, drain, shutdown.


def test_a_reset_ends_requests_that_only_waited_for_their_stores(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(policy=OffloadPolicy.REQUEST_LEVEL)
    context = bench.request("a")
    bench.manager.prepare_store(keys(1), context)
    bench.manager.on_request_finished(context)
    bench.manager.reset_cache()
    bench.manager.complete_store(keys(1), context)
    assert not bench.tier.jobs
    assert bench.free == bench.num_blocks


def test_reset_forgets_blocks_in_every_tier_and_gives_rows_back_when_transfers_end(bench: Bench) -> None:
    bench.store(keys(1, 2), bench.request("a"))
    bench.tier.present = dict.fromkeys(keys(3, 4), True)
    loader, queued = bench.request("loader"), bench.request("queued")
    bench.lookup(keys(3), loader)
    bench.step()
    bench.lookup(keys(4), queued)
    bench.manager.reset_cache()
    assert bench.free == bench.num_blocks - 3, "a store and a load are in flight"
    assert bench.lookup(keys(1, 2, 3, 4), loader) == [False] * 4
    bench.tier.end()
    bench.end()
    assert bench.free == bench.num_blocks
    assert bench.lookup(keys(3), loader) == [False], "loaded from before the reset"
    assert bench.counter("promotion_blocks", tier="cpu") == 0


def test_a_tier_that_cannot_forget_is_not_used_after_a_reset(bench: Bench) -> None:
    bench.tier.can_reset = False
    bench.manager.reset_cache()
    bench.tier.present = dict.fromkeys(keys(1), True)
    assert bench.lookup(keys(1), bench.request("a")) == [False]
    bench.store(keys(2), bench.request("a"))
    assert not bench.tier.jobs
    assert bench.counter("skipped_blocks_total", "disabled") == 1


def test_drain_waits_for_jobs_and_says_when_they_do_not_end(bench: Bench) -> None:
    bench.store(keys(1), bench.request("a"))
    assert not bench.manager.drain_jobs(timeout_s=0)
    bench.tier.end()
    assert bench.manager.drain_jobs(timeout_s=1)
    assert bench.manager.jobs_in_flight == 0


def test_shutdown_keeps_the_memory_that_a_tier_may_still_write_to(bench: Bench) -> None:
    bench.promote(1)
    (job,) = bench.tier.jobs
    bench.manager.shutdown(timeout_s=0)
    bench.manager.shutdown(timeout_s=0)
    bench.region.flat[int(job.block_ids[0]) * BLOCK_BYTES] = 1  # a released view would raise
    assert bench.lookup(keys(1), ReqContext("b")) == [False]
    bench.region.close()


def test_a_promotion_that_ends_while_the_tiers_are_closed_is_passed_on_to_none(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(settings=[TierSettings(type="tier", fill_on_promotion=True), TierSettings(type="tier")])
    bench.tiers[1].present = dict.fromkeys(keys(1), True)
    bench.lookup(keys(1), bench.request("a"))
    bench.step()
    bench.tiers[1].end()
    bench.manager.shutdown(timeout_s=0)
    assert bench.tiers[0].jobs == []
    assert bench.manager.jobs_in_flight == 0


@pytest.mark.parametrize("job_id", [12345, [1], "the job itself"])
def test_a_result_that_nobody_waits_for_is_counted_and_hides_none(bench: Bench, job_id: Any) -> None:
    bench.store(keys(1), bench.request("a"))
    bench.tier.results.append(JobResult(job_id, True))
    job = bench.tier.end()
    if job_id == "the job itself":
        bench.tier.results[0] = JobResult(job.job_id, True)
    bench.step()
    assert bench.counter("unknown_results_total") == 1
    assert bench.manager.jobs_in_flight == 0
    assert len(bench.primary.policy) == 1


@pytest.mark.parametrize("nonsense", [{"successful_keys": 5}, {"successful_keys": [[1]]}, {"success": np.zeros(2)}])
def test_nonsense_about_a_job_is_its_failure_and_hides_none(make_bench: Callable[..., Bench], nonsense: Any) -> None:
    bench = make_bench()
    bench.tier.present = dict.fromkeys(keys(1, 2), True)
    for number, key in enumerate(keys(1, 2)):
        bench.lookup([key], bench.request(f"r{number}"))
        bench.step()
    first = bench.tier.jobs.pop(0)
    bench.tier.results.append(JobResult(first.job_id, **{"success": False, **nonsense}))
    bench.end()
    assert bench.manager.jobs_in_flight == 0
    assert bench.counter("failed_blocks_total", "load", "nonsense") == 1
    assert bench.counter("loaded_blocks_total") == 1


def test_requests_that_are_never_finished_do_not_pile_up(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(limits=ManagerLimits(requests_max=10))
    for number in range(100):
        bench.lookup(keys(number), ReqContext(f"r{number}"))
        bench.lookup(keys(number), ReqContext())
    assert bench.counter("forgotten_requests_total", tier="cpu") >= 90


def test_events_of_all_tiers_come_together(bench: Bench) -> None:
    bench.store(keys(1), bench.request("a"))
    assert [(event.medium, event.removed) for event in bench.manager.take_events()] == [("CPU", False)]
