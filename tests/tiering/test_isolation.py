"""A tier whose methods block, on a separate thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier
from tests.support.shortages import Resource, outage
from tests.tiering.conftest import keys
from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.control import ManualClock, wait_until
from tiered_kv.tiering import isolation
from tiered_kv.tiering.base import JobMetadata, JobResult
from tiered_kv.tiering.isolation import HINTS_MAX, IsolatedTier

WAIT_S = 30.0
OpenTier = Callable[..., IsolatedTier]


class HeldTier(FourMethodTier):
    """Methods wait until the test opens them, and raise the exceptions of the test once."""

    failures = 0

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "blocking")
        self.open = threading.Event()
        self.open.set()
        self.calls: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.raises: dict[str, type[BaseException]] = {}
        self.can_reset = False
        self.resets: list[threading.Event] = []
        """The next resets wait for these, one each."""
        self.events: list[OffloadingEvent] = []
        self.before_lookup: Callable[[OffloadKey], object] = lambda key: None
        self.on_load: Callable[[int], object] = lambda job_id: None

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._pass("lookup")
        self.before_lookup(key)
        return super().lookup(key, req_context)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._pass("submit_store")
        super().submit_store(job_metadata)
        self.events.append(OffloadingEvent(list(job_metadata.keys), 64, "", removed=False))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._pass("submit_load")
        self.on_load(job_metadata.job_id)
        super().submit_load(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._raise("get_finished")
        return super().get_finished()

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._raise("take_events")
        taken, self.events = self.events, []
        return taken

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._pass("touch")

    def on_schedule_end(self) -> None:
        self._raise("on_schedule_end")

    @property
    def lookup_failures(self) -> int:
        self._raise("lookup_failures")
        return self.failures

    def stats(self) -> dict[str, int]:
        self._raise("stats")
        return {"blocks": len(self.blocks)}

    def reset_cache(self) -> bool:
        self._pass("reset_cache")
        assert not self.resets or self.resets.pop(0).wait(WAIT_S)
        self.blocks.clear()
        return self.can_reset

    def shutdown(self) -> None:
        self._pass("shutdown")

    def _pass(self, call: str) -> None:
        self.calls.append(call)
        assert self.open.wait(WAIT_S)
        self._raise(call)

    def _raise(self, call: str) -> None:
        self.threads.add(threading.current_thread())
        if call in self.raises:
            raise self.raises.pop(call)


@pytest.fixture
def region() -> Iterator[PrimaryRegion]:
    region = PrimaryRegion(8, 64)
    yield region
    region.close()


@pytest.fixture
def inner(region: PrimaryRegion) -> HeldTier:
    return HeldTier(region.kv_view)


@pytest.fixture
def open_tier(inner: HeldTier) -> Iterator[OpenTier]:
    opened: list[IsolatedTier] = []

    def open_one(lookup_timeout_s: float = WAIT_S, *more: Any) -> IsolatedTier:  # Any: as the tier takes them
        opened.append(IsolatedTier(inner, lookup_timeout_s, *more))
        return opened[-1]

    yield open_one
    inner.open.set()
    for tier in opened:
        tier.shutdown()
    inner._region.release()


@pytest.fixture
def tier(open_tier: OpenTier) -> IsolatedTier:
    return open_tier()


def job(job_id: int, wanted: list[OffloadKey], *, is_promotion: bool = False) -> JobMetadata:
    return JobMetadata(job_id, wanted, np.arange(len(wanted), dtype=np.int64), is_promotion, ReqContext("a"))


def hang_in_store(tier: IsolatedTier, inner: HeldTier) -> None:
    """Submit job 1, and wait until its call hangs."""
    inner.open.clear()
    tier.submit_store(job(1, keys(1)))
    wait_until(lambda: "submit_store" in inner.calls)


def answer(tier: IsolatedTier, key: OffloadKey, context: ReqContext) -> bool | None:
    wait_until(lambda: tier.lookup(key, context) is not None)
    return tier.lookup(key, context)


def finished(tier: IsolatedTier, count: int) -> list[JobResult]:
    results: list[JobResult] = []

    def enough() -> bool:
        results.extend(tier.get_finished())
        return len(results) >= count

    wait_until(enough)
    return results


def test_no_call_waits_for_a_tier_that_hangs_and_memory_stays_bounded(tier: IsolatedTier, inner: HeldTier) -> None:
    hang_in_store(tier, inner)
    end_s = time.monotonic() + WAIT_S / 3  # less than one call that waits for the tier
    for number in range(HINTS_MAX):
        context = ReqContext(f"r{number}")
        tier.lookup(keys(number)[0], context)
        tier.touch(keys(number), context)
        tier.on_request_finished(context)
        tier.on_schedule_end()
        assert list(tier.get_finished()) == []
        assert time.monotonic() < end_s, f"{number} rounds take {WAIT_S / 3} s"
    inner.open.set()
    assert finished(tier, 1) == [JobResult(1, True)]
    tier.shutdown()
    assert inner.calls.count("touch") < HINTS_MAX, "the oldest went first"


def test_a_lookup_that_hangs_is_a_miss_and_a_failure_in_time(
    open_tier: OpenTier, inner: HeldTier, clock: ManualClock
) -> None:
    tier, (key,) = open_tier(1.0, clock), keys(1)
    inner.blocks[key] = bytes(64)
    inner.open.clear()
    assert tier.lookup(key, ReqContext("a")) is None
    clock.advance(1.0)
    assert tier.lookup(key, ReqContext("a")) is False
    assert tier.lookup_failures == 1
    inner.open.set()
    assert answer(tier, key, ReqContext("b")) is True


def test_an_answer_does_not_wait_for_a_later_lookup_that_hangs(
    open_tier: OpenTier, inner: HeldTier, clock: ManualClock
) -> None:
    tier, (first, second) = open_tier(1.0, clock), keys(1, 2)
    may_end = threading.Event()
    inner.blocks[first] = bytes(64)
    has_ended: list[bool] = []
    inner.before_lookup = lambda key: key == second and has_ended.append(may_end.wait(WAIT_S / 3))  # type: ignore[func-returns-value]  # append returns None
    hang_in_store(tier, inner)
    assert tier.lookup_many([first, second], ReqContext("a")) == [None, None]
    inner.open.set()
    try:
        assert answer(tier, first, ReqContext("a")) is True
        assert not has_ended
    finally:
        may_end.set()


def test_jobs_are_reported_while_one_lookup_follows_the_other(
    open_tier: OpenTier, inner: HeldTier, clock: ManualClock
) -> None:
    tier = open_tier(1.0, clock)
    has_begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    inner.before_lookup = lambda key: has_begun.release() or may_end.acquire(timeout=WAIT_S)  # type: ignore[func-returns-value]  # release returns None
    tier.lookup(keys(0)[0], ReqContext("a"))
    tier.submit_load(job(1, keys(99), is_promotion=True))
    reported: list[JobResult] = []
    try:
        for number in range(1, 20):
            assert has_begun.acquire(timeout=WAIT_S)
            tier.lookup(keys(number)[0], ReqContext("a"))
            may_end.release()
            reported += tier.get_finished()
        assert reported
    finally:
        may_end.release(100)


def test_a_load_and_its_result_do_not_wait_for_the_lookups_of_a_long_prompt(
    open_tier: OpenTier, inner: HeldTier, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "SLICE_S", 0.0)  # a lookup takes longer
    tier = open_tier(1.0, clock)
    has_begun, may_end = threading.Semaphore(0), threading.Semaphore(0)
    inner.before_lookup = lambda key: has_begun.release() or may_end.acquire(timeout=WAIT_S)  # type: ignore[func-returns-value]  # release returns None
    tier.lookup_many(keys(*range(100)), ReqContext("long"))
    try:
        assert has_begun.acquire(timeout=WAIT_S)
        tier.submit_load(job(1, keys(99), is_promotion=True))
        tier.submit_store(job(2, keys(98)))
        for _ in range(3):
            may_end.release()
            assert has_begun.acquire(timeout=WAIT_S)
        assert {result.job_id for result in tier.get_finished()} == {1, 2}
    finally:
        may_end.release(100)


def test_a_result_does_not_wait_for_the_next_load(tier: IsolatedTier, inner: HeldTier) -> None:
    first, second = threading.Event(), threading.Event()
    inner.on_load = lambda job_id: {1: first, 2: second}[job_id].wait(WAIT_S)
    for job_id in (1, 2):
        tier.submit_load(job(job_id, keys(1), is_promotion=True))
    first.set()
    try:
        assert [result.job_id for result in finished(tier, 1)] == [1]
    finally:
        second.set()


def test_lookups_do_not_wait_for_thousands_of_slow_hints(
    tier: IsolatedTier, inner: HeldTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "SLICE_S", 0.0)  # a hint takes longer
    hang_in_store(tier, inner)
    for number in range(1000):
        tier.touch(keys(number), ReqContext("a"))
    tier.lookup(keys(1)[0], ReqContext("a"))
    tier.lookup(keys(2)[0], ReqContext("b"))
    inner.open.set()
    answer(tier, keys(2)[0], ReqContext("b"))
    assert inner.calls[: inner.calls.index("lookup")].count("touch") <= 1
    assert inner.calls[inner.calls.index("lookup") :].count("touch") >= 1


def test_a_lookup_whose_deadline_has_passed_is_not_made(
    open_tier: OpenTier, inner: HeldTier, clock: ManualClock
) -> None:
    tier, wanted = open_tier(1.0, clock), keys(*range(10))
    has_begun, may_end = threading.Event(), threading.Event()
    inner.before_lookup = lambda key: has_begun.set() or may_end.wait(WAIT_S)  # type: ignore[func-returns-value]  # set returns None
    assert tier.lookup_many(wanted, ReqContext("a")) == [None] * 10
    try:
        assert has_begun.wait(WAIT_S)
        clock.advance(1.0)
        assert tier.lookup_many(wanted, ReqContext("a")) == [False] * 10
    finally:
        may_end.set()
    assert answer(tier, keys(99)[0], ReqContext("b")) is False
    assert inner.calls.count("lookup") == 2


@pytest.mark.parametrize(
    "method",
    ["submit_store", "get_finished", "take_events", "touch", "lookup", "on_schedule_end", "reset_cache", "stats"],
)
def test_an_exception_of_any_method_does_not_stop_later_calls(tier: IsolatedTier, inner: HeldTier, method: str) -> None:
    inner.can_reset = True
    inner.raises[method] = RuntimeError
    context = ReqContext("a")
    tier.touch(keys(1), context)
    answer(tier, keys(1)[0], context)
    inner.open.clear()
    tier.submit_store(job(1, keys(1)))
    tier.on_schedule_end()  # passed on while there is something to do
    inner.open.set()
    assert finished(tier, 1) == [
        JobResult(1, method != "submit_store", reason="exception" * (method == "submit_store"))
    ]
    if method == "reset_cache":
        tier.reset_cache()
    wait_until(lambda: not inner.raises)
    assert tier.lookup_failures == (method == "lookup")
    tier.submit_store(job(2, keys(2)))
    assert finished(tier, 1) == [JobResult(2, method != "reset_cache", reason="disabled" * (method == "reset_cache"))]


def test_valid_results_count_beside_invalid_ones_and_exceptions(region: PrimaryRegion) -> None:
    class Breaking(HeldTier):
        def get_finished(self) -> Iterator[Any]:  # a tier that breaks the contract
            yield from [None, JobResult([1], True), 7]  # type: ignore[arg-type]
            for result in super().get_finished():
                yield result
                raise RuntimeError

    inner = Breaking(region.kv_view)
    tier = IsolatedTier(inner)
    tier.submit_store(job(1, keys(1)))
    assert JobResult(1, True) in finished(tier, 4)  # the others are for the breaker
    tier.shutdown()
    inner._region.release()


def test_no_method_is_called_on_the_scheduler_s_thread(tier: IsolatedTier, inner: HeldTier) -> None:
    inner.failures = 7
    answer(tier, keys(1)[0], ReqContext("a"))
    wait_until(lambda: tier.lookup_failures == 7)
    tier.submit_store(job(1, keys(1)))
    assert finished(tier, 1) == [JobResult(1, True)]
    wait_until(lambda: tier.stats() == {"blocks": 1})
    tier.shutdown()
    assert len(inner.threads) == 1
    assert threading.current_thread() not in inner.threads


def test_a_job_that_expired_while_it_waited_is_not_begun(tier: IsolatedTier, inner: HeldTier) -> None:
    late = job(1, keys(1))
    late.deadline = time.monotonic() - 1
    tier.submit_store(late)
    assert finished(tier, 1) == [JobResult(1, False, reason="expired")]
    assert "submit_store" not in inner.calls


def test_loads_go_before_stores(tier: IsolatedTier, inner: HeldTier) -> None:
    hang_in_store(tier, inner)
    tier.submit_store(job(2, keys(2)))
    tier.submit_load(job(3, keys(1), is_promotion=True))
    inner.open.set()
    assert [result.job_id for result in finished(tier, 3)] == [1, 3, 2]


def test_a_store_is_begun_beside_loads_that_never_end_and_after_the_loads_before_it(
    tier: IsolatedTier, inner: HeldTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "PATIENCE_S", 0.0)
    hang_in_store(tier, inner)
    for number in range(10):
        tier.submit_load(job(10 + number, keys(1), is_promotion=True))
    tier.submit_store(job(2, keys(2)))

    def load_again(job_id: int) -> None:
        if inner.calls.count("submit_store") < 2:
            tier.submit_load(job(job_id + 100, keys(1), is_promotion=True))

    inner.on_load = load_again
    inner.open.set()
    wait_until(lambda: inner.calls.count("submit_store") == 2)
    loads = inner.calls[: len(inner.calls) - inner.calls[::-1].index("submit_store")].count("submit_load")
    assert 10 <= loads <= 10 + 2 * isolation.LOADS_A_STORE
    inner.on_load = lambda job_id: None


def test_a_tier_that_cannot_forget_is_silent_after_a_reset(tier: IsolatedTier, inner: HeldTier) -> None:
    tier.submit_store(job(1, keys(1)))
    finished(tier, 1)
    assert tier.reset_cache()
    assert tier.lookup(keys(1)[0], ReqContext("b")) is False
    tier.submit_store(job(2, keys(2)))
    assert [result.success for result in finished(tier, 1)] == [False]
    assert tier.lookup(keys(2)[0], ReqContext("c")) is False


def test_stores_that_wait_when_the_cache_is_reset_never_reach_the_tier(tier: IsolatedTier, inner: HeldTier) -> None:
    inner.can_reset = True
    hang_in_store(tier, inner)
    tier.submit_store(job(2, keys(2)))
    tier.reset_cache()
    inner.open.set()
    assert {result.job_id: result.success for result in finished(tier, 2)} == {1: True, 2: False}
    assert answer(tier, keys(2)[0], ReqContext("b")) is False
    assert inner.calls.count("submit_store") == 1


def test_events_from_before_a_reset_are_dropped(tier: IsolatedTier, inner: HeldTier) -> None:
    """Also those that come between the call and the tier's own reset."""
    inner.can_reset, inner.resets = True, [threading.Event()]
    (reset,) = inner.resets
    hang_in_store(tier, inner)
    tier.submit_load(job(2, keys(9), is_promotion=True))  # goes before the reset, so that the store has ended by then
    tier.reset_cache()
    tier.submit_store(job(3, keys(3)))
    inner.open.set()
    wait_until(lambda: "reset_cache" in inner.calls)
    assert {result.job_id for result in finished(tier, 1)} <= {1, 2}
    assert list(tier.take_events()) == []
    reset.set()
    told: list[OffloadingEvent] = []

    def has_told() -> bool:
        told.extend(tier.take_events())
        return bool(told)

    wait_until(has_told)
    assert [key for event in told for key in event.keys] == keys(3)


def test_until_the_last_of_several_resets_nothing_is_found(tier: IsolatedTier, inner: HeldTier) -> None:
    inner.can_reset, inner.resets = True, [threading.Event(), threading.Event()]
    first, second = inner.resets
    tier.reset_cache()
    tier.reset_cache()
    first.set()
    wait_until(lambda: inner.calls.count("reset_cache") == 2)
    inner.blocks[keys(1)[0]] = bytes(64)
    assert tier.lookup(keys(1)[0], ReqContext("a")) is False
    second.set()
    assert answer(tier, keys(1)[0], ReqContext("b")) is False


def test_shutdown_does_not_wait_for_a_tier_that_hangs(
    tier: IsolatedTier, inner: HeldTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "CLOSE_TIMEOUT_S", 0.05)
    hang_in_store(tier, inner)
    start = time.perf_counter()
    tier.shutdown()
    assert time.perf_counter() - start < 10
    inner.open.set()
    wait_until(lambda: "shutdown" in inner.calls)


def test_a_tier_whose_thread_could_not_start_is_used_from_a_later_step_on(open_tier: OpenTier, inner: HeldTier) -> None:
    with outage(Resource.THREAD):
        tier = open_tier()
        tier.submit_store(job(1, keys(1)))
        assert list(tier.get_finished()) == []
    assert [result.success for result in finished(tier, 1)] == [True]
    assert answer(tier, keys(1)[0], ReqContext("b")) is True


def test_a_tier_that_got_no_thread_at_all_is_closed(open_tier: OpenTier, inner: HeldTier) -> None:
    with outage(Resource.THREAD):
        tier = open_tier()
        tier.submit_store(job(1, keys(1)))
        tier.shutdown()
    assert inner.calls == ["submit_store", "shutdown"]
    assert [result.job_id for result in tier.get_finished()] == [1]
