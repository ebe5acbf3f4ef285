"""Tiers made of blocking calls: well-behaved authors, and authors that hang, raise, lie or answer late."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import TierUnavailableError
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.base import JobMetadata, JobResult, TierSpec
from tiered_kv.toolkit import BlockingTier, Outcome

BLOCK_BYTES = 64
NUM_BLOCKS = 64
PATIENCE_S = 60.0
"""How long what must happen may take. It is there to end a test that fails, and so generous."""


class DictTier(BlockingTier):
    """Keeps blocks in a dictionary; `before` runs at the start of every author's method."""

    before: Callable[[str, Sequence[OffloadKey]], object] | None = None
    parts: list[tuple[str, int]]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.kept: dict[OffloadKey, bytes] = {}
        self.parts = []
        self.closed = threading.Event()

    def _enter(self, operation: str, keys: Sequence[OffloadKey]) -> None:
        self.parts.append((operation, len(keys)))
        if self.before is not None:
            self.before(operation, keys)

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        self._enter("store", keys)
        self.kept.update((key, bytes(block)) for key, block in zip(keys, blocks, strict=True))
        return Outcome()

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        self._enter("load", keys)
        found = [key for key in keys if key in self.kept]
        for key, block in zip(keys, blocks, strict=True):
            if key in self.kept:
                block[:] = self.kept[key]
        return Outcome(found, "absent")

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self._enter("lookup", keys)
        return [key in self.kept for key in keys]

    def close(self) -> None:
        self.closed.set()


class Bench:
    """A region, and the tiers opened over it."""

    def __init__(self) -> None:
        self.region = np.arange(NUM_BLOCKS * BLOCK_BYTES, dtype=np.int64).astype(np.uint8)
        self.rows = self.region.reshape(NUM_BLOCKS, BLOCK_BYTES)
        self.rows[:, 0] = np.arange(NUM_BLOCKS)
        self.tiers: list[DictTier] = []
        self.gates: list[threading.Event] = []
        self._next_job_id = 0

    def tier(self, cls: type[DictTier] = DictTier, *, part_blocks: int = 4, **settings: Any) -> DictTier:
        patient = {"lookup_timeout_s": PATIENCE_S, "shutdown_timeout_s": PATIENCE_S, "threads": 2}
        part_bytes = part_blocks * BLOCK_BYTES
        spec = TierSpec("bench", BLOCK_BYTES)
        self.tiers.append(cls(spec, self.rows.data, "dict", part_bytes=part_bytes, **{**patient, **settings}))
        return self.tiers[-1]

    def gate(self) -> threading.Event:
        """Return an event that is set, at the latest, when the test ends."""
        self.gates.append(threading.Event())
        return self.gates[-1]

    def job(self, rows: Sequence[int], *, load: bool = False, timeout_s: float | None = None) -> JobMetadata:
        self._next_job_id += 1
        return JobMetadata(
            self._next_job_id,
            [key_of(row) for row in rows],
            np.array(rows, dtype=np.int64),
            load,
            ReqContext("request"),
            None if timeout_s is None else time.monotonic() + timeout_s,
        )


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(16, "big"), 0)


def finish(tier: BlockingTier, jobs: int = 1) -> list[JobResult]:
    results: list[JobResult] = []

    def enough() -> bool:
        results.extend(tier.get_finished())
        return len(results) >= jobs

    wait_until(enough)
    return results


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for gate in bench.gates:
        gate.set()
    for tier in bench.tiers:
        tier.shutdown()
        for thread in tier._worker_threads:
            thread.join(PATIENCE_S)


def test_a_large_job_is_served_in_parts_by_several_threads_and_reported_once(bench: Bench) -> None:
    tier = bench.tier(threads=4, part_blocks=4)
    barrier = threading.Barrier(3)  # stores may use three of the four threads
    tier.before = lambda operation, keys: barrier.wait(PATIENCE_S)
    tier.submit_store(bench.job(range(12)))
    results = finish(tier)
    assert tier.parts == [("store", 4)] * 3
    assert len(results) == 1
    assert results[0].success
    assert tier.get_finished() == ()


def test_loads_go_before_stores_and_lookups_before_loads(bench: Bench) -> None:
    tier = bench.tier(threads=1, part_blocks=64)
    gate = bench.gate()
    tier.before = lambda operation, keys: gate.wait(PATIENCE_S)
    tier.submit_store(bench.job([0]))
    wait_until(lambda: tier.parts)
    tier.submit_store(bench.job([1]))
    tier.submit_load(bench.job([2], load=True))
    tier.lookup(key_of(3), ReqContext("request"))
    gate.set()
    finish(tier, 3)
    assert [operation for operation, _ in tier.parts] == ["store", "lookup", "load", "store"]


def test_stores_that_hang_leave_a_thread_for_loads(bench: Bench) -> None:
    tier = bench.tier(threads=3, part_blocks=1)
    tier.kept[key_of(9)] = bytes(BLOCK_BYTES)
    gate = bench.gate()
    tier.before = lambda operation, keys: operation != "store" or gate.wait(PATIENCE_S)
    tier.submit_store(bench.job(range(8)))
    tier.submit_load(bench.job([9], load=True))
    assert finish(tier)[0].success
    assert not gate.is_set()
    gate.set()
    assert finish(tier)[0].success
    assert len(tier.kept) == 9


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("author's bug"), "error"),
        (OSError(errno.ENOSPC, "full"), "no_space"),
        (OSError(errno.EIO, "broken"), "io_error"),
        (TimeoutError(), "timeout"),
        (TierUnavailableError("down"), "unavailable"),
        (SystemExit(), "error"),
    ],
)
def test_an_exception_fails_the_part_and_the_tier_works_on(bench: Bench, error: BaseException, reason: str) -> None:
    tier = bench.tier(part_blocks=4)

    def fail_second_part(operation: str, keys: Sequence[OffloadKey]) -> None:
        if key_of(4) in keys:
            raise error

    tier.before = fail_second_part
    tier.submit_store(bench.job(range(12)))
    (result,) = finish(tier)
    assert not result.success
    assert result.reason == reason
    assert list(result.successful_keys or ()) == [key_of(row) for row in (0, 1, 2, 3, 8, 9, 10, 11)]
    tier.before = None
    tier.submit_store(bench.job(range(12)))
    assert finish(tier)[0].success


class LyingTier(DictTier):
    """Answers with what it was not asked for."""

    returned: object = None

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self.returned  # type: ignore[return-value]  # the point of the test

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return self.returned  # type: ignore[return-value]  # the point of the test


@pytest.mark.parametrize(
    "returned",
    [None, True, Outcome([key_of(63)]), Outcome(42), Outcome([{}])],  # type: ignore[arg-type, list-item]
)
def test_wrong_outcomes_are_failures(bench: Bench, returned: object) -> None:
    tier = bench.tier(LyingTier)
    assert isinstance(tier, LyingTier)
    tier.returned = returned
    tier.submit_load(bench.job([0], load=True))
    (result,) = finish(tier)
    assert not result.success
    assert not result.successful_keys


@pytest.mark.parametrize("returned", [None, [], [True, True], 1, {"a": True}])
def test_wrong_answers_are_misses(bench: Bench, returned: object) -> None:
    tier = bench.tier(LyingTier)
    assert isinstance(tier, LyingTier)
    tier.returned = returned
    wait_until(lambda: tier.lookup(key_of(0), ReqContext("request")) is not None)
    assert tier.lookup(key_of(0), ReqContext("request")) is False


def test_a_store_cannot_write_into_the_primary_blocks(bench: Bench) -> None:
    class Scribbler(DictTier):
        def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
            blocks[0][0] = 255
            return Outcome()

    tier = bench.tier(Scribbler)
    tier.submit_store(bench.job([0]))
    assert not finish(tier)[0].success
    assert bench.rows[0, 0] == 0


def test_queued_jobs_expire_though_every_thread_hangs(bench: Bench, clock: ManualClock) -> None:
    tier = bench.tier(threads=2, part_blocks=1)
    tier._clock = clock
    gate = bench.gate()
    tier.before = lambda operation, keys: gate.wait(PATIENCE_S)
    hanging = bench.job(range(4), load=True, timeout_s=1000.0)
    tier.submit_load(hanging)
    wait_until(lambda: len(tier.parts) == 2)
    queued = bench.job([5], load=True, timeout_s=1000.0)
    tier.submit_load(queued)
    clock.advance(2000.0)
    (result,) = finish(tier)
    assert (result.job_id, result.success, result.reason) == (queued.job_id, False, "expired")
    # The hanging job is not reported while a thread may still write into its blocks.
    assert not tier.get_finished()
    gate.set()
    (result,) = finish(tier)
    assert (result.job_id, result.success, result.reason) == (hanging.job_id, False, "expired")
    assert len(tier.parts) == 2


def test_a_job_that_ends_late_is_reported_when_it_ends_and_as_it_ended(bench: Bench, clock: ManualClock) -> None:
    tier = bench.tier()
    tier._clock = clock
    tier.submit_store(bench.job([0]))
    finish(tier)
    gate = bench.gate()
    tier.before = lambda operation, keys: gate.wait(PATIENCE_S)
    tier.submit_load(bench.job([0], load=True, timeout_s=1000.0))
    wait_until(lambda: len(tier.parts) == 2)
    clock.advance(2000.0)
    assert tier.get_finished() == ()
    gate.set()
    assert finish(tier)[0].success


def test_a_lookup_that_hangs_is_a_miss_and_the_next_is_served(bench: Bench) -> None:
    tier = bench.tier(threads=2, lookup_timeout_s=0.5)
    tier.submit_store(bench.job([0]))
    finish(tier)
    gate = bench.gate()
    tier.before = lambda operation, keys: key_of(1) not in keys or gate.wait(PATIENCE_S)
    wait_until(lambda: tier.lookup(key_of(1), ReqContext("a")) is not None)
    assert tier.lookup(key_of(1), ReqContext("a")) is False
    assert tier.lookup_failures == 1

    def is_found() -> bool:
        tier.on_request_finished(ReqContext("b"))
        wait_until(lambda: tier.lookup(key_of(0), ReqContext("b")) is not None)
        return tier.lookup(key_of(0), ReqContext("b")) is True

    wait_until(is_found)


def test_a_lookup_has_its_own_deadline_and_not_that_of_the_job_before_it(bench: Bench) -> None:
    tier = bench.tier(threads=1, lookup_timeout_s=PATIENCE_S)
    left_s: list[float] = []
    tier.before = lambda operation, keys: left_s.append(tier.part_deadline - time.monotonic())
    tier.submit_store(bench.job([0], timeout_s=1000.0))
    finish(tier)
    wait_until(lambda: tier.lookup(key_of(0), ReqContext("request")))
    assert left_s[0] > PATIENCE_S
    assert 0.0 < left_s[1] <= PATIENCE_S


def test_a_thread_for_lookups_answers_while_every_other_thread_transfers(bench: Bench) -> None:
    tier = bench.tier(threads=2, part_blocks=1, lookup_thread=True)
    gate = bench.gate()
    tier.before = lambda operation, keys: operation == "lookup" or gate.wait(PATIENCE_S)
    tier.submit_load(bench.job([0, 1, 2, 3], load=True))
    wait_until(lambda: len(tier.parts) == 2)
    wait_until(lambda: tier.lookup(key_of(0), ReqContext("request")) is not None)
    assert tier.parts == [("load", 1), ("load", 1), ("lookup", 1)], "a thread for lookups took a load"
    gate.set()
    finish(tier)
    tier.shutdown()
    assert len(tier._worker_threads) == 3
    assert not any(thread.is_alive() for thread in tier._worker_threads)


def test_a_failed_load_corrects_the_answer(bench: Bench) -> None:
    tier = bench.tier()
    tier.submit_store(bench.job([0]))
    finish(tier)
    context = ReqContext("request")
    wait_until(lambda: tier.lookup(key_of(0), context))
    del tier.kept[key_of(0)]
    tier.submit_load(bench.job([0], load=True))
    assert not finish(tier)[0].success
    assert tier.lookup(key_of(0), context) is False


def test_a_job_of_an_earlier_epoch_is_void(bench: Bench) -> None:
    tier = bench.tier(threads=1, part_blocks=1)
    gate = bench.gate()
    epochs: list[int] = []

    def note_epoch(operation: str, keys: Sequence[OffloadKey]) -> None:
        epochs.append(tier.part_epoch)
        gate.wait(PATIENCE_S)

    tier.before = note_epoch
    tier.submit_store(bench.job([0, 1]))
    wait_until(lambda: tier.parts)
    tier.begin_epoch()
    gate.set()
    (result,) = finish(tier)
    assert (result.success, result.reason, len(result.successful_keys or ())) == (False, "reset", 0)
    assert epochs == [0]
    tier.submit_store(bench.job([2]))
    assert finish(tier)[0].success
    assert epochs == [0, 1]


def test_shutdown_ends_the_threads_closes_once_and_reports_what_was_queued(bench: Bench) -> None:
    tier = bench.tier(threads=1, part_blocks=1)
    gate = bench.gate()
    tier.before = lambda operation, keys: gate.wait(PATIENCE_S)
    tier.submit_store(bench.job([0]))
    wait_until(lambda: tier.parts)
    tier.submit_store(bench.job([1]))

    def open_gate() -> None:
        wait_until(lambda: tier._job_results)  # shutdown has dropped what was queued
        gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    tier.shutdown()
    opener.join()
    assert tier.closed.is_set()
    assert not any(thread.is_alive() for thread in tier._worker_threads)
    assert [(result.success, result.reason) for result in finish(tier, 2)] == [(False, "shutdown"), (True, "")]
    tier.submit_store(bench.job([2]))
    assert finish(tier)[0].reason == "shutdown"
    tier.shutdown()


def test_shutdown_leaves_a_hung_thread_behind_and_closes_when_it_ends(bench: Bench) -> None:
    tier = bench.tier(threads=2, shutdown_timeout_s=0.05)
    gate = bench.gate()
    tier.before = lambda operation, keys: gate.wait(PATIENCE_S)
    tier.submit_store(bench.job([0]))
    wait_until(lambda: tier.parts)
    before = time.monotonic()
    tier.shutdown()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert not tier.closed.is_set()
    gate.set()
    assert tier.closed.wait(PATIENCE_S)


def test_a_tier_that_was_never_used_is_closed(bench: Bench) -> None:
    tier = bench.tier()
    tier.shutdown()
    assert tier.closed.is_set()


def test_only_the_first_error_of_a_kind_is_logged_and_without_its_text(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = bench.tier(part_blocks=1)

    def fail(operation: str, keys: Sequence[OffloadKey]) -> None:
        raise ConnectionError("redis://user:hunter2@host refused")

    tier.before = fail
    tier.submit_store(bench.job(range(8)))
    assert finish(tier)[0].reason == "io_error"
    (record,) = caplog.records
    assert "store_blocks raised ConnectionError" in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_an_author_cannot_hide_a_method_of_the_base_by_mistake() -> None:
    for name in ("_submit", "_wake"):
        with pytest.raises(TypeError, match=f"rename {name}"):
            type("Careless", (DictTier,), {name: None})


def test_a_view_of_another_shape_is_refused(bench: Bench) -> None:
    with pytest.raises(ValueError, match="num_blocks, block_bytes"):
        DictTier(None, bench.region.data, "dict")
    with pytest.raises(ValueError, match="at least 1"):
        DictTier(None, bench.rows.data, "dict", threads=0)
