"""The table and the history: bounded, forgetful, and never wrong about a block that was not overwritten."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.metrics.history import ledger as ledger_module
from tiered_kv.metrics.history.fates import CHUNK_KEYS_MAX, TICKS_PER_S, FateTable, hashes
from tiered_kv.metrics.history.ledger import CPU, RequestLog
from tiered_kv.metrics.history.recorder import PENDING_BATCHES_MAX, PENDING_KEYS_MAX, BlockHistory
from tiered_kv.reasons import Fate, Reason
from tiered_kv.stack.open import Stack
from tiered_kv.testing.control import ManualClock
from tiered_kv.testing.rig import make_keys

NAMES = ("cpu", "disk")
A_TICK_S = 1 / TICKS_PER_S


@pytest.fixture
def history(clock: ManualClock) -> Iterator[BlockHistory]:
    history = BlockHistory(1 << 16, NAMES, [None, 10.0], clock)
    yield history
    history.close()


def ask(history: BlockHistory, keys: list[OffloadKey], req_id: str = "r", because: bytes = b"") -> None:
    """Note a request that misses these blocks in all tiers."""
    log = RequestLog(req_id, history._clock())
    history.missed(log, because, keys)
    history.ended(log)
    history.settle()


def fill(history: BlockHistory) -> None:
    """Let as many batches wait as may; the history's thread has to have ended."""
    for _ in range(PENDING_BATCHES_MAX + 1):
        history.stored([])


def misses(history: BlockHistory, tier: int) -> dict[str, int]:
    history.settle()
    return history.snapshot()[tier].get("misses_total", {})


@pytest.mark.parametrize("entries", [1, 64, 1000, 1 << 16])
def test_a_table_knows_what_was_not_overwritten_and_invents_nothing(entries: int) -> None:
    """Fingerprints have 32 bits; the keys are fixed, and none of them agree."""
    table, choose = FateTable(entries), random.Random(1)
    keys = make_keys(600)
    truth: dict[tuple[OffloadKey, int], tuple[Fate, int]] = {}
    for tick in range(2000):
        key, tier, fate = choose.choice(keys[:300]), choose.randrange(3), Fate(choose.randrange(1, 16))
        table.write(hashes([key]), tier, fate, tick)
        truth[key, tier] = fate, tick
    known = 0
    for tier in range(3):
        fates, ticks = table.read(hashes(keys), tier)
        for key, fate, tick in zip(keys, fates.tolist(), ticks.tolist(), strict=True):
            if fate != Fate.UNKNOWN:
                assert truth.get((key, tier)) == (fate, tick)
                known += 1
    assert known <= min(entries, len(truth))
    assert known >= min(entries, len(truth)) // 2


def test_times_and_ages(history: BlockHistory, clock: ManualClock) -> None:
    (key,) = make_keys(1)
    history.note(1, Fate.STORED, [key])
    clock.advance(9)
    ((in_cpu, _), (on_disk, age_s)) = history.fates([key])[0]
    assert (in_cpu, on_disk) == (Fate.UNKNOWN, Fate.STORED)
    assert age_s == pytest.approx(9, abs=A_TICK_S)
    ask(history, [key])
    assert misses(history, 1) == {"evicted": 1}
    history.note(1, Fate.STORED, [key])
    clock.advance(11)
    ask(history, [key])
    assert misses(history, 1) == {"evicted": 1, "expired": 1}
    clock.advance(100)
    on_disk, age_s = history.fates([key])[0][1]
    assert on_disk is Fate.EXPIRED
    assert age_s == pytest.approx(100, abs=A_TICK_S), "since it was found to be gone"


def test_a_reset_separates_blocks_of_one_moment(history: BlockHistory) -> None:
    keys = make_keys(3)
    for number in range(20):
        history.note(1, Fate.STORED, keys[:2])
        history.reset(1)
        history.note(1, Fate.STORED, keys[1:2])
        assert [fates[1][0] for fates in history.fates(keys)] == [Fate.RESET, Fate.STORED, Fate.UNKNOWN], number


def test_a_reset_is_noted_however_much_waits(history: BlockHistory) -> None:
    keys = make_keys(2)
    history.close()
    history.note(1, Fate.STORED, keys)
    fill(history)
    history.reset(1)
    history.settle()
    ask(history, keys)
    assert misses(history, 1) == {"reset": 2}


def test_a_skipped_store_does_not_hide_a_stored_block_but_one_from_before_a_reset(history: BlockHistory) -> None:
    (key,) = make_keys(1)
    history.note(1, Fate.STORED, [key])
    history.note(1, Fate.BUDGET, [key])
    assert history.fates([key])[0][1][0] is Fate.STORED
    history.reset(1)
    history.note(1, Fate.BUDGET, [key])
    assert history.fates([key])[0][1][0] is Fate.BUDGET


def test_what_comes_too_fast_is_counted_and_bounds_memory(history: BlockHistory) -> None:
    history.close()  # its thread takes nothing
    keys = make_keys(1024)
    for _ in range(2 * PENDING_KEYS_MAX // len(keys)):
        history.note(CPU, Fate.EVICTED, keys)
    assert len(history._pending) <= PENDING_KEYS_MAX // len(keys) + 1
    assert history.dropped_blocks == 0, "no request has asked for one"
    log = RequestLog("r", 0.0)
    history.missed(log, b"", keys)
    history.loaded(log, keys, {})
    assert history.dropped_blocks == 2 * len(keys)
    for _ in range(3 * PENDING_BATCHES_MAX):
        history.ended(RequestLog("r", 0.0))
    assert len(history._pending) <= PENDING_BATCHES_MAX + 1
    history.settle()
    assert not history._pending
    ask(history, keys)
    assert sum(misses(history, CPU).values()) == len(keys), "it goes on"


def test_a_reader_that_is_interrupted_loses_one_chunk(history: BlockHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    miss, interrupts = history._ledger.miss, iter([KeyboardInterrupt])

    def interrupted(*arguments: Any) -> None:  # Any: as `miss` takes
        for interrupt in interrupts:
            raise interrupt
        miss(*arguments)

    history.close()  # its thread takes nothing
    log = RequestLog("r", 0.0)
    monkeypatch.setattr(history._ledger, "miss", interrupted)
    history.missed(log, b"", make_keys(1000))
    history.ended(log)
    with pytest.raises(KeyboardInterrupt):
        history.requests()
    assert misses(history, CPU) == {"absent": 1000 - CHUNK_KEYS_MAX}


@pytest.fixture
def unfinished_bytes_max(monkeypatch: pytest.MonkeyPatch) -> int:
    """What is remembered of requests that have not ended: little, since 16 MiB take seconds to fill."""
    monkeypatch.setattr(ledger_module, "UNFINISHED_BYTES_MAX", 64 << 10)
    return ledger_module.UNFINISHED_BYTES_MAX


def test_what_is_remembered_of_requests_that_do_not_end_is_bounded(
    history: BlockHistory, unfinished_bytes_max: int
) -> None:
    logs = [RequestLog(str(number), 0.0) for number in range(100)]
    for number, log in enumerate(logs):
        history.missed(log, b"", make_keys(100, str(number)))
    for log in logs:
        history.ended(log)
    remembered = misses(history, CPU)["absent"] // 100
    assert 30 < remembered <= unfinished_bytes_max // (100 * (8 + len(NAMES)))
    assert misses(history, CPU) == {"absent": remembered * 100}
    assert history.dropped_blocks == (100 - remembered) * 100, "those that asked first are forgotten"
    assert [request.req_id for request in history.requests()] == [str(number) for number in range(100)][-remembered:]


@pytest.mark.usefixtures("unfinished_bytes_max")
def test_a_request_whose_end_found_no_room_is_counted_once_when_it_is_forgotten(history: BlockHistory) -> None:
    history.close()  # its thread takes nothing
    log = RequestLog("r", 0.0)
    history.missed(log, b"", make_keys(6))
    history.settle()
    fill(history)
    history.ended(log)
    history.settle()
    for number in range(10):
        history.missed(RequestLog(str(number), 0.0), b"", make_keys(1000))
    assert misses(history, CPU) == {}
    assert history.dropped_blocks % 1000 == 6


@pytest.mark.usefixtures("unfinished_bytes_max")
def test_a_request_that_alone_asks_for_too_much_is_forgotten_too(history: BlockHistory) -> None:
    ask(history, make_keys(10_000))
    counted = sum(misses(history, CPU).values())
    assert 0 < counted < 10_000
    assert counted + history.dropped_blocks == 10_000


@pytest.mark.usefixtures("unfinished_bytes_max")
def test_a_request_that_asks_for_the_same_blocks_for_ever_takes_no_more_memory(history: BlockHistory) -> None:
    """Two hundred times, they would be 400 kB."""
    log, keys = RequestLog("r", 0.0), make_keys(200)
    for number in range(200):
        history.missed(log, b"", keys[number % 2 :])
        history.loaded(log, keys[:1], {})
    history.ended(log)
    assert misses(history, CPU) == {"absent": 199}
    assert history.dropped_blocks == 0
    assert history.snapshot()[CPU]["blocks_total"] == {"hit": 1, "miss": 199}


def test_only_the_last_requests_are_kept(history: BlockHistory) -> None:
    for number in range(1050):
        ask(history, make_keys(1), f"r-{number}")
    requests = history.requests()
    assert [request.req_id for request in requests] == [f"r-{number}" for number in range(1050 - 1024, 1050)]
    assert requests[-1].misses == {"cpu": {"absent": 1}, "disk": {"absent": 1}}
    assert requests[-1].first_missed == make_keys(1)[0]


def test_why_a_tier_was_not_asked_holds_for_its_keys_only(history: BlockHistory) -> None:
    keys = make_keys(4)
    log = RequestLog("r", history._clock())
    history.missed(log, b"", keys[:2])
    history.missed(log, bytes([0, Fate.BREAKER]), keys)
    log.failed(keys[0], 1, Reason.CHECKSUM)
    history.ended(log)
    assert misses(history, 1) == {"absent": 1, "breaker": 2, "corrupt": 1}
    assert misses(history, CPU) == {"absent": 4}


def test_an_unexpected_error_costs_its_keys_and_neither_the_thread_nor_a_reader(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(ledger_module.Ledger, "store", fail)
    history = BlockHistory(1 << 16, NAMES, [None, 10.0], clock)
    for _ in range(3):
        history.stored(make_keys(4))
    history.settle()
    assert history._thread is not None
    assert history._thread.is_alive()
    history.note(1, Fate.STORED, make_keys(1))
    assert [fate for fate, _ in history.fates(make_keys(1))[0]] == [Fate.UNKNOWN, Fate.STORED]
    history.close()
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_without_a_thread_the_queue_is_taken_when_its_caller_is_idle_and_else_above_half(clock: ManualClock) -> None:
    history, keys = BlockHistory(1 << 16, NAMES, [None, 10.0], clock, has_thread=False), make_keys(CHUNK_KEYS_MAX)
    history.note(1, Fate.STORED, keys)
    history.work(is_idle=False)
    assert history.has_work
    history.work(is_idle=True)
    assert not history.has_work
    chunks = PENDING_KEYS_MAX // CHUNK_KEYS_MAX
    for _ in range(chunks):
        history.stored(keys)
    for _ in range(chunks):
        history.work(is_idle=False)
    assert len(history._pending) == chunks // 2
    history.close()


def test_a_stack_that_closes_does_not_wait_for_a_long_queue(stack: Stack) -> None:
    assert stack.history is not None
    stack.history.close()  # its thread takes no more
    fill(stack.history)
    stack.close()
    assert stack.history.has_work
