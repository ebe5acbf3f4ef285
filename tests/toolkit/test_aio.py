"""Tiers that use asyncio: the event loop, and coroutines that are cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from tests.support.shortages import Resource, outage
from tests.toolkit.conftest import PATIENCE_S, AsyncDictTier, MakeStage, Stage
from tiered_kv.base import OffloadKey
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.aio import uninterrupted


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    return make_stage(AsyncDictTier, blocks_in_flight_max=8)


def test_no_more_blocks_are_in_flight_than_allowed_and_stores_leave_room_for_a_load(stage: Stage) -> None:
    stage.rig.store(make_keys(1))
    stage.tier.parts.clear()
    stage.hold()
    store = stage.rig.submit_store(make_keys(40, "many"))
    wait_until(lambda: len(stage.tier.parts) == 3)
    load = stage.rig.submit_load(make_keys(1))
    wait_until(lambda: len(stage.tier.parts) == 4)
    assert stage.tier.started == ["store"] * 3 + ["load"]
    stage.gate.set()
    assert all(result.success for result in stage.rig.wait([store, load]))


def test_a_coroutine_that_hangs_is_cancelled_at_its_jobs_deadline(stage: Stage) -> None:
    stage.hold()
    (result,) = stage.rig.wait([stage.rig.submit_load(make_keys(3), deadline=time.monotonic() + 0.05)])
    assert (result.success, result.reason) == (False, "expired")
    assert not stage.gate.is_set()
    stage.tier.before = lambda *_: None
    assert stage.rig.store(make_keys(3)).success


def test_a_job_whose_coroutine_ignores_being_cancelled_is_reported_when_it_ends(stage: Stage) -> None:
    was_cancelled = threading.Event()

    async def defy(operation: str, keys: Sequence[OffloadKey]) -> None:
        while not stage.gate.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                was_cancelled.set()

    stage.rig.store(make_keys(1))
    stage.tier.before = defy
    job = stage.submit_load_that_begins(make_keys(1))
    assert was_cancelled.wait(PATIENCE_S)
    assert list(stage.tier.get_finished()) == []
    stage.gate.set()
    stage.rig.wait([job])


def test_work_on_a_thread_is_waited_for_though_its_coroutine_is_cancelled(stage: Stage) -> None:
    is_waiting, was_cancelled = threading.Event(), threading.Event()

    def wait_on_thread() -> None:
        is_waiting.set()
        stage.gate.wait(PATIENCE_S)
        raise ValueError("lost, because the coroutine is cancelled")

    async def work_on_thread(operation: str, keys: Sequence[OffloadKey]) -> None:
        work = asyncio.ensure_future(uninterrupted(asyncio.to_thread(wait_on_thread)))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            was_cancelled.set()
            work.cancel()
            await work

    stage.rig.store(make_keys(1))
    stage.tier.before = work_on_thread
    job = stage.submit_load_that_begins(make_keys(1), is_waiting)
    assert was_cancelled.wait(PATIENCE_S)
    assert list(stage.tier.get_finished()) == []
    stage.gate.set()
    assert stage.rig.wait([job])[0].reason == "expired"
    assert stage.rig.wait([stage.rig.submit_load(make_keys(1))])[0].reason == "error"


def test_a_client_that_cannot_connect_is_tried_again(stage: Stage) -> None:
    def refuse(operation: str, keys: Sequence[OffloadKey]) -> None:
        raise TierUnavailableError("refused")

    stage.tier.before = refuse
    assert stage.rig.store(make_keys(2)).reason == "unavailable"
    assert stage.rig.lookup(make_keys(2)[0]) is False
    stage.tier.before = lambda *_: None
    assert stage.rig.store(make_keys(2)).success
    assert stage.tier.started.count("open") == 3
    assert stage.rig.load(make_keys(2)) == set(make_keys(2))
    assert stage.tier.started.count("open") == 3


def test_shutdown_cancels_what_hangs_and_closes(make_stage: MakeStage) -> None:
    stage = make_stage(AsyncDictTier, shutdown_timeout_s=0.5)
    stage.rig.store(make_keys(1))
    stage.hold()
    stage.rig.submit_load(make_keys(1))
    wait_until(lambda: "load" in stage.tier.started)
    stage.tier.shutdown()
    assert stage.tier.closed.wait(PATIENCE_S), "it was not cancelled; or else its thread had no time, and comes late"
    (result,) = stage.tier.get_finished()
    assert (result.success, result.reason) == (False, "shutdown")
    assert not stage.gate.is_set()


@pytest.mark.parametrize("kind", [Resource.THREAD, Resource.DESCRIPTOR])
def test_an_event_loop_that_could_not_start_starts_in_a_later_step(stage: Stage, kind: Resource) -> None:
    keys = make_keys(2)
    with outage(kind) as shortage:
        job = stage.rig.submit_store(keys)
        wait_until(lambda: shortage.refused > 0)
    assert [result.success for result in stage.rig.wait([job])] == [True]
    assert stage.rig.load(keys) == set(keys)


def test_a_call_in_a_thread_that_was_refused_never_runs(stage: Stage) -> None:
    ran: list[str] = []

    async def call_in_thread(operation: str, keys: Sequence[OffloadKey]) -> None:
        if operation == "load":
            with outage(Resource.THREAD):
                await uninterrupted(asyncio.to_thread(ran.append, "refused"))
        await uninterrupted(asyncio.to_thread(ran.append, operation))

    assert stage.rig.store(make_keys(1)).success
    stage.tier.before = call_in_thread
    assert stage.rig.load(make_keys(1)) == set()
    assert stage.rig.store(make_keys(1)).success
    assert ran == ["store"], "the memory of the load belongs to others by then"
