"""Resets, answers and ids in the orders that are rare."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty import Gate, HeldJobsTier
from tests.support.host_server import BLOCK_BYTES, Engine, keys_of, server_process, serving, stack_of
from tests.support.stacks import Register
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.errors import TieredKVError
from tiered_kv.server import protocol
from tiered_kv.server.attach import Attachment, HostLink
from tiered_kv.server.channel import Channel
from tiered_kv.server.client import AttachedManager
from tiered_kv.server.connection import RESET_S
from tiered_kv.server.namespaces import Namespaces
from tiered_kv.server.protocol import Hello, Message, Welcome
from tiered_kv.server.reset_file import ResetNotes
from tiered_kv.server.session import Session
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

KEYS = keys_of(12)


def test_no_row_that_outlasts_a_reset_in_use_is_found_after_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        reading = engine.begin()
        assert engine.look_up(KEYS[1:], reading) == len(KEYS) - 1  # these rows stay in use
        other.manager.reset_cache()
        engine.step_until(lambda: engine.manager.epoch == 1)
        engine.store(KEYS[:1])
        assert engine.load(KEYS) == 1  # and none of the others, whose rows nobody has freed
        engine.end(reading)


def test_a_reset_that_fails_half_way_leaves_the_cache_to_other_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        engine.store(KEYS)
        monkeypatch.setattr(served.host.manager.notices, "add", fail)
        other.manager.reset_cache()
        engine.step_until(lambda: served.host.epoch == 1)
        engine.step_until(lambda: engine.manager.epoch == 1)
        assert engine.load(KEYS) == 0
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)


def test_a_reset_by_the_file_alone_that_fails_half_way_ends_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        link = engine.manager.link
        monkeypatch.setattr(served.host.manager.notices, "add", fail)
        ResetNotes(f"{tmp_path}/cache.sock", {"namespace": {"model": "test"}, "block": {"bytes": BLOCK_BYTES}}).note("")
        engine.step_until(lambda: engine.manager.epoch == 1)
        engine.store(KEYS)
        assert engine.load(KEYS) == len(KEYS)
        assert engine.manager.link is link


class Told:
    """In place of a session's channel: how often each request was answered."""

    has_unsent = False

    def __init__(self) -> None:
        self.answers: list[int] = []

    def add(self, code: int, number: int = 0, count: int = 0, body: bytes = b"", flags: int = 0) -> None:
        if code == protocol.ANSWER:
            self.answers.append(count)

    def flush(self) -> None:
        return


def test_an_engine_is_told_of_blocks_that_it_waits_for_after_others_have_come() -> None:
    namespaces = Namespaces(stack_of(64), 1)
    namespaces.open_own()
    (host,) = namespaces.stacks
    primary, told = host.manager.primary, Told()
    session = Session("an engine", host)
    session.channel = told  # type: ignore[assignment]
    host.sessions["an engine"] = session

    def write(keys: list[OffloadKey]) -> list[int]:
        chain = RequestChain()
        rows = primary.allocate(keys, "another", chain, [])
        assert rows is not None
        chain.extend(rows, primary.table)
        return rows

    def ask(keys: list[OffloadKey]) -> None:
        session.handle(Message(protocol.ACQUIRE, 0, len(keys), 1, memoryview(b"".join(keys))))
        host.step(lambda _, error: pytest.fail(str(error)))

    first = write(KEYS[:2])
    session.handle(Message(protocol.BEGIN, 0, 0, 1, memoryview(protocol.BEGUN.pack(0, 1) + b"r")))
    ask(KEYS[:2])
    primary.commit(first, KEYS[:2])
    session.changed[1] = session.requests[1]
    host.step(lambda _, error: pytest.fail(str(error)))
    second = write(KEYS[2:4])
    told.answers.clear()
    ask(KEYS[2:4])
    assert told.answers  # else the engine takes the server for silent
    primary.commit(second, KEYS[2:4])
    session.channel = None
    host.close(1.0)


@pytest.mark.one_quick(2)
@pytest.mark.parametrize("passed_s", [0.0, 2 * RESET_S])
def test_a_reset_that_a_killed_server_has_not_written_is_made_again(tmp_path: Path, passed_s: float) -> None:
    folder, before = tmp_path / "nvme", tmp_path / "before"
    nvme = {"type": "nvme", "path": str(folder), "capacity": "64MiB"}
    now_s = 0.0
    with server_process(tmp_path, secondary=[nvme]):
        resets, follows = (Engine(f"unix:{tmp_path}/cache.sock", name, clock=lambda: now_s) for name in "ab")
        follows.store(KEYS)
        asked = follows.manager.ask_idle()
        follows.step_until(lambda: follows.manager.is_idle(asked))
        shutil.copytree(folder, before)
        resets.manager.reset_cache()
        follows.step_until(lambda: follows.manager.epoch == 1)
        (kept,) = tmp_path.glob("cache.sock.resets-*")
        wait_until(lambda: kept.read_bytes()[:1] == b"\1")  # it takes the tiers' word
    resets.close()
    follows.step_until(lambda: not follows.manager.is_attached)
    shutil.rmtree(folder)
    before.rename(folder)
    now_s += passed_s
    with server_process(tmp_path, secondary=[nvme]):
        follows.step_until(lambda: follows.manager.is_attached)
        assert follows.load(KEYS) == (len(KEYS) if passed_s else 0)
        follows.store(KEYS)
        assert follows.load(KEYS) == len(KEYS)
        follows.close()


def test_a_reset_while_an_engine_has_no_connection_outdates_its_requests(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine, other = served.engine(), served.engine()
        before = engine.begin()
        engine.manager.server.lose("a test")
        other.manager.reset_cache()
        other.step_until(lambda: served.host.epoch == 1)
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.store(KEYS, before) == []
        assert engine.store(KEYS) == KEYS


@pytest.mark.parametrize("hints", [{"priority": "x" * 100_000}, {"ttl": {1}}, {"skip": ["store"] * 50_000}, {1: 2}])
def test_odd_hints_harm_no_engine(tmp_path: Path, hints: Any) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        context = engine.begin(tiered_kv=hints)
        assert engine.load(KEYS, context) == len(KEYS)
        engine.end(context)
        assert engine.load(KEYS) == len(KEYS)


def test_an_engine_that_leaves_answers_unread_ends_its_session(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        served.engines.clear()
        engine.manager.prefetch(KEYS, engine.begin())
        wait_until(served.rows_in_use)  # the answer is sent
        engine.close()  # its process goes on: it is the test's
        wait_until(lambda: not served.count(lambda host: len(host.sessions)))


def test_an_id_that_is_used_twice_keeps_no_lease(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        for _ in range(2):
            engine.look_up(KEYS, engine.begin("same"))
        engine.end(ReqContext("same"))
        engine.step_until(lambda: not served.count(lambda host: host.leases))


def test_an_id_that_is_used_twice_keeps_the_leases_of_its_load(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        context = engine.begin("same")
        engine.look_up(KEYS, context)
        engine.manager.prepare_load(KEYS, context)
        engine.end(context)
        engine.begin("same")
        engine.end(context)
        assert served.count(lambda host: host.leases) == len(KEYS)
        engine.manager.complete_load(KEYS, context)
        engine.step_until(lambda: not served.count(lambda host: host.leases))


def test_blocks_that_a_queued_request_gets_are_not_evicted_for_its_next_one(tmp_path: Path) -> None:
    nvme = {"type": "nvme", "path": str(tmp_path / "nvme"), "capacity": "64MiB"}
    primary = {"capacity": 19 * BLOCK_BYTES, "promotion_hold": "1ms"}
    with serving(tmp_path, {**stack_of(secondary=[nvme], prefill="off"), "primary": primary}) as served:
        engine, queued, others = served.engine(), KEYS[:3], keys_of(9, first=100)
        for keys in (queued, others[:1], others[1:5], others[5:]):
            assert engine.store(keys) == keys
        engine.step_until(lambda: not served.count(lambda host: host.manager.jobs_in_flight))
        leasing, late = engine.begin(), engine.begin()
        assert engine.look_up(others, leasing) == 9  # all that an engine may lease
        engine.manager.prefetch(queued, late)
        wait_until(lambda: served.count(lambda host: host.manager.counters()["cpu"]["released_holds_total"]) == 3)
        served.engine().store(keys_of(1, first=200))
        assert served.count(lambda host: [key in host.manager.primary.blocks for key in queued].index(False)) == 2
        engine.end(leasing)
        wait_until(lambda: served.count(lambda host: host.leases) == 3)
        assert engine.load(queued, late) == 3


class OneLink(Attachment):
    """An attachment whose server is the test."""

    def __init__(self, link: HostLink) -> None:
        super().__init__("unix:/nowhere", Hello("engine", "scheduler"))
        self._links = [link]

    def take_link(self) -> HostLink | None:
        return self._links.pop() if self._links else None


@pytest.fixture
def told() -> Iterator[tuple[AttachedManager, Channel]]:
    """A manager, and the server's end of its connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    welcome = Welcome("instance", "", 64, 4096, 16, 0, 4, 16, ["cpu", "nvme"], 60.0, 60.0)
    link = HostLink(Channel(ours, 1 << 20), welcome, None, memoryview(bytes(64 * 4)).cast("I"))
    manager, server = AttachedManager(OneLink(link)), Channel(theirs, 1 << 20)
    yield manager, server
    manager.shutdown()
    server.close()


def tell(manager: AttachedManager, server: Channel, number: int, rows: list[int]) -> None:
    body = protocol.START.pack(0) + protocol.pack_rows(rows) + bytes(len(rows))
    server.add(protocol.ANSWER, number, len(rows), body)
    server.flush()
    manager.on_schedule_end()


def test_an_answer_that_is_told_again_gives_no_row_back(told: tuple[AttachedManager, Channel]) -> None:
    manager, server = told
    context = ReqContext("request")
    assert manager.lookup_many(KEYS[:3], context) == [None] * 3
    manager.on_schedule_end()
    number = manager._requests["request"].number
    tell(manager, server, number, [protocol.WAITING, 1, 2])
    manager.prepare_load(KEYS[1:3], context)
    manager.complete_load(KEYS[1:3], context)  # its lease ends
    tell(manager, server, number, [7, 1, 2])
    assert manager.lookup_many(KEYS[:2], context) == [True, None]
    tell(manager, server, number, [7, 1, 2, 9])
    assert manager.prepare_load([KEYS[0], KEYS[1]], context).block_ids.tolist() == [7, 9]


def test_a_request_with_too_many_keys_waits_for_none(
    told: tuple[AttachedManager, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REQUEST_KEYS_MAX", 4)
    assert told[0].lookup_many(KEYS[:6], ReqContext("request")) == [None] * 4 + [False] * 2


def test_an_engine_does_not_wait_for_a_server_that_never_reads(told: tuple[AttachedManager, Channel]) -> None:
    manager, _ = told
    for number in range(1000):
        if manager.link is None:  # more than a channel keeps was left unread
            break
        manager.prefetch(keys_of(512, number), ReqContext(f"request-{number}"))
    assert manager.link is None
    assert manager.lookup_many(KEYS[:3], ReqContext("request-0")) == [False] * 3


def _contained(engine: Engine, context: ReqContext) -> list[bool | None]:
    """Ask until the server has answered for all of `KEYS`."""
    answers: list[bool | None] = []

    def ask() -> bool:
        answers[:] = engine.manager.contains_many(KEYS, context)
        return None not in answers

    engine.step_until(ask)
    return answers


def test_questions_of_a_request_are_answered_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "KEYS_MAX", 8)
    with serving(tmp_path) as served:
        engine = served.engine()
        engine.store(KEYS)
        manager, real, asked = served.host.manager, served.host.manager.contains_many, list[Any]()

        def late(keys: Any, context: ReqContext) -> list[bool | None]:
            asked.append(keys)
            return [None] * len(keys) if len(asked) < 3 and len(keys) == 8 else real(keys, context)

        monkeypatch.setattr(manager, "contains_many", late)
        assert _contained(engine, engine.begin()) == [True] * 12


def test_a_question_that_a_tier_answers_late_does_not_make_the_server_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        later_s = [0.0]
        engine = served.engine(clock=lambda: time.monotonic() + later_s[0])
        engine.store(KEYS)
        link, manager = engine.manager.link, served.host.manager
        assert link is not None
        engine.step_until(lambda: not link.asked)
        real, asked = manager.contains_many, list[Any]()

        def late(keys: Any, context: ReqContext) -> list[bool | None]:
            asked.append(keys)
            return real(keys, context) if later_s[0] else [None] * len(keys)

        monkeypatch.setattr(manager, "contains_many", late)
        monkeypatch.setattr(served.host.index, "find_all", lambda _: ())  # as for blocks that only a tier has
        context = engine.begin()
        assert engine.manager.contains_many(KEYS, context) == [None] * 12
        engine.step_until(lambda: asked)
        for _ in range(2):  # the server has read that before it answers the second time, and sent what it had to say
            served.rows_in_use()
        engine.manager.poll()
        later_s[0] = 5.0
        engine.manager.poll()
        assert _contained(engine, context) == [True] * 12


def test_a_program_does_not_wait_for_the_answer_of_a_lost_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        engine = served.engine()
        asked = engine.manager.ask_idle()
        engine.manager.server.lose("a test")
        engine.step_until(lambda: engine.manager.is_attached)
        assert engine.manager.is_idle(asked)


def test_a_scheduled_request_waits_for_blocks_that_were_promoted_before(tmp_path: Path, register: Register) -> None:
    gate = Gate()

    class Held(SecondaryTierManager):
        def __new__(cls, spec: Any, view: memoryview, tier_type: str) -> Any:
            settings = MemorySettings.model_validate({"type": "memory", "capacity": "1 MiB"})
            return HeldJobsTier(MemoryTier(spec, view, "memory", settings), gate)

    register("held", Held)
    with serving(tmp_path, stack_of(rows=64, secondary=[{"type": "held"}], prefill="off")) as served:
        later_s = [0.0]
        engine = served.engine(clock=lambda: time.monotonic() + later_s[0])
        for first in (0, *range(1000, 1100, 12)):  # the others evict the first
            engine.store(keys_of(12, first))
            engine.step_until(lambda: not served.count(lambda host: host.manager.jobs_in_flight))
        gate.close()
        context = engine.begin()
        engine.manager.prefetch(KEYS, context)
        engine.step_until(lambda: served.count(lambda host: host.manager.counters()["cpu"]["promotion_blocks"]) == 12)
        engine.manager.expect(12, context)
        engine.manager.on_schedule_end()
        for _ in range(2):  # the server has read that before it answers the second time, and sent what it had to say
            served.rows_in_use()
        engine.manager.poll()
        later_s[0] = 5.0
        engine.manager.poll()
        answer = engine.manager.lookup(KEYS[0], context)
        gate.open()
        assert answer is None
        assert engine.load(KEYS, context) == 12


def test_a_stack_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = {name: value for name, value in stack_of().items() if name == "primary"}
    settings = {"namespace": {"model": "a"}, "block": {"bytes": 4096, "tokens": 16}}

    def broken(*_: object) -> None:
        raise OSError("no more")

    with serving(tmp_path, template) as served:
        monkeypatch.setattr("tiered_kv.server.served_stack.ServedStack.__init__", broken)
        monkeypatch.setattr("tiered_kv.server.attach.OPEN_S", 5.0)
        with pytest.raises(TieredKVError, match="OSError"):
            served.engine(settings=settings)
