"""Tiers whose methods return values of a wrong type, or raise: they cost hits and their breaker, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.support.faulty import Gate
from tests.tiering.conftest import MakeBench, ManualTier
from tests.tiering.test_wedged_tiers import Engine
from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from tiered_kv.stack.exporters.metrics import series_of
from tiered_kv.testing.control import ManualClock, wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier

Make = Callable[[SecondaryTierManager], Any]
"""Returns a method's value, or raises. Its argument is the tier below, which works."""


@dataclass
class Unfit:
    """Has no truth value, no equality, no hash and no text."""

    def __bool__(self) -> bool:
        raise RuntimeError

    __eq__ = __hash__ = __str__ = __bool__  # type: ignore[assignment]


class Later:
    """As a coroutine, of a method that is `async` by mistake."""

    def __await__(self) -> Iterator[None]:
        yield


def raising(error: type[BaseException]) -> Make:
    def make(inner: SecondaryTierManager) -> Any:
        raise error

    return make


def breaking_off(inner: SecondaryTierManager) -> Iterator[Any]:
    yield from inner.get_finished()
    raise RuntimeError


def results(**wrong: Any) -> Make:
    return lambda inner: [replace(result, **wrong) for result in inner.get_finished()]


ANY: dict[str, Make] = {
    "None": lambda inner: None,
    "text": lambda inner: "no",
    "number": lambda inner: -7,
    "array": lambda inner: np.zeros(3),
    "list": lambda inner: [None, "no", Unfit(), 7],
    "mapping": lambda inner: {"a": False, 7: {Unfit: None}},
    "unfit": lambda inner: Unfit(),
    "awaitable": lambda inner: Later(),
    "Exception": raising(RuntimeError),
    "CancelledError": raising(asyncio.CancelledError),
    "GeneratorExit": raising(GeneratorExit),
}
METHODS = (
    "lookup", "lookup_many", "submit_store", "submit_load", "get_finished", "touch", "on_new_request",
    "on_request_finished", "on_schedule_end", "reset_cache", "take_events", "stats",
)  # fmt: skip
PROPERTIES = ("lookup_failures", "reports_stored")
SPECIAL: dict[str, dict[str, Make]] = {
    "lookup": {"numpy's": lambda inner: np.bool_(True), "a true text": lambda inner: "False"},
    "lookup_many": {
        "too few": lambda inner: [True],
        "texts": lambda inner: ["no"] * 4,
        "unfit ones": lambda inner: [Unfit()] * 4,
        "a generator": lambda inner: (False for _ in range(4)),
    },
    "get_finished": {
        "breaks off": breaking_off,
        "success is a text": results(success="no"),
        "success is a number": results(success=-1),
        "success is unfit": results(success=Unfit()),
        "keys with their success": results(success=False, successful_keys=dict.fromkeys(make_keys(4, "old"), False)),
        "keys are a text": results(success=False, successful_keys="keys"),
        "keys are texts": results(success=False, successful_keys=["keys"]),
        "keys are unfit": results(success=False, successful_keys=[Unfit()]),
        "reason is unfit": results(reason=Unfit()),
        "time is a text": results(ended_s="now"),
        "another id": results(job_id="1"),
        "an unfit id": results(job_id=Unfit()),
        "no id": lambda inner: [JobResult(None, True)],  # type: ignore[arg-type]
    },
    "take_events": {
        "keys are texts": lambda inner: [OffloadingEvent(["key"], 1, "tier", True)],  # type: ignore[list-item]
        "keys are missing": lambda inner: [OffloadingEvent(None, 1, "tier", True)],  # type: ignore[arg-type]
        "removed is unfit": lambda inner: [OffloadingEvent(make_keys(1), 1, "tier", Unfit())],  # type: ignore[arg-type]
    },
    "on_new_request": {"policy is a text": lambda inner: RequestOffloadingContext("all")},  # type: ignore[arg-type]
    "stats": {"huge": lambda inner: {"used_bytes": 10**5000, **{f"n{n}": n for n in range(10_000)}}},
}
CASES = [
    pytest.param(method, make, id=f"{method}: {name}")
    for method in METHODS + PROPERTIES
    for name, make in {**ANY, **SPECIAL.get(method, {})}.items()
]
IN_THREAD = [
    pytest.param(method, raising(error), id=f"{method}: {error.__name__}")
    for method in (*METHODS, "lookup_failures")
    for error in (SystemExit, KeyboardInterrupt)
]


class StrangeTier(WrapperTier):
    """While it is `strange`, one method returns or raises what the test says."""

    strange = False
    nonblocking = False
    method = ""
    make: Make = staticmethod(lambda inner: None)

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name == "is_nonblocking":
            return get("nonblocking")
        if not get("strange") or name != get("method"):
            return get(name)
        if name in PROPERTIES:
            return get("make")(get("inner"))
        return lambda *arguments: get("make")(get("inner"))


@pytest.fixture
def open_strange(gate: Gate, clock: ManualClock, closing: ExitStack) -> Callable[..., tuple[Engine, StrangeTier]]:
    def open_one(method: str, make: Make, *, nonblocking: bool, strange: bool = False) -> tuple[Engine, StrangeTier]:
        tiers: list[StrangeTier] = []

        def wrap(inner: SecondaryTierManager) -> SecondaryTierManager:
            tier = StrangeTier(inner)
            tier.nonblocking, tier.method, tier.make, tier.strange = nonblocking, method, make, strange
            tiers.append(tier)
            return tier

        engine = Engine(wrap, gate, clock)
        closing.callback(engine.manager.shutdown, timeout_s=0.0)
        return engine, tiers[0]

    return open_one


def use(engine: Engine, *batches: list[Any]) -> None:
    """Do all that an engine does, with old blocks and new ones; the engine compares what it loads."""
    manager = engine.manager
    for number, keys in enumerate(batches):
        engine.store(make_keys(4, f"new-{number}"))
        engine.load(keys)
        context = engine.requests[engine.start(keys)][0]
        manager.touch(keys, context)
        for key in keys:
            manager.lookup(key, context)
        manager.on_schedule_end()
        engine.finish(context.req_id)
        engine.stack.clock.advance(1.0)
        assert all(isinstance(event, OffloadingEvent) for event in manager.take_events())
        assert list(series_of(manager.counters(), set()))


def check(engine: Engine, tier: StrangeTier, method: str) -> None:
    old = make_keys(4, "old")
    engine.store(old)
    engine.evict_all()
    engine.manager.take_events()
    tier.strange = True
    engine.faults_on.add("strange")
    use(engine, old, old, make_keys(4, "new-0"), make_keys(4, "absent"))
    if method == "reset_cache":
        engine.reset()
        use(engine, old, old)
        return
    tier.strange = False
    if method not in ("submit_store", "submit_load", "get_finished"):  # after those a tier may keep rows for ever
        engine.faults_on.clear()
        engine.settle()
        engine.evict_all()
        wait_until(lambda: engine.is_used_again(old))


@pytest.mark.one_quick(8)
@pytest.mark.parametrize(("method", "make"), CASES)
def test_a_value_of_a_wrong_type_costs_a_tier_on_its_own_thread_nothing_but_hits(
    open_strange: Callable[..., tuple[Engine, StrangeTier]], method: str, make: Make
) -> None:
    check(*open_strange(method, make, nonblocking=False), method)


@pytest.mark.one_quick(4)
@pytest.mark.parametrize(("method", "make"), IN_THREAD)
def test_no_exception_ends_the_tier_s_thread(
    open_strange: Callable[..., tuple[Engine, StrangeTier]], method: str, make: Make
) -> None:
    check(*open_strange(method, make, nonblocking=False), method)


@pytest.mark.one_quick(8)
@pytest.mark.parametrize(("method", "make"), CASES)
def test_a_value_of_a_wrong_type_costs_a_tier_on_the_scheduler_s_thread_nothing_but_hits(
    open_strange: Callable[..., tuple[Engine, StrangeTier]], method: str, make: Make
) -> None:
    check(*open_strange(method, make, nonblocking=True), method)


@pytest.mark.parametrize("method", PROPERTIES)
@pytest.mark.parametrize("name", ANY)
def test_a_property_of_a_wrong_type_does_not_keep_a_tier_from_opening(
    open_strange: Callable[..., tuple[Engine, StrangeTier]], method: str, name: str
) -> None:
    engine, _ = open_strange(method, ANY[name], nonblocking=True, strange=True)
    use(engine, make_keys(4, "absent"))


def test_a_tier_that_changes_the_lists_that_it_is_given_changes_no_answer(make_bench: MakeBench) -> None:
    class Consuming(ManualTier):
        def lookup_many(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
            assert isinstance(keys, list)
            return [self.lookup(keys.pop(0), req_context) for _ in range(len(keys))]

        def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
            assert isinstance(keys, list)
            keys.clear()

    bench = make_bench()
    bench.tier.__class__ = Consuming
    context, wanted = bench.request("a"), make_keys(3)
    assert bench.manager.lookup_many(wanted, context) == [False] * 3
    bench.tier.present = {wanted[1]: True}
    assert bench.manager.lookup_many(wanted, context) == [False, None, False]
    bench.manager.touch(wanted, context)
    assert len(wanted) == 3
