"""Tiers made of coroutines: authors who behave, and those who hang, raise, defy being cancelled or answer late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.base import JobId
from tiered_kv.toolkit import Outcome
from tiered_kv.toolkit.aio import AsyncTier, uninterrupted

BLOCK_BYTES = 256
PATIENCE_S = 60.0
"""How long what must happen may take. It is there to end a test that fails, and so generous."""


class AsyncDictTier(AsyncTier):
    """Keeps blocks in a dictionary; `before` is awaited at the start of every author's method."""

    before: Callable[[str, Sequence[OffloadKey]], Awaitable[object]] | None = None
    returned: object = None
    """What `load_blocks` and `contains_blocks` return instead of the truth."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.kept: dict[OffloadKey, bytes] = {}
        self.started: list[str] = []
        self.closed = threading.Event()

    async def _enter(self, operation: str, keys: Sequence[OffloadKey]) -> None:
        self.started.append(operation)
        await asyncio.sleep(0)
        if self.before is not None:
            await self.before(operation, keys)

    async def open(self) -> None:
        await self._enter("open", ())

    async def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        await self._enter("store", keys)
        kept = self.kept  # a reset on the scheduler's thread puts another into its place
        if self.part_epoch == self.epoch:
            for key, block in zip(keys, blocks, strict=True):
                kept.setdefault(key, bytes(block))
        return Outcome()

    async def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        await self._enter("load", keys)
        if self.returned is not None:
            return self.returned  # type: ignore[return-value]  # the point of some tests
        for key, block in zip(keys, blocks, strict=True):
            if key in self.kept:
                block[:] = self.kept[key]
        return Outcome([key for key in keys if key in self.kept], "absent")

    async def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await self._enter("lookup", keys)
        if self.returned is not None:
            return self.returned  # type: ignore[return-value]  # the point of some tests
        return [key in self.kept for key in keys]

    async def close(self) -> None:
        self.closed.set()

    def reset_cache(self) -> bool:
        self.begin_epoch()
        self.kept = {}
        return True


class TestAsyncTier(TierConformance):
    wait_s = 2 * PATIENCE_S

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda spec, view: AsyncDictTier(spec, view, "async-dict", lookup_timeout_s=PATIENCE_S)


class Stage:
    """One tier on a rig."""

    def __init__(self, *, part_blocks: int = 2, shutdown_timeout_s: float = PATIENCE_S) -> None:
        def open_tier(spec: object, view: memoryview) -> AsyncDictTier:
            return AsyncDictTier(
                spec,
                view,
                "async-dict",
                blocks_in_flight_max=8,
                part_bytes=part_blocks * BLOCK_BYTES,
                lookup_timeout_s=PATIENCE_S,
                shutdown_timeout_s=shutdown_timeout_s,
            )

        self.rig = TierRig(open_tier, num_blocks=128, block_bytes=BLOCK_BYTES, wait_s=PATIENCE_S)
        assert isinstance(self.rig.tier, AsyncDictTier)
        self.tier = self.rig.tier
        self.gate = threading.Event()

    async def wait_for_gate(self, operation: str, keys: Sequence[OffloadKey]) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.001)

    def submit_load_that_begins(self, has_begun: threading.Event) -> JobId:
        """Submit a load with a deadline that passes soon, yet after its coroutine has begun.

        On a machine that is too slow for one the next has longer.
        """
        for deadline_s in (0.05, 0.5, 5.0, PATIENCE_S):
            job = self.rig.submit_load(make_keys(1), deadline=time.monotonic() + deadline_s)
            while not has_begun.is_set():
                self.rig.poll()
                if job in self.rig._results:
                    break
                time.sleep(0.001)
            else:
                return job
        raise AssertionError("no coroutine begins")

    def close(self) -> None:
        self.gate.set()
        self.rig.close()
        if self.tier._loop_thread is not None:
            self.tier._loop_thread.join(PATIENCE_S)


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    stages: list[Stage] = []

    def make(**options: float) -> Stage:
        stages.append(Stage(**options))  # type: ignore[arg-type]  # counts and seconds
        return stages[-1]

    yield make
    for stage in stages:
        stage.close()


def test_no_more_blocks_are_in_flight_than_allowed_and_stores_leave_room_for_a_load(make_stage: MakeStage) -> None:
    stage = make_stage()
    tier, rig = stage.tier, stage.rig
    rig.store(make_keys(1))
    tier.started.clear()
    tier.before = stage.wait_for_gate
    store = rig.submit_store(make_keys(40, "many"))
    wait_until(lambda: len(tier.started) == 3)
    load = rig.submit_load(make_keys(1))
    wait_until(lambda: len(tier.started) == 4)
    assert tier.started == ["store"] * 3 + ["load"]
    stage.gate.set()
    assert all(result.success for result in rig.wait([store, load]))


def test_a_lookup_has_its_own_deadline_and_not_that_of_the_job_before_it(make_stage: MakeStage) -> None:
    stage = make_stage()
    left_s: dict[str, float] = {}

    async def note(operation: str, keys: Sequence[OffloadKey]) -> None:
        left_s[operation] = stage.tier.part_deadline - time.monotonic()

    stage.tier.before = note
    stage.rig.wait([stage.rig.submit_store(make_keys(1), deadline=time.monotonic() + 1000.0)])
    assert stage.rig.lookup(make_keys(1)[0])
    assert left_s["store"] > PATIENCE_S
    assert 0.0 < left_s["lookup"] <= PATIENCE_S


def test_a_coroutine_that_hangs_is_cancelled_at_its_jobs_deadline(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.tier.before = stage.wait_for_gate
    (result,) = stage.rig.wait([stage.rig.submit_load(make_keys(3), deadline=time.monotonic() + 0.05)])
    assert (result.success, result.reason) == (False, "expired")
    assert not stage.gate.is_set()
    stage.tier.before = None
    assert stage.rig.store(make_keys(3)).success


def test_a_job_whose_coroutine_ignores_being_cancelled_is_reported_when_it_ends(make_stage: MakeStage) -> None:
    stage = make_stage()
    has_begun, was_cancelled = threading.Event(), threading.Event()

    async def defy(operation: str, keys: Sequence[OffloadKey]) -> None:
        has_begun.set()
        while not stage.gate.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                was_cancelled.set()

    stage.rig.store(make_keys(1))
    stage.tier.before = defy
    job = stage.submit_load_that_begins(has_begun)
    assert was_cancelled.wait(PATIENCE_S)
    assert list(stage.tier.get_finished()) == []
    stage.gate.set()
    stage.rig.wait([job])


def test_work_on_a_thread_is_waited_for_though_its_coroutine_is_cancelled(make_stage: MakeStage) -> None:
    stage = make_stage()
    is_waiting = threading.Event()

    def wait_on_thread() -> None:
        is_waiting.set()
        stage.gate.wait(PATIENCE_S)
        raise ValueError("nobody hears of it")

    async def work_on_thread(operation: str, keys: Sequence[OffloadKey]) -> None:
        await uninterrupted(asyncio.to_thread(wait_on_thread))

    stage.rig.store(make_keys(1))
    stage.tier.before = work_on_thread
    job = stage.submit_load_that_begins(is_waiting)
    wait_until(lambda: any(task.cancelling() for task in tuple(stage.tier._part_tasks)))
    assert list(stage.tier.get_finished()) == []
    stage.gate.set()
    assert stage.rig.wait([job])[0].reason == "expired"
    assert stage.rig.wait([stage.rig.submit_load(make_keys(1))])[0].reason == "error"


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError(), "error"), (TimeoutError(), "timeout"), (SystemExit(), "error")]
)
def test_an_exception_fails_the_part_and_the_tier_works_on(
    make_stage: MakeStage, error: BaseException, reason: str
) -> None:
    stage = make_stage()
    keys = make_keys(6)

    async def fail_second_part(operation: str, part: Sequence[OffloadKey]) -> None:
        if operation == "store" and keys[2] in part:
            raise error

    stage.tier.before = fail_second_part
    (result,) = stage.rig.wait([stage.rig.submit_store(keys)])
    assert (result.success, result.reason) == (False, reason)
    assert stage.rig.succeeded(result) == {*keys[:2], *keys[4:]}
    stage.tier.before = None
    assert stage.rig.store(keys).success


def test_a_client_that_cannot_connect_is_tried_again(make_stage: MakeStage) -> None:
    stage = make_stage()

    async def refuse(operation: str, keys: Sequence[OffloadKey]) -> None:
        raise TierUnavailableError("refused")

    stage.tier.before = refuse
    assert stage.rig.store(make_keys(2)).reason == "unavailable"
    assert stage.rig.lookup(make_keys(2)[0]) is False
    stage.tier.before = None
    assert stage.rig.store(make_keys(2)).success
    assert stage.tier.started.count("open") == 3
    assert stage.rig.load(make_keys(2)) == set(make_keys(2))
    assert stage.tier.started.count("open") == 3


@pytest.mark.parametrize("returned", [True, Outcome(make_keys(1, "other")), Outcome(42), [True, True]])  # type: ignore[arg-type]
def test_wrong_outcomes_are_failures_and_wrong_answers_misses(make_stage: MakeStage, returned: object) -> None:
    stage = make_stage()
    stage.tier.returned = returned
    assert stage.rig.load(make_keys(1)) == set()
    assert stage.rig.lookup(make_keys(1)[0]) is False


def test_a_lookup_is_told_who_asks_for_each_key(make_stage: MakeStage) -> None:
    stage = make_stage()
    told: list[str] = []

    async def note(operation: str, keys: Sequence[OffloadKey]) -> None:
        if operation == "lookup":
            told.extend(stage.tier.probe_req_ids)

    stage.tier.before = note
    assert stage.rig.lookup(make_keys(1)[0], ReqContext("somebody")) is False
    assert told == ["somebody"]


def test_shutdown_cancels_what_hangs_and_closes(make_stage: MakeStage) -> None:
    stage = make_stage(shutdown_timeout_s=0.5)
    stage.rig.store(make_keys(1))
    stage.tier.before = stage.wait_for_gate
    stage.rig.submit_load(make_keys(1))
    wait_until(lambda: "load" in stage.tier.started)
    stage.tier.shutdown()
    assert stage.tier.closed.wait(PATIENCE_S), "it was not cancelled; or else its thread had no time, and comes late"
    (result,) = stage.tier.get_finished()
    assert (result.success, result.reason) == (False, "shutdown")
    assert not stage.gate.is_set()


def test_shutdown_leaves_behind_what_will_not_be_cancelled(make_stage: MakeStage) -> None:
    stage = make_stage(shutdown_timeout_s=0.1)
    stage.rig.store(make_keys(1))
    is_blocked = threading.Event()

    async def block(operation: str, keys: Sequence[OffloadKey]) -> None:
        is_blocked.set()
        stage.gate.wait(PATIENCE_S)

    stage.tier.before = block
    stage.rig.submit_load(make_keys(1))
    assert is_blocked.wait(PATIENCE_S)
    before = time.monotonic()
    stage.tier.shutdown()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert not stage.tier.closed.is_set()
    stage.gate.set()
    assert stage.tier.closed.wait(PATIENCE_S)


def test_a_tier_that_was_never_used_is_closed_and_one_that_may_do_nothing_refused(make_stage: MakeStage) -> None:
    stage = make_stage()
    stage.tier.shutdown()
    with pytest.raises(ValueError, match="at least 1"):
        AsyncDictTier(None, stage.rig.tier._primary_kv_view, "async-dict", blocks_in_flight_max=0)
