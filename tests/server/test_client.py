"""Several engines use one cache of their host."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.event_subscriber import Subscriber
from tests.support.host_server import keys_of, serving, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.errors import ConfigError, ResourceError
from tiered_kv.server import protocol
from tiered_kv.server.served_stack import ServedStack
from tiered_kv.server.session import Session
from tiered_kv.server.session_request import SessionRequest
from tiered_kv.stack.exporters.metrics import series_of
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.interface import CalledManager
from tiered_kv.tiering.many_lookups import ManyLookups

KEYS = keys_of(40)


def test_an_engine_finds_what_another_has_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        first, second = served.engine(), served.engine()
        assert first.store(KEYS) == KEYS
        assert second.load(KEYS) == len(KEYS)
        assert second.load(keys_of(60)) == len(KEYS)


def test_a_block_may_be_looked_up_twice_in_a_step(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.engine().store(KEYS)
        engine = served.engine()
        twice, context = [KEYS[0], KEYS[0]], engine.begin()
        assert engine.manager.lookup_many(twice, context) == [None, None]
        assert engine.look_up(twice, context) == 2


def test_a_block_is_written_once(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        first, second = served.engine(), served.engine()
        first.store(KEYS)
        assert first.store(keys_of(50)) == keys_of(10, first=40)
        assert second.store(KEYS) == KEYS  # it does not know of them
        served_rows = served.count(lambda host: len(host.manager.primary.blocks))
        assert served_rows == 50
        second.load(keys_of(50))
        assert second.store(keys_of(50)) == []


def test_an_engine_that_knows_a_block_stores_it_again_once_it_is_evicted(tmp_path: Path) -> None:
    with serving(tmp_path, stack_of(rows=64)) as served:
        engine, other = served.engine(), served.engine()
        engine.store(KEYS[:8])
        assert engine.store(KEYS[:8]) == []
        other.store(keys_of(8, first=1000))
        for first in range(2000, 2100, 8):
            other.store(keys_of(8, first=first))
        assert other.load(KEYS[:8]) == 0
        assert engine.store(KEYS[:8]) == KEYS[:8]


def test_a_block_comes_from_a_tier_below(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with serving(tmp_path, stack_of(rows=64, secondary=[nvme])) as served:
        engine = served.engine()
        engine.store(KEYS)
        served.engine().store(keys_of(16, first=500))
        for first in range(2000, 6000, 8):
            engine.store(keys_of(8, first=first))
            if not served.count(lambda host: sum(key in host.manager.primary.blocks for key in KEYS[:16])):
                break  # which block goes first is the policy's choice
        context = engine.begin()
        engine.manager.prefetch(KEYS[:16], context)
        assert engine.load(KEYS[:16], context) == 16
        assert engine.manager.hit_tier(KEYS[15], context) == "nvme"


@pytest.mark.parametrize("asks_first", ["fast", "slow"])
def test_a_fast_engine_computes_what_a_slow_one_loads(tmp_path: Path, asks_first: str) -> None:
    memory = {"type": "memory", "capacity": "1MiB", "job_timeout": "60s", "lookup_timeout": "60s"}
    stack = stack_of(rows=64, secondary=[memory], primary={"capacity": 64 * 4096, "request_wait": "60s"})
    with serving(tmp_path, stack) as served:
        engines = {"fast": served.engine(), "slow": served.engine()}
        engines["fast"].manager.cost.block_s, engines["slow"].manager.cost.block_s = 1e-9, 1e9
        engines["slow"].store(KEYS[:16])
        for first in range(2000, 8000, 8):
            engines["slow"].store(keys_of(8, first=first))
            if not served.count(lambda host: sum(key in host.manager.primary.blocks for key in KEYS[:16])):
                break

        def learn(host: ServedStack) -> int:
            for blocks in (8, 16):  # a load takes a second a block
                host.manager._tiers[0].pace.add(blocks, float(blocks), time.monotonic())
            return 0

        served.count(learn)
        ordered = sorted(engines, key=lambda name: name != asks_first)
        for name in ordered:  # of absent blocks, to say what computing costs
            engine, context = engines[name], engines[name].begin()
            engine.manager.prefetch(keys_of(2, first=9000), context)
            engine.manager.expect(2, context)
            engine.look_up(keys_of(2, first=9000), context)
            engine.end(context)
        wanted = {"fast": KEYS[:8], "slow": KEYS[8:16]}
        contexts = {name: engines[name].begin() for name in ordered}
        may_go_on = threading.Event()
        served.server.call_soon(lambda: may_go_on.wait(20))
        for name in ordered:  # in one step of the server
            engines[name].manager.lookup_many(wanted[name], contexts[name])
            engines[name].manager.on_schedule_end()
        may_go_on.set()
        found = {name: engines[name].load(wanted[name], contexts[name]) for name in ordered}
        assert found == {"fast": 0, "slow": 8}
        gauge = served.count(lambda host: host.manager.counters()["cpu"]["compute_block_seconds"])
        assert gauge == 1e9, "of the slowest"


def test_after_a_reset_no_engine_finds_a_block(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        first, second = served.engine(), served.engine()
        first.store(KEYS)
        waiting = second.begin()
        first.manager.reset_cache()
        second.step_until(lambda: second.manager.epoch == 1)
        assert second.load(KEYS) == 0
        assert second.store(KEYS[:4], waiting) == []  # it began before
        assert second.store(KEYS[:4]) == KEYS[:4]
        assert first.load(KEYS[:8]) == 4


def test_a_reset_while_the_server_is_away_reaches_the_next_one(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    stack = stack_of(rows=64, secondary=[nvme])
    with serving(tmp_path, stack) as served:
        engine = served.engine()
        engine.store(KEYS)
        served.engines.clear()
    engine.step_until(lambda: not engine.manager.is_attached)
    engine.manager.reset_cache()
    with serving(tmp_path, stack) as served:
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.load(KEYS) == 0
        engine.store(KEYS[:4])
        assert engine.load(KEYS) == 4
        engine.close()


def test_a_reset_beside_that_of_another_engine_is_not_lost_with_the_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        first, second = served.engine(), served.engine()
        first.manager.reset_cache()
        wait_until(lambda: served.host.epoch == 1)
        is_held, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            goes_on.wait(20)

        served.server.call_soon(hold)
        assert is_held.wait(20)  # the second has been told of the first's
        second.manager.reset_cache()
        second.manager.poll()
        served.disconnect("scheduler")  # before the server reads on
        goes_on.set()
        second.step_until(lambda: served.host.epoch == 2)


def test_an_engine_that_has_reset_finds_blocks_of_a_server_that_was_started_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.manager.reset_cache()
        engine.store(KEYS)
        served.engines.clear()
    engine.step_until(lambda: not engine.manager.is_attached)
    with serving(tmp_path) as served:
        engine.step_until(lambda: engine.manager.is_attached)
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        engine.close()


def test_a_request_from_before_a_reset_loads_nothing_of_what_it_had_leased(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        context = engine.begin()
        assert engine.look_up(KEYS, context) == len(KEYS)
        engine.manager.reset_cache()
        assert engine.look_up(KEYS, context) == 0
        engine.end(context)


def test_a_request_after_a_pause_of_the_engine_waits_for_its_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        paused_s = [0.0]
        engine = served.engine(clock=lambda: time.monotonic() + paused_s[0])
        engine.store(KEYS)
        context, manager, is_over = engine.begin(), engine.manager, threading.Event()
        link = manager.link
        assert link is not None
        engine.step_until(lambda: not link.asked)
        paused_s[0] = 60.0
        served.server.call_soon(partial(wait_until, is_over.is_set))
        manager.prefetch(KEYS, context)
        manager.poll()
        answer = manager.lookup(KEYS[0], context)
        is_over.set()
        assert answer is None
        assert engine.load(KEYS, context) == len(KEYS)


def misses_of(manager: CalledManager) -> int:
    return int(manager.counters()["cpu"]["blocks_total"].get("miss", 0))


def test_an_answer_that_came_within_the_step_is_taken_in_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        context, link = engine.begin(), engine.manager.link
        assert link is not None
        engine.manager.on_schedule_end()  # it asks for rows
        engine.step_until(lambda: not link.asked)
        engine.manager.prefetch(KEYS, context)
        wait_until(lambda: link.channel.is_readable)
        engine.manager.expect(len(KEYS), context)
        assert engine.manager.lookup_many(KEYS, context) == [False] * len(KEYS)


@pytest.mark.parametrize("stored", [0, 8])
def test_a_prompt_that_no_tier_has_gets_one_answer_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    with serving(tmp_path, stack_of(secondary=[nvme])) as served:
        served.engine().store(KEYS[:stored])
        engine = served.engine()
        context, answers = engine.begin(), list[int]()
        tell = Session._tell

        def counted(self: Session, request: SessionRequest, first: int) -> None:
            answers.append(request.codes.count(protocol.WAITING))
            tell(self, request, first)

        monkeypatch.setattr(Session, "_tell", counted)
        engine.manager.prefetch(KEYS, context)
        assert engine.look_up(KEYS, context) == stored
        assert answers == [0]
        engine.end(context)
        wait_until(lambda: served.count(lambda host: misses_of(host.manager)) == 1)


def test_a_tier_that_asks_its_server_is_asked_for_the_first_block_of_one_prompt_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def asking(_: ManyLookups, keys: Sequence[OffloadKey], _context: ReqContext) -> list[bool | None]:
        asked.append(len(keys))
        return [None] * len(keys)

    monkeypatch.setattr(ManyLookups, "contains_many", asking)
    with serving(tmp_path) as served:
        engine = served.engine()
        for first in (0, 100, 200):
            context = engine.begin()
            engine.manager.prefetch(keys_of(8, first), context)
            assert engine.look_up(keys_of(8, first), context) == 0  # the prefetch finds that
            engine.end(context)
        assert asked == [1]


def test_an_engine_tells_what_computing_costs_it_also_if_it_has_its_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        context, link = engine.begin(), engine.manager.link
        assert link is not None
        engine.manager.cost.block_s = 0.25
        engine.manager.prefetch(KEYS, context)
        engine.step_until(lambda: engine.manager.promoting(context) == 0)
        engine.manager.expect(len(KEYS), context)
        assert engine.manager.lookup_many(KEYS, context) == [False] * len(KEYS)
        engine.step_until(lambda: served.count(told_cost) > 0)


def told_cost(host: ServedStack) -> int:
    return sum(session.cost.block_s == 0.25 for session in host.sessions.values())


def test_stores_that_find_no_rows_in_one_step_find_them_together(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        link = engine.manager.link
        assert link is not None
        engine.step_until(lambda: not link.asked)
        stores = [(keys_of(24, first), engine.begin()) for first in (0, 24)]
        assert [engine.manager.prepare_store(keys, context) for keys, context in stores] == [None, None]
        engine.manager.on_schedule_end()
        engine.step_until(lambda: not link.asked)
        outputs = [engine.manager.prepare_store(keys, context) for keys, context in stores]
        assert [output and output.keys_to_store for output in outputs] == [keys for keys, _ in stores]
        for keys, context in stores:
            engine.manager.complete_store(keys, context, success=False)
            engine.end(context)


def test_requests_with_the_same_blocks_ask_for_their_rows_once(tmp_path: Path) -> None:
    with serving(tmp_path, stack_of(rows=1024)) as served:
        engine = served.engine()
        link = engine.manager.link
        assert link is not None
        for _ in range(10):
            assert engine.manager.prepare_store(KEYS, engine.begin()) is None
        engine.manager.on_schedule_end()
        engine.step_until(lambda: not link.asked)
        assert len(link.free) == len(KEYS)


def test_rows_of_stores_that_do_not_come_go_back_while_another_request_lives(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        passed_s = [0.0]
        engine = served.engine(clock=lambda: time.monotonic() + passed_s[0])
        link = engine.manager.link
        assert link is not None
        engine.begin()
        given_up = engine.begin()
        assert engine.manager.prepare_store(KEYS, given_up) is None
        engine.step_until(lambda: len(link.free) >= len(KEYS))
        engine.end(given_up)
        assert len(link.free) >= len(KEYS)
        for _ in range(2):
            passed_s[0] += 1.0
            engine.manager.on_schedule_end()
        assert len(link.free) == link.welcome.grant_rows
        engine.step_until(lambda: served.count(lambda host: host.granted) == link.welcome.grant_rows)


def test_leases_and_grants_end_with_the_engine(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        engine.store(KEYS)
        context = engine.begin()
        assert engine.look_up(KEYS, context) == len(KEYS)
        engine.manager.prepare_load(KEYS, context)
        engine.manager.complete_load(KEYS, context)
        engine.close()
        other.step_until(lambda: served.count(lambda host: len(host.sessions)) == 1)
        assert served.count(lambda host: sum(block.ref_cnt > 0 for block in host.manager.primary.blocks.values())) == 0


def test_an_engine_attaches_again_to_a_server_that_was_started_anew(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        context = engine.begin()
        assert engine.look_up(KEYS, context) == len(KEYS)
        engine.manager.prepare_load(KEYS[:4], context)
        served.engines.clear()
    engine.step_until(lambda: not engine.manager.is_attached)
    assert engine.manager.lookup(KEYS[5], context) is False
    with serving(tmp_path) as served:
        for _ in range(5):
            engine.manager.on_schedule_end()
        assert not engine.manager.is_attached  # a copy runs
        engine.manager.complete_load(KEYS[:4], context)
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.load(KEYS) == 0
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        engine.close()


def test_without_a_thread_to_attach_again_blocks_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise ResourceError("no thread")

    with serving(tmp_path) as served:
        engine = served.engine()
        served.engines.clear()
    with monkeypatch.context() as patch:
        patch.setattr("tiered_kv.server.attach.start_thread", refuse)
        engine.step_until(lambda: not engine.manager.is_attached)
        assert engine.load(KEYS) == 0
    with serving(tmp_path):
        engine.step_until(lambda: engine.manager.is_attached)
        engine.close()


def test_an_engine_of_another_model_is_refused(tmp_path: Path) -> None:
    settings = {"namespace": {"model": "other"}, "block": {"bytes": 4096, "tokens": 16}}
    with serving(tmp_path) as served, pytest.raises(ConfigError, match="model"):
        served.engine(settings=settings)


def test_engines_of_two_models_share_one_server(tmp_path: Path) -> None:
    template = {name: value for name, value in stack_of().items() if name == "primary"}
    settings = [{"namespace": {"model": name}, "block": {"bytes": 4096, "tokens": 16}} for name in "abc"]
    with serving(tmp_path, template, namespaces=2) as served:
        first, second = (served.engine(settings=each) for each in settings[:2])
        first.store(KEYS)
        assert second.load(KEYS) == 0
        with pytest.raises(ConfigError, match="--namespaces"):
            served.engine(settings=settings[2])
        second.close()
        wait_until(lambda: not served.namespaces.stacks[1].sessions)
        third = served.engine(settings=settings[2])
        assert third.store(KEYS[:16]) == KEYS[:16]


def test_a_stack_that_cannot_be_replaced_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = {name: value for name, value in stack_of().items() if name == "primary"}
    settings = [{"namespace": {"model": name}, "block": {"bytes": 4096, "tokens": 16}} for name in "ab"]

    def refuse(*_: object) -> None:
        raise ResourceError("no thread")

    with serving(tmp_path, template) as served:
        first = served.engine(settings=settings[0])
        first.store(KEYS)
        first.close()
        wait_until(lambda: not served.host.sessions)
        with monkeypatch.context() as broken:
            broken.setattr("tiered_kv.server.namespaces.start_thread", refuse)
            with pytest.raises(ConfigError, match="no thread"):
                served.engine(settings=settings[1])
        assert served.engine(settings=settings[0]).load(KEYS) == len(KEYS)


def test_a_mistake_of_the_server_costs_one_engine_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        other.store(KEYS)
        with monkeypatch.context() as broken:
            broken.setattr(served.host.manager, "lookup_many", lambda *_: 1 / 0)
            assert engine.load(KEYS) == 0
            engine.step_until(lambda: not engine.manager.is_attached)
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.load(KEYS) == other.load(KEYS) == len(KEYS)


def test_blocks_that_are_asked_for_from_the_end_are_found_behind_a_miss(tmp_path: Path) -> None:
    """As an engine asks for a window: its last block first."""
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS[:4] + KEYS[5:8])
        context = engine.begin()
        asked = KEYS[7::-1]
        engine.step_until(lambda: None not in engine.manager.lookup_many(asked, context))
        assert engine.manager.lookup_many(asked, context) == [True, True, True, False, True, True, True, True]


def test_an_engine_without_requests_keeps_few_rows(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        context = engine.begin()
        engine.look_up(keys_of(50), context)  # it will store what is missing, and asks for rows
        engine.step_until(lambda: engine.manager.link is not None and len(engine.manager.link.free) >= 50)
        engine.end(context)
        wait_until(lambda: served.rows_in_use() == 16)


def test_a_server_publishes_what_its_engines_store(tmp_path: Path) -> None:
    with serving(tmp_path, stack_of(events={"publish": "tcp://127.0.0.1:*"})) as served:
        engine, publisher, firsts = served.engine(), served.host.stack.events, itertools.count(step=4)
        assert publisher is not None
        with Subscriber(publisher) as subscriber:
            message = subscriber.connect(lambda: engine.store(keys_of(4, first=next(firsts))))
        assert {(event["type"], event["medium"]) for event in message.events} == {("BlockStored", "CPU")}
        assert list(engine.manager.take_events()) == []


def test_what_an_engine_counts_are_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        engine.load(KEYS)
        engine.load(keys_of(2, first=900))
        found = {(each.name, *each.labels): each.value for each in series_of(engine.manager.counters(), set())}
    assert found["tiered_kv_stored_blocks_total", "host"] == found["tiered_kv_loaded_blocks_total", "host"] == len(KEYS)
    assert found["tiered_kv_misses_total", "host", "absent"] == 2
    assert found["tiered_kv_connection_state", "host"] == 1


def test_engines_together_leave_rows_for_blocks(tmp_path: Path) -> None:
    with serving(tmp_path, stack_of(rows=64)) as served:
        engines = [served.engine() for _ in range(6)]
        for engine in engines:
            engine.look_up(keys_of(60), engine.begin())
        for _ in range(20):
            for engine in engines:
                engine.manager.on_schedule_end()
        assert served.rows_in_use() <= 32


def test_keys_that_no_tier_has_answered_are_asked_for_again_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[OffloadKey]] = []

    def look_up(keys: list[OffloadKey], _: ReqContext) -> list[None]:
        calls.append(keys)
        return [None] * len(keys)

    with serving(tmp_path) as served:
        monkeypatch.setattr(served.host.manager, "lookup_many", look_up)
        engine, asked = served.engine(), keys_of(4000)
        for keys in (asked[:2000], asked[2000:]):
            engine.manager.lookup_many(keys, engine.begin())
        engine.manager.on_schedule_end()
        wait_until(lambda: len(calls) >= 40)
        again = calls[20:40]
        assert max(map(len, again)) <= 512
        assert {key for keys in again for key in keys} == set(asked)
