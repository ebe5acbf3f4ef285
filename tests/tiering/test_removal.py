"""What becomes of jobs, lookups and requests when a tier is taken out below the manager."""

from __future__ import annotations

import pytest

from tests.tiering.conftest import JOB_TIMEOUT_S, LARGE_BUDGETS, Bench, MakeBench, ManualTier, keys
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.factory import SecondaryTierFactory


class Closable(ManualTier):
    """Counts its ends."""

    is_closed = False
    ended_requests = 0

    def on_request_finished(self, req_context: object) -> None:
        assert not self.is_closed
        self.ended_requests += 1

    def shutdown(self) -> None:
        self.is_closed = True


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(LARGE_BUDGETS, LARGE_BUDGETS, num_blocks=16, of_type=Closable)


def stage(bench: Bench) -> str:
    return bench.manager.removed_tiers().get("tier0", "")


def step_until(bench: Bench, wanted: str) -> None:
    def has_come() -> bool:
        bench.step()
        return stage(bench) == wanted

    wait_until(has_come)


def test_jobs_in_flight_end_before_the_tier_is_shut_down(bench: Bench) -> None:
    tier, context = bench.tier, bench.request("a")
    assert isinstance(tier, Closable)
    bench.store(keys(1, 2), context)
    bench.manager.removals.ask("drain", "tier0")
    for _ in range(5):
        bench.step()
    assert stage(bench) == "draining"
    assert not tier.is_closed
    bench.store(keys(3), context)
    assert [list(job.keys) for job in tier.jobs] == [keys(1, 2)], "no new job goes to it"
    assert bench.counter("skipped_blocks_total", "drained") == 1
    tier.end()
    step_until(bench, "drained")
    assert tier.is_closed
    assert tier.ended_requests == 1
    assert bench.counter("stored_blocks_total") == 2
    assert bench.manager.secondary_tiers[0] is not tier, "nothing holds it any more"
    bench.manager.on_request_finished(context)


def test_a_job_that_hangs_keeps_its_rows_until_the_tier_reports_it(bench: Bench) -> None:
    tier = bench.tier
    tier.has(1)
    context = bench.request("a")
    assert bench.lookup(keys(1), context) == [None]
    bench.step()
    before = bench.free
    bench.manager.removals.ask("drain", "tier0")
    bench.step()
    bench.clock.advance(JOB_TIMEOUT_S)
    for _ in range(2):  # the job expires, and the next step sees that no other one is left
        bench.step()
    assert isinstance(tier, Closable)
    wait_until(lambda: tier.is_closed)
    for _ in range(3):
        bench.step()
    assert stage(bench) == "draining", "a call of it may still write"
    note = "it has not reported 1 job whose deadline has passed: a call of its storage hangs"
    assert bench.manager.removals.notes(with_errors=False) == {"tier0": note}
    assert bench.free == before
    assert bench.lookup(keys(1), context) == [False]
    tier.end()
    step_until(bench, "drained")
    assert bench.free == before + 1


@pytest.mark.parametrize("fault", ["refuses", "raises"])
def test_a_tier_that_cannot_reset_is_drained_again_and_can_be_attached(
    bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Closable] = []

    def create(spec: object, view: memoryview, settings: object) -> Closable:
        tier = Closable(view, "tier0")
        if fault == "raises" and not made:
            monkeypatch.setattr(tier, "reset_cache", lambda: 1 / 0)
        tier.can_reset = bool(made)
        made.append(tier)
        return tier

    monkeypatch.setattr(SecondaryTierFactory, "create", create)
    removals = bench.manager.removals
    removals.ask("drain", "tier0")
    step_until(bench, "drained")
    bench.manager.reset_cache()
    removals.ask("attach", "tier0")
    step_until(bench, "attaching")
    step_until(bench, "drained")
    assert made[0].is_closed, "nothing of it is open"
    assert "cannot reset" in removals.notes(with_errors=True)["tier0"]
    assert bench.lookup(keys(1), bench.request("a")) == [False]
    removals.ask("attach", "tier0")
    step_until(bench, "")
    made[1].has(1)
    assert bench.lookup(keys(1), bench.request("b")) == [None]
    bench.tiers[0] = made[1]  # whose jobs the fixture ends


def test_lookups_of_the_next_step_reach_other_tiers_only(bench: Bench) -> None:
    first, second = bench.tiers
    first.has(1)
    second.has(1)
    bench.manager.removals.ask("drain", "tier0")
    bench.step()
    first.asked.clear()
    assert bench.lookup(keys(1), bench.request("a")) == [None]
    bench.step()
    assert not first.asked
    assert [list(job.keys) for job in second.jobs if job.is_promotion] == [keys(1)]


def test_an_order_does_not_wait_for_a_tier_that_was_taken_out(bench: Bench) -> None:
    from tests.tiering.test_orders import counted, give

    bench.tier.has(1, 2, 3, 4, 5, 6)
    order = give(bench, 1, 2, 3, 4, 5, 6)
    bench.step()  # their budget lets one block be loaded; five wait
    bench.manager.removals.ask("drain", "tier0")
    bench.step()
    bench.end()
    for _ in range(3):
        bench.step()
    assert counted(order) == {"in_memory": 1, "absent": 5}


def test_a_step_without_removals_calls_nothing_of_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.manager.removals, "act", lambda: pytest.fail("a step without work acts"))
    bench.store(keys(1), bench.request("a"))
    bench.step()
