"""Tiers over a caller's memory: keys that stand twice in a call, and an error that nobody expected."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tests.direct.conftest import BLOCK_BYTES, MEMORY, WAIT_S, Register, offsets, open_direct
from tests.support.entries import s3_entry
from tests.support.faulty import Gate, HeldJobsTier
from tests.support.stacks import PATIENT
from tiered_kv.direct import tasks, thread
from tiered_kv.errors import ShutdownError
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

TARGET = 1 << 16


@pytest.mark.parametrize(
    "admission", [{}, {"admit_after": 2}, {"write_budget": "1 TiB/day"}, {"write_budget": "96KiB/day"}]
)
@pytest.mark.parametrize("kind", ["memory", "nvme", "fs"])
def test_a_key_may_stand_twice_in_every_call(
    pool: Any, kind: str, admission: dict[str, object], tmp_path: Path
) -> None:
    place = {} if kind == "memory" else {"path": str(tmp_path / "tier")}
    (first, second), before = make_keys(2), pool.copy()
    named, sources = [first, second, first], offsets(3)
    targets = [TARGET, TARGET + BLOCK_BYTES, TARGET + 2 * BLOCK_BYTES]
    with open_direct(pool, {"type": kind, "capacity": "16 MiB", **PATIENT, **place, **admission}) as tiers:
        for _ in range(3):
            assert tiers.wait("store", named, sources, timeout_s=WAIT_S) == [True] * 3
        has = tiers.wait("contains", [first, second], timeout_s=WAIT_S)
        assert tiers.wait("contains", named, timeout_s=WAIT_S) == [*has, has[0]]
        assert tiers.wait("load", named, targets, timeout_s=WAIT_S) == [*has, has[0]]
        assert tiers.wait("load", [first, first], [TARGET, TARGET], timeout_s=WAIT_S) == [has[0]] * 2
        assert tiers.counters()[""]["open_tasks"] == 0
    if all(has):
        for source, target in zip([0, BLOCK_BYTES, 0], targets, strict=True):
            assert np.array_equal(pool[target : target + BLOCK_BYTES], before[source : source + BLOCK_BYTES])
    assert all(has) == ("96KiB" not in str(admission))


def test_an_unexpected_error_answers_every_task_and_closes_the_tiers(
    pool: Any, register: Register, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register("held", lambda inner: HeldJobsTier(inner, gate))
    monkeypatch.setattr(threading, "excepthook", lambda *_: pytest.fail("the thread died"))
    answers: dict[str, SimpleQueue[list[bool]]] = {name: SimpleQueue() for name in ("in flight", "waiting", "asked")}
    with open_direct(pool, {"type": "held", "store_budget": BLOCK_BYTES, **PATIENT}) as tiers:
        is_closed: list[bool] = []
        closer = threading.Thread(target=lambda: is_closed.append(tiers.close()))

        def close_at_last(answer: list[bool]) -> None:
            closer.start()
            closer.join(0.2)  # it waits for the end of this call
            answers["in flight"].put(answer)

        gate.close()
        tiers.store(make_keys(1), [0], close_at_last)
        wait_until(lambda: tiers.counters()["held"]["jobs_in_flight"] == 1, WAIT_S)
        tiers.store(make_keys(1, "waiting"), [0], answers["waiting"].put)
        wait_until(lambda: tiers.counters()["held"]["waiting_blocks"] == 1, WAIT_S)

        def fail(*_: object) -> None:
            raise KeyError("unforeseen")

        monkeypatch.setattr(tasks.TierQueue, "submit", fail)
        tiers.contains(make_keys(2), answers["asked"].put)
        assert answers["waiting"].get(timeout=WAIT_S) == [False]
        assert answers["asked"].get(timeout=WAIT_S) == [False, False]
        with pytest.raises(ShutdownError, match="closed after an error, which is in the log"):
            tiers.wait("contains", make_keys(1), timeout_s=WAIT_S)
        assert answers["in flight"].empty(), "the tier still reads the memory"
        gate.open()
        assert answers["in flight"].get(timeout=WAIT_S) == [False]
        closer.join(WAIT_S)
        assert is_closed == [True]
    assert [record.exc_info is not None for record in caplog.records if record.name == thread.__name__] == [True]


def test_a_task_that_is_posted_while_the_tiers_close_is_answered(pool: Any) -> None:
    answers: SimpleQueue[list[bool]] = SimpleQueue()
    refused = 0
    for _ in range(50):
        tiers = open_direct(pool, MEMORY)
        closing = threading.Thread(target=tiers.close)
        closing.start()
        try:
            tiers.contains(make_keys(1), answers.put)
        except ShutdownError:
            refused += 1
        closing.join()
    for _ in range(50 - refused):
        assert answers.get(timeout=WAIT_S) == [False]


COUNT = 64
START, SIZE = 1 << 19, COUNT * BLOCK_BYTES
"""Where loads go."""


@pytest.mark.slow
@pytest.mark.trust
@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_tasks_over_a_frozen_server_end_and_let_the_memory_go(
    kind: str, pool: Any, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("redis_server" if kind == "redis" else "moto_server")
    place = {"type": "redis", "url": server.url} if kind == "redis" else s3_entry(server, server.make_bucket())
    limits = {"lookup_timeout": "1s", "job_timeout": "3s", "breaker_cooldown": "100ms"}
    keys, cut_off, content = make_keys(COUNT), make_keys(COUNT, "cut off"), pool[:SIZE].copy()
    sources, targets = offsets(COUNT), offsets(COUNT, START)
    reports: list[list[bool]] = []
    with open_direct(pool, {**place, **limits}) as tiers:
        assert tiers.wait("store", keys, sources) == [True] * COUNT
        server.freeze()
        try:
            tiers.load(keys, targets, reports.append)
            tiers.store(cut_off, sources, reports.append)
            tiers.contains(make_keys(COUNT, "never asked for"), reports.append)
            wait_until(lambda: len(reports) == 3, what="the end of all tasks")
            pool[START : START + SIZE] = 7
        finally:
            server.thaw()
        assert reports == [[False] * COUNT] * 3
        wait_until(lambda: tiers.wait("contains", keys) == [True] * COUNT, what="an answer of the server")
        assert (pool[START : START + SIZE] == 7).all(), "a late answer was written into the caller's memory"
        wait_until(lambda: tiers.wait("load", keys, targets) == [True] * COUNT, what="a load")
        assert np.array_equal(pool[START : START + SIZE], content)
        # The server may carry out what it had not answered: then these are the bytes.
        there = tiers.wait("load", cut_off, targets)
        for start in (number * BLOCK_BYTES for number in range(COUNT) if there[number]):
            assert np.array_equal(
                pool[START + start : START + start + BLOCK_BYTES], content[start : start + BLOCK_BYTES]
            )
        wait_until(lambda: tiers.wait("store", cut_off, sources) == [True] * COUNT, what="a store")
