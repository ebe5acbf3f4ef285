"""Events of a tier's blocks, from the results of its jobs and from the tier itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.tiering.conftest import BLOCK_BYTES, LARGE_BUDGETS, Bench, MakeBench, keys
from tiered_kv.base import OffloadingEvent, OffloadKey

Told = list[tuple[str, bool, list[OffloadKey]]]


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.told: Told = []

    def publish(self, events: Sequence[OffloadingEvent]) -> None:
        assert events
        self.told += [(event.medium, event.removed, event.keys) for event in events]

    def clear(self) -> None:
        self.told.append(("", True, []))

    def snapshot(self) -> dict[str, int]:
        return {"event_messages_total": len(self.told)}

    def close(self) -> None:
        pass

    def take(self, medium: str = "tier0") -> list[tuple[bool, list[OffloadKey]]]:
        """Return the events of one medium since the last call."""
        told, self.told = self.told, []
        return [(is_removed, keys) for where, is_removed, keys in told if where == medium]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def bench(make_bench: MakeBench, sink: Sink) -> Bench:
    return make_bench(LARGE_BUDGETS, event_sink=sink)


def store(bench: Bench, *numbers: int) -> None:
    bench.store(keys(*numbers), bench.request("a"))


def test_blocks_are_stored_in_a_tier_once_their_job_has_ended(bench: Bench, sink: Sink) -> None:
    store(bench, 1, 2)
    bench.manager.on_schedule_end()
    assert sink.told == [("CPU", False, keys(1, 2))]
    sink.take()
    bench.end()
    assert sink.told == [("tier0", False, keys(1, 2))]


def test_a_failed_job_reports_the_blocks_that_were_stored(bench: Bench, sink: Sink) -> None:
    store(bench, 1, 2, 3)
    bench.end(False, only=[*keys(3, 1), OffloadKey(b"strange")], reason="io_error")
    assert sink.take() == [(False, keys(1, 3))]
    store(bench, 4)
    bench.end(False, reason="no_space")
    assert sink.take() == []


@pytest.mark.parametrize(
    ("reason", "is_gone"),
    [("absent", True), ("checksum", True), ("truncated", True), ("io_error", False), ("reset", False), ("", False)],
)
def test_a_load_that_misses_a_block_reports_it_as_removed(bench: Bench, sink: Sink, reason: str, is_gone: bool) -> None:
    bench.promote(1, 2)
    sink.take()
    bench.end(False, only=keys(1), reason=reason)
    assert sink.told == [("CPU", False, keys(1))] + ([("tier0", True, keys(2))] if is_gone else [])


def test_removed_blocks_are_reported_under_the_tier_s_name_in_the_stack(bench: Bench, sink: Sink) -> None:
    bench.tier.events = [
        OffloadingEvent(keys(1), 7, "whatever", removed=True),
        OffloadingEvent(keys(2), 7, "whatever", removed=False),
    ]
    bench.manager.on_schedule_end()
    assert sink.take() == [(True, keys(1))], "what it stored, its jobs tell"


def test_stored_events_of_a_tier_replace_those_of_its_jobs(make_bench: MakeBench, sink: Sink) -> None:
    bench = make_bench(LARGE_BUDGETS, event_sink=sink, reports_stored=True)
    store(bench, 1, 2)
    bench.tier.events = [
        OffloadingEvent(keys(1), BLOCK_BYTES, "", removed=False),
        OffloadingEvent(keys(1), BLOCK_BYTES, "", removed=True),
    ]
    bench.end()
    assert sink.take() == [(False, keys(1)), (True, keys(1))]


def test_invalid_events_of_a_tier_are_counted_as_exceptions(bench: Bench, sink: Sink) -> None:
    store(bench, 1)
    bench.tier.events = ["no event"]
    bench.end()
    assert bench.manager.counters()["tier0"]["exceptions_total"] == 1
    bench.manager.on_schedule_end()
    assert sink.take() == [(False, keys(1))]


def test_a_store_from_before_a_reset_is_not_reported_by_its_tier_after_it(make_bench: MakeBench, sink: Sink) -> None:
    bench = make_bench(LARGE_BUDGETS, event_sink=sink, reports_stored=True)
    store(bench, 1)
    bench.manager.reset_cache()
    sink.take()
    bench.tier.events = [OffloadingEvent(keys(1, 2), BLOCK_BYTES, "", removed=False)]
    bench.end()
    assert sink.take() == [(False, keys(2))]
    store(bench, 1)
    bench.tier.events = [OffloadingEvent(keys(1), BLOCK_BYTES, "", removed=False)]
    bench.end()
    assert sink.take() == [(False, keys(1))]


def test_events_from_before_a_reset_are_dropped(bench: Bench, sink: Sink) -> None:
    store(bench, 1)
    bench.end()
    sink.take()
    store(bench, 2)
    bench.tier.events = [OffloadingEvent(keys(9), BLOCK_BYTES, "", removed=True)]
    bench.manager.reset_cache()
    assert sink.told == [("", True, [])]
    sink.take()
    bench.end()  # the job from before
    assert sink.told == []
    store(bench, 3)
    bench.end()
    assert sink.told == [("CPU", False, keys(3)), ("tier0", False, keys(3))]
