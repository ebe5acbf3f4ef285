"""Tiers that fail, are late, raise exceptions or report invalid results, below the tiering manager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tiering.conftest import BLOCK_BYTES, Bench, MakeBench, keys
from tiered_kv.base import ReqContext
from tiered_kv.tiering.base import JobResult


def test_a_failed_load_is_a_miss_for_its_request_and_no_loop(bench: Bench) -> None:
    context = bench.promote(1)
    bench.end(success=False, reason="io_error")
    assert bench.lookup(keys(1), context) == [False]
    assert bench.free == bench.num_blocks
    assert bench.counter("failed_blocks_total", "load", "io_error") == 1
    assert bench.lookup(keys(1), bench.request("b")) == [None], "another request may try again"
    assert bench.lookup(keys(1), context) == [False], "the other's promotion comes from the same tier"


def test_a_load_that_fails_on_one_block_keeps_the_others(bench: Bench) -> None:
    context = bench.promote(1, 2, 3)
    bench.end(success=False, only=[*keys(1, 3), *keys(99)], reason="checksum")
    assert bench.lookup(keys(1, 2, 3), context) == [True, False, True]
    assert bench.counter("failed_blocks_total", "load", "checksum") == 1
    assert bench.counter("loaded_blocks_total") == 2


def test_a_block_that_one_tier_fails_on_is_asked_of_the_next(make_bench: MakeBench) -> None:
    bench = make_bench({}, {})
    bench.tiers[1].has(1)
    context = bench.promote(1)
    bench.end(success=False)
    assert bench.lookup(keys(1), context) == [None]
    bench.step()
    bench.end()
    assert bench.lookup(keys(1), context) == [True]
    assert bench.manager.hit_tier(keys(1)[0], context) == "tier1"


def test_a_load_budget_full_of_wedged_loads_is_a_miss_at_once(make_bench: MakeBench) -> None:
    bench = make_bench({"load_budget": 2 * BLOCK_BYTES, "job_timeout": 1})
    bench.promote(1, 2)
    bench.clock.advance(1)
    bench.step()
    bench.tier.has(1, 2, 3)
    assert bench.lookup(keys(3), bench.request("b")) == [False]
    bench.end()
    assert bench.lookup(keys(3), bench.request("c")) == [None], "the tier has let go"


def test_the_breaker_opens_closes_and_lets_one_probe_through(make_bench: MakeBench) -> None:
    bench = make_bench({"breaker_failures": 2, "breaker_cooldown": 5}, num_blocks=16)
    for number in range(2):
        bench.store(keys(number), bench.request("a"))
        bench.end(success=False, reason="io_error")
    bench.tier.has(50)
    assert bench.lookup(keys(50), bench.request("b")) == [False]
    bench.store(keys(10), bench.request("b"))
    assert not bench.jobs
    assert bench.counter("skipped_blocks_total", "breaker") == 1
    bench.clock.advance(5)
    bench.step()
    bench.store(keys(11), bench.request("c"))
    bench.store(keys(12), bench.request("c"))
    assert bench.jobs == [keys(11)], "one probe at a time"
    bench.end()
    bench.store(keys(13), bench.request("c"))
    assert len(bench.jobs) == 1
    assert bench.lookup(keys(50), bench.request("d")) == [None]
    assert bench.counter("breaker_opened_total") == 1


def test_lookups_that_a_tier_itself_gives_up_open_its_breaker(make_bench: MakeBench) -> None:
    bench = make_bench({"breaker_failures": 2})
    for _ in range(2):
        assert bench.counter("breaker_opened_total") == 0
        bench.tier.lookup_failures += 10  # one probe of many keys
        bench.step()
    assert bench.counter("breaker_opened_total") == 1
    bench.step()
    assert bench.counter("breaker_opened_total") == 1


@pytest.mark.parametrize("method", ["lookup", "submit_load", "submit_store", "get_finished"])
def test_a_tier_that_raises_costs_hits_and_nothing_else(
    bench: Bench, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.tier.raises = method
    bench.tier.has(50)
    for number in range(3):
        context = bench.request(f"r{number}")
        bench.store(keys(number), context)
        bench.lookup(keys(50), context)
        bench.step()
        bench.manager.on_request_finished(context)
    assert bench.lookup(keys(0, 1, 2), bench.request("last")) == [True] * 3
    assert bench.counter("exceptions_total") >= 3
    assert len([record for record in caplog.records if record.exc_info]) == 1, "a broken tier does not flood the log"


@pytest.mark.parametrize("job_id", [12345, [1], "the job itself"])
def test_an_unknown_result_is_counted_and_hides_no_other(bench: Bench, job_id: Any) -> None:
    bench.store(keys(1), bench.request("a"))
    bench.tier.results.append(JobResult(job_id, True))
    job = bench.tier.end()
    if job_id == "the job itself":
        bench.tier.results[0] = JobResult(job.job_id, True)
    bench.step()
    assert bench.counter("unknown_results_total") == 1
    assert bench.manager.jobs_in_flight == 0
    assert len(bench.primary.policy) == 1


@pytest.mark.parametrize("nonsense", [{"successful_keys": 5}, {"successful_keys": [[1]]}, {"success": np.zeros(2)}])
def test_an_invalid_result_fails_its_job_and_hides_no_other(bench: Bench, nonsense: Any) -> None:
    bench.tier.has(1, 2)
    for number, key in enumerate(keys(1, 2)):
        bench.lookup([key], bench.request(f"r{number}"))
        bench.step()
    first = bench.tier.jobs.pop(0)
    bench.tier.results.append(JobResult(first.job_id, **{"success": False, **nonsense}))
    bench.end()
    assert bench.manager.jobs_in_flight == 0
    assert bench.counter("failed_blocks_total", "load", "nonsense") == 1
    assert bench.counter("loaded_blocks_total") == 1


# Reset, drain, shutdown.


def test_drain_waits_for_jobs_and_says_when_they_do_not_end(bench: Bench) -> None:
    bench.store(keys(1), bench.request("a"))
    assert not bench.manager.drain_jobs(timeout_s=0)
    bench.tier.end()
    assert bench.manager.drain_jobs(timeout_s=1)
    assert bench.manager.jobs_in_flight == 0


def test_shutdown_keeps_the_memory_that_a_tier_may_still_write_to(bench: Bench) -> None:
    bench.promote(1)
    (job,) = bench.tier.jobs
    bench.manager.shutdown(timeout_s=0)
    bench.manager.shutdown(timeout_s=0)
    bench.region.flat[int(job.block_ids[0]) * BLOCK_BYTES] = 1  # a released view would raise
    assert bench.lookup(keys(1), ReqContext("b")) == [False]
    bench.region.close()


def test_a_promotion_that_ends_while_the_tiers_are_closed_is_passed_on_to_none(make_bench: MakeBench) -> None:
    bench = make_bench({"fill_on_promotion": True}, {})
    bench.promote(1, tier=1)
    bench.tiers[1].end()
    bench.manager.shutdown(timeout_s=0)
    assert bench.jobs == []
    assert bench.manager.jobs_in_flight == 0
