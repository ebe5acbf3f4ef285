"""Tiers over a caller's memory: what they load, what they refuse, and how they end."""

from __future__ import annotations

import math
import mmap
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct.conftest import BLOCK_BYTES, MEMORY, WAIT_S, Register, offsets, open_direct
from tests.support.entries import s3_entry
from tests.support.faulty import FourMethodTier, Gate, HangingTier, HeldJobsTier, Lie, LyingTier
from tests.support.pages import write_shown
from tests.support.stacks import PATIENT
from tests.tiering.test_wedged_tiers import DETECTABLE
from tiered_kv.base import OffloadKey
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers, thread
from tiered_kv.errors import ConfigError, ShutdownError
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import Outcome
from tiered_kv.toolkit.queued import PART_EPOCH
from tiered_kv_memory.tier import MemoryTier

OpenHeld = Callable[..., DirectTiers]
TARGET = 1 << 16
"""Where most tests load blocks."""


def test_the_program_in_the_documentation_stores_and_loads(tmp_path: Path) -> None:
    (name,) = write_shown("how-to/direct.md", tmp_path)
    command = [sys.executable, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["stored [True, True, True, True]", "loaded [True, True, True, True]"]
    assert done.stderr == ""


@pytest.fixture(params=["memory", "nvme", "fs", "redis", pytest.param("s3", marks=pytest.mark.slow)])
def entry(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """A tier of each type."""
    tier: dict[str, object] = {"type": request.param, **PATIENT}
    if request.param == "redis":
        return {**tier, "url": request.getfixturevalue("redis_server").url}
    if request.param == "s3":
        server = request.getfixturevalue("moto_server")
        return {**tier, **s3_entry(server, server.make_bucket())}
    place = {} if request.param == "memory" else {"path": str(tmp_path / "tier")}
    return {**tier, "capacity": "16 MiB", **place}


@pytest.fixture
def open_held(pool: Any, register: Register, gate: Gate) -> OpenHeld:
    """Open a tier whose jobs are held while the gate is closed."""

    def open_held(**settings: object) -> DirectTiers:
        register("held", lambda inner: HeldJobsTier(inner, gate))
        return open_direct(pool, {"type": "held", **PATIENT, **settings})

    return open_held


def loads_late(tier: MemoryTier, gate: Gate) -> MemoryTier:
    """Let the workers of a tier wait for a gate before they load."""
    load = tier.load_blocks

    def load_late(keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        gate.pass_through()
        return load(keys, blocks)

    tier.load_blocks = load_late  # type: ignore[method-assign]
    tier._shutdown_timeout_s = 0.05
    return tier


def content(pool: Any, offset: int, blocks: int = 1) -> bytes:
    return bytes(pool[offset : offset + blocks * BLOCK_BYTES])


# Blocks.


@pytest.mark.one_quick(4)
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 5000], ids=["page", "odd"])
@pytest.mark.parametrize("shift", [0, 7], ids=["aligned", "unaligned"])
def test_blocks_come_back_to_any_place_of_the_memory(
    pool: Any, entry: dict[str, object], block_bytes: int, shift: int
) -> None:
    keys, before = make_keys(20), pool.copy()
    sources = offsets(20, shift, 2 * block_bytes)
    targets = offsets(20, 2 * block_bytes * 20 + shift, block_bytes)
    with open_direct(pool, entry, block_bytes=block_bytes) as tiers:
        assert tiers.wait("contains", keys) == [False] * 20
        assert tiers.wait("store", keys, sources) == [True] * 20
        assert tiers.wait("contains", [*keys, *make_keys(2, "others")]) == [True] * 20 + [False] * 2
        assert tiers.wait("load", keys, targets) == [True] * 20
    for source, target in zip(sources, targets, strict=True):
        before[target : target + block_bytes] = before[source : source + block_bytes]
    assert np.array_equal(pool, before), "nothing else was written"


def test_memory_may_be_given_by_its_address_and_is_the_hosts_again_after_close(pool: Any) -> None:
    with mmap.mmap(-1, 1 << 16) as mapped, open_direct(mapped, MEMORY) as tiers:
        assert tiers.wait("store", make_keys(1), [0]) == [True]
        assert tiers.close()
        mapped.close()  # raises BufferError if there is a view
    with open_direct((pool.ctypes.data, pool.nbytes), MEMORY) as tiers:
        assert tiers.wait("store", make_keys(1), [0]) == [True]
        assert tiers.wait("load", make_keys(1), [BLOCK_BYTES]) == [True]
    assert content(pool, 0) == content(pool, BLOCK_BYTES)


def test_blocks_are_found_again_in_the_same_namespace_only(pool: Any, tmp_path: Path) -> None:
    keys = make_keys(3)
    nvme: dict[str, object] = {"type": "nvme", "capacity": "16 MiB", "path": str(tmp_path / "tier")}
    with open_direct(pool, nvme) as tiers:
        tiers.wait("store", keys, offsets(3))
    with open_direct(pool, nvme) as tiers:
        assert tiers.wait("contains", keys) == [True] * 3
    with pytest.raises(Exception, match="namespace"):
        open_direct(pool, nvme, namespace=Namespace(model="another"))


def test_a_key_that_is_loaded_twice_is_answered_for_each_place(pool: Any, register: Register) -> None:
    calls: list[Sequence[OffloadKey]] = []

    def loads_once(inner: MemoryTier) -> MemoryTier:
        load = inner.load_blocks

        def load_first(keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
            calls.append(keys)
            return load(keys, blocks) if len(calls) == 1 else Outcome((), "absent")

        inner.load_blocks = load_first  # type: ignore[method-assign]
        inner._part_blocks = 1
        return inner

    register("once", loads_once)
    (key,) = make_keys(1)
    with open_direct(pool, {"type": "once", **PATIENT}) as tiers:
        assert tiers.wait("store", [key, key], [0, 0]) == [True, True]
        answers = tiers.wait("load", [key] * 3, targets := offsets(3, TARGET))
    assert sorted(answers) == [False, False, True]
    assert content(pool, 0) == content(pool, targets[answers.index(True)])


def test_blocks_that_no_tier_takes_are_answered_false(pool: Any, register: Register) -> None:
    register("failing", lambda inner: FailingTier(inner, failing=True))
    with open_direct(pool, {"type": "failing", **PATIENT, "breaker_failures": 1, "breaker_cooldown": "1h"}) as tiers:
        assert tiers.wait("store", make_keys(1), [0]) == [False]
        assert tiers.counters()["failing"]["breaker_state"] == 2
        assert tiers.wait("store", make_keys(2), offsets(2)) == [False] * 2
        assert tiers.wait("load", make_keys(2), offsets(2)) == [False] * 2
        assert tiers.counters()["failing"]["skipped_blocks_total"] == {"breaker": 2}


def test_blocks_that_are_not_admitted_yet_are_answered_true(pool: Any) -> None:
    keys = make_keys(2)
    with open_direct(pool, {**MEMORY, "admit_after": 2}) as tiers:
        for is_stored in (False, True):
            assert tiers.wait("store", keys, offsets(2)) == [True] * 2
            assert tiers.wait("contains", keys) == [is_stored] * 2


def test_on_removed_gets_the_blocks_that_a_tier_loses(pool: Any) -> None:
    removed: list[tuple[str, list[OffloadKey]]] = []
    keys = make_keys(8)
    small = {**MEMORY, "capacity": 5 * BLOCK_BYTES}
    with open_direct(pool, small, on_removed=lambda name, keys: removed.append((name, list(keys)))) as tiers:
        for number, key in enumerate(keys):
            assert tiers.wait("store", [key], [number * BLOCK_BYTES]) == [True]
        stored = tiers.wait("contains", keys)
    lost = [key for key, is_stored in zip(keys, stored, strict=True) if not is_stored]
    assert lost
    assert {name for name, _ in removed} == {"memory"}
    assert [key for _, keys in removed for key in keys] == lost


def test_a_touched_block_outlives_blocks_that_were_stored_later(pool: Any) -> None:
    keys = make_keys(6)
    with open_direct(pool, {**MEMORY, "capacity": 5 * BLOCK_BYTES}) as tiers:
        room = next(n for n in range(1, 7) if not _is_kept(tiers, keys, n))  # a record is larger than its block
        tiers.reset()
        for number, key in enumerate(keys[: room - 1]):
            assert tiers.wait("store", [key], [number * BLOCK_BYTES]) == [True]
        tiers.touch(keys[:1])
        assert tiers.wait("store", [keys[room - 1]], [0]) == [True]
        assert tiers.wait("contains", keys[:2]) == [True, False]
        with pytest.raises(ValueError, match="a key is a block hash"):
            tiers.touch([OffloadKey(b"")])


def _is_kept(tiers: DirectTiers, keys: list[OffloadKey], number: int) -> bool:
    """Store one more block, and return whether the first is still there."""
    assert tiers.wait("store", [keys[number - 1]], [0]) == [True]
    return tiers.wait("contains", keys[:1]) == [True]


def test_a_reset_forgets_blocks_that_are_stored_in_flight_or_waiting(open_held: OpenHeld, gate: Gate) -> None:
    reports: list[Any] = []
    keys = make_keys(6)
    with open_held(store_budget=2 * BLOCK_BYTES) as tiers:
        assert tiers.wait("store", keys[:2], offsets(2)) == [True] * 2
        gate.close()
        tiers.store(keys[2:], offsets(4, TARGET), reports.append)
        tiers.reset()
        assert tiers.wait("contains", keys) == [False] * 6
        gate.open()
        wait_until(lambda: reports, WAIT_S)
        assert reports == [[False] * 4]
        assert tiers.wait("contains", keys) == [False] * 6
        assert tiers.wait("store", keys, offsets(6)) == [True] * 6


def test_a_load_from_before_a_reset_asks_no_further_tier(pool: Any, register: Register, gate: Gate) -> None:
    """Its block may be there by then, from after the reset."""
    register("held", lambda inner: HeldJobsTier(inner, gate))
    keys, answers = make_keys(2), list[list[bool]]()
    with open_direct(pool, {"type": "held", **PATIENT, "load_budget": BLOCK_BYTES}, MEMORY) as tiers:
        gate.close()
        tiers.load(keys, offsets(2, TARGET), answers.append)  # one is in flight, the other waits
        wait_until(lambda: tiers.counters()["held"]["jobs_in_flight"] == 1, WAIT_S)
        tiers.reset()
        tiers.store(keys, offsets(2), lambda _: None)
        wait_until(lambda: tiers.counters()["memory"].get("stored_blocks_total") == 2, WAIT_S)
        gate.open()
        wait_until(lambda: answers, WAIT_S)
        assert answers == [[False, False]]
        assert tiers.wait("load", keys, offsets(2, TARGET)) == [True, True]


def test_a_store_from_before_a_reset_is_answered_false_whatever_a_tier_has_done(
    pool: Any, register: Register, gate: Gate
) -> None:
    register("held", lambda inner: HeldJobsTier(inner, gate))
    answers = list[list[bool]]()
    with open_direct(pool, MEMORY, {"type": "held", **PATIENT}) as tiers:
        gate.close()
        tiers.store(make_keys(1), [0], answers.append)
        wait_until(lambda: tiers.counters()["memory"].get("stored_blocks_total") == 1, WAIT_S)
        tiers.reset()
        gate.open()
        wait_until(lambda: answers, WAIT_S)
    assert answers == [[False]]


def test_a_question_from_before_a_reset_finds_nothing(pool: Any, register: Register, gate: Gate) -> None:
    gate.close()
    register("hanging", lambda inner: HangingTier(inner, gate))
    answers = list[list[bool]]()
    with open_direct(pool, MEMORY, {"type": "hanging", **PATIENT}) as tiers:
        keys = make_keys(2)
        tiers.store(keys[:1], [0], lambda _: None)
        wait_until(lambda: tiers.counters()["memory"].get("stored_blocks_total") == 1, WAIT_S)
        tiers.contains(keys, answers.append)
        wait_until(lambda: gate.waiting, WAIT_S)  # so that the first tier has answered
        tiers.reset()
        wait_until(lambda: answers, WAIT_S)
        assert answers == [[False, False]]
        gate.open()


# Threads and budgets.


def test_every_task_of_many_threads_is_answered_once(pool: Any, entry: dict[str, object]) -> None:
    """Each thread stores and loads within its own part of the memory."""
    problems: list[str] = []

    def act(number: int) -> None:
        chance, start, size = random.Random(number), number << 17, 1 << 16
        keys, reports = make_keys(size // BLOCK_BYTES, f"thread {number}"), list[Any]()
        for _ in range(6):
            chosen = chance.sample(range(len(keys)), chance.randint(1, len(keys)))
            mine = [keys[place] for place in chosen]
            tiers.store(mine, [start + place * BLOCK_BYTES for place in chosen], reports.append)
            wait_until(lambda: reports, WAIT_S)
            targets = offsets(len(chosen), start + size)
            answers = tiers.wait("load", mine, targets)
            for place, target in zip(chosen, targets, strict=True):
                if content(pool, target) != content(pool, start + place * BLOCK_BYTES):
                    problems.append(f"thread {number}: block {place} came back wrong")
            if reports.pop() != [True] * len(mine) or reports or not all(answers):
                problems.append(f"thread {number}: {reports}, {answers}")

    with open_direct(pool, {**entry, "store_budget": 5 * BLOCK_BYTES, "load_budget": 3 * BLOCK_BYTES}) as tiers:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(act, range(8)))
        assert tiers.counters()[""]["open_tasks"] == 0
    assert problems == []


def test_the_end_of_a_job_or_lookup_wakes_the_thread(
    pool: Any, entry: dict[str, object], register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TICK_S", "IDLE_TICK_S"):
        monkeypatch.setattr(thread, name, 3600.0)
    register("isolated", lambda inner: HangingTier(inner, Gate()))
    small = {"store_budget": BLOCK_BYTES, "load_budget": BLOCK_BYTES}
    for tier in ({**entry, **small}, {"type": "isolated", **PATIENT, **small}):
        with open_direct(pool, tier) as tiers:
            assert tiers.wait("contains", make_keys(3), timeout_s=WAIT_S) == [False] * 3
            assert tiers.wait("store", make_keys(3), offsets(3), timeout_s=WAIT_S) == [True] * 3
            assert tiers.wait("contains", make_keys(3), timeout_s=WAIT_S) == [True] * 3
            assert tiers.wait("load", make_keys(3), offsets(3), timeout_s=WAIT_S) == [True] * 3


def test_blocks_over_a_budget_wait_and_are_not_skipped(open_held: OpenHeld, gate: Gate) -> None:
    reports: list[Any] = []
    gate.close()
    with open_held(store_budget=4 * BLOCK_BYTES) as tiers:
        for number in range(5):
            tiers.store(make_keys(4, str(number)), offsets(4, number << 16), reports.append)
        wait_until(lambda: tiers.counters()["held"]["waiting_blocks"] == 16, WAIT_S)
        assert tiers.counters()["held"]["jobs_in_flight"] == 1
        gate.open()
        wait_until(lambda: len(reports) == 5, WAIT_S)
        assert reports == [[True] * 4] * 5
        counted = tiers.counters()["held"]
        assert (count_of(counted, "stored_blocks_total"), count_of(counted, "skipped_blocks_total")) == (20, 0)


def test_blocks_that_wait_too_long_for_a_budget_fail(
    pool: Any, register: Register, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("late", lambda tier: loads_late(tier, gate))
    entry: dict[str, object] = {"type": "late", "load_budget": 2 * BLOCK_BYTES, **PATIENT}
    with open_direct(pool, entry) as tiers:
        keys = make_keys(3)
        assert tiers.wait("store", keys, offsets(3)) == [True] * 3
        gate.close()
        loaded: list[bool] = []
        tiers.load(keys[:2], offsets(2), loaded.extend)
        wait_until(lambda: gate.waiting > 0)
        monkeypatch.setattr(tiers, "_wait_s_max", 0.05)  # only now: those before must not fail on a busy machine
        assert tiers.wait("load", keys[2:], offsets(1, 2 * BLOCK_BYTES)) == [False]
        gate.open()
    assert loaded == [True, True]


def test_a_callback_that_raises_ends_nothing(pool: Any) -> None:
    def fail(_: list[bool]) -> None:
        raise SystemExit("a host's mistake")

    with open_direct(pool, MEMORY) as tiers:
        tiers.store(make_keys(1), [0], fail)
        tiers.contains([], fail)
        wait_until(lambda: tiers.counters()[""]["callback_errors_total"] == 2, WAIT_S)
        assert tiers.wait("contains", make_keys(1)) == [True]


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, math.inf])
def test_a_wait_with_any_limit_says_how_the_task_has_ended_or_that_it_has_not(
    open_held: OpenHeld, gate: Gate, timeout_s: float
) -> None:
    gate.close()
    with open_held() as tiers, ThreadPoolExecutor(1) as waiter:
        answers = waiter.submit(tiers.wait, "store", make_keys(1), offsets(1), timeout_s=timeout_s)
        if timeout_s != math.inf:
            with pytest.raises(TimeoutError, match="has not ended"):
                answers.result(WAIT_S)
        gate.open()
        if timeout_s == math.inf:
            assert answers.result(WAIT_S) == [True]


def test_a_callback_may_call_but_not_wait(pool: Any) -> None:
    reports: list[Any] = []
    with open_direct(pool, MEMORY) as tiers:

        def go_on(answers: list[bool]) -> None:
            with pytest.raises(RuntimeError, match="cannot wait"):
                tiers.wait("contains", [])
            tiers.load(make_keys(2), offsets(2, TARGET), reports.append)

        tiers.store(make_keys(2), offsets(2), go_on)
        wait_until(lambda: reports, WAIT_S)
        assert reports == [[True] * 2]


def test_a_task_without_keys_is_answered(pool: Any) -> None:
    with open_direct(pool, MEMORY) as tiers:
        assert tiers.wait("contains", []) == tiers.wait("store", [], []) == tiers.wait("load", [], []) == []


# Faults.


def test_an_expired_load_is_reported_only_when_its_worker_has_ended(pool: Any, register: Register, gate: Gate) -> None:
    reports, key = list[Any](), make_keys(1)

    def holding(inner: MemoryTier) -> MemoryTier:
        token = PART_EPOCH.set(inner.epoch)  # as a worker does
        assert inner.store_blocks(key, [memoryview(pool)[:BLOCK_BYTES]]).successful_keys == key
        PART_EPOCH.reset(token)
        return inner

    # They have the block: on a busy machine a store expires too, and its tier is asked for nothing then.
    register("late", lambda inner: loads_late(holding(inner), gate))
    register("other", holding)
    gate.close()
    # Time enough for a worker to begin: a job that begins after its deadline fails at once, and does not expire.
    late = {**PATIENT, "type": "late", "job_timeout": "500 ms"}
    with open_direct(pool, late, {"type": "other", **PATIENT}) as tiers:
        tiers.load(key, [BLOCK_BYTES], reports.append)
        wait_until(lambda: tiers.counters()["late"]["expired_jobs_total"] > 0, WAIT_S)
        assert tiers.wait("contains", key) == [True], "other calls are served"
        assert not reports, "a worker may still write"
        gate.open()
        wait_until(lambda: reports, WAIT_S)
        assert reports == [[True]]
        assert content(pool, 0) == content(pool, BLOCK_BYTES)
        pool[BLOCK_BYTES : 2 * BLOCK_BYTES] = 7
    assert (pool[BLOCK_BYTES : 2 * BLOCK_BYTES] == 7).all(), "nothing is written after the report"


@pytest.mark.parametrize("mute", [HangingTier, HeldJobsTier], ids=["hangs", "never knows"])
def test_a_lookup_without_an_answer_is_a_miss_there(pool: Any, register: Register, gate: Gate, mute: Any) -> None:
    how = {"calls": ("lookup",)} if mute is HangingTier else {"hold_lookups": True}
    register("mute", lambda inner: mute(inner, gate, **how))
    with open_direct(pool, {"type": "mute", "lookup_timeout": "50 ms"}, MEMORY) as tiers:
        assert tiers.wait("store", make_keys(2), offsets(2)) == [True] * 2
        gate.close()
        assert tiers.wait("contains", make_keys(3), timeout_s=WAIT_S) == [True, True, False]
        gate.open()


@pytest.mark.parametrize("lie", [lie for lie in DETECTABLE if lie is not Lie.REPORTS_NOTHING])
def test_lies_cost_hits_and_no_wrong_bytes(pool: Any, register: Register, lie: Lie) -> None:
    liars: list[LyingTier] = []

    def wrap(inner: Any) -> LyingTier:
        liars.append(LyingTier(inner, lie))
        return liars[0]

    register("lying", wrap)
    keys, sources, targets = make_keys(4), offsets(4), offsets(4, TARGET)
    with open_direct(pool, {"type": "lying", **PATIENT}) as tiers:
        assert len(tiers.wait("contains", keys)) == 4
        tiers.wait("store", keys, sources)
        liars[0].lying = False
        loaded = tiers.wait("load", keys, targets)
    for source, target, is_loaded in zip(sources, targets, loaded, strict=True):
        assert not is_loaded or content(pool, source) == content(pool, target)


def test_a_task_that_does_not_end_in_time_continues(pool: Any, open_held: OpenHeld, gate: Gate) -> None:
    blocks = len(pool) // BLOCK_BYTES  # the whole memory: by default the budget is as large
    gate.close()
    with open_held() as tiers:
        with pytest.raises(TimeoutError, match=f"store of {blocks} blocks"):
            tiers.wait("store", make_keys(blocks), offsets(blocks), timeout_s=0.01)
        wait_until(lambda: tiers.counters()["held"]["jobs_in_flight"] == 1, WAIT_S)
        assert tiers.counters()["held"]["waiting_blocks"] == 0
        gate.open()
        wait_until(lambda: tiers.wait("contains", make_keys(blocks)) == [True] * blocks, WAIT_S)


# Closing.


def test_close_waits_for_transfers_and_fails_what_waits(open_held: OpenHeld, gate: Gate) -> None:
    reports: list[Any] = []
    gate.close()
    tiers = open_held(store_budget=2 * BLOCK_BYTES)
    tiers.store(make_keys(4), offsets(4), reports.append)
    wait_until(lambda: tiers.counters()["held"]["waiting_blocks"] == 2, WAIT_S)
    with ThreadPoolExecutor(1) as closer:
        closing = closer.submit(tiers.close, WAIT_S)
        wait_until(lambda: tiers.counters()["held"]["waiting_blocks"] == 0, WAIT_S)
        gate.open()
        assert closing.result(WAIT_S)
    assert reports == [[True, True, False, False]]
    with pytest.raises(ShutdownError, match="closed"):
        tiers.contains(make_keys(1), reports.append)
    assert tiers.close()


@pytest.mark.parametrize("is_isolated", [False, True], ids=["workers", "isolated"])
def test_a_load_that_hangs_at_close_is_reported_when_it_ends(
    pool: Any, register: Register, gate: Gate, is_isolated: bool
) -> None:
    """Also if the tier below, which has been closed meanwhile, could load it."""
    reports, key = list[Any](), make_keys(1)

    def wrap(inner: MemoryTier) -> Any:
        loads_late(inner, gate)
        return HangingTier(inner, Gate()) if is_isolated else inner

    register("late", wrap)
    register("below", lambda inner: HangingTier(inner, Gate()))
    tiers = open_direct(pool, {"type": "late", **PATIENT}, {"type": "below", **PATIENT})
    assert tiers.wait("store", key, [0]) == [True]
    gate.close()
    tiers.load(key + make_keys(1, "absent"), offsets(2, TARGET), reports.append)
    wait_until(lambda: gate.waiting, WAIT_S)
    assert not tiers.close(0.0)
    assert not reports, "the memory is still in use"
    gate.open()
    wait_until(lambda: tiers.close(), WAIT_S)
    assert reports == [[True, False]]


# Arguments.


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("contains", ([b"abc"],), "a key is a block hash"),
        ("contains", (["a text"],), "a key is a block hash"),
        ("store", (make_keys(2), [0]), "2 keys need as many integer offsets"),
        ("store", (make_keys(1), [0.5]), "integer offsets"),
        ("store", (make_keys(1), [-1]), "blocks begin at 0 to 1044480 here; found -1 to -1"),
        ("load", (make_keys(1), [(1 << 20) - BLOCK_BYTES + 1]), "blocks begin at 0 to"),
        ("load", (make_keys(2), [0, BLOCK_BYTES - 1]), "must not overlap"),
    ],
)
def test_wrong_arguments_are_refused_at_once(pool: Any, method: Any, arguments: Any, message: str) -> None:
    with open_direct(pool, MEMORY) as tiers, pytest.raises(ValueError, match=message):
        tiers.wait(method, *arguments)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (b"read only" * 1000, "writable"),
        ("a text", "must be a buffer"),
        (np.zeros((100, 100), dtype=np.uint8)[:, :50], "contiguous"),
        (bytearray(100), "a block of 4096 bytes does not fit into memory of 100 bytes"),
    ],
)
def test_memory_that_cannot_be_used_is_refused(pool: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        open_direct(pool, MEMORY)


def test_tiers_that_cannot_be_used_are_refused(pool: Any, register: Register) -> None:
    register("rows", lambda inner: FourMethodTier(None, inner._primary_kv_view, "rows"))
    with pytest.raises(ConfigError, match="tier 'rows' cannot be used over a caller's memory"):
        open_direct(pool, MEMORY, {"type": "rows"})
    with pytest.raises(ValueError, match="each its own name"):
        open_direct(pool, MEMORY, MEMORY)
    with pytest.raises(ValueError, match="at least one tier"):
        open_direct(pool)
