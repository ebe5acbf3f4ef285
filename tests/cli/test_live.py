"""A live view: what two answers of a process say together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.status_server import JSON, Status, answer, busy, histogram, status, tier
from tiered_kv.cli.ask import read_status, view_of
from tiered_kv.cli.output import printable
from tiered_kv.errors import FormatError


def test_rates_are_of_what_lies_between_two_answers() -> None:
    view = view_of(answer(busy(10.0, 100)), answer(busy(12.0, 104)))
    cpu, disk = view["tiers"]
    assert not view["is_since_start"]
    assert view["interval_seconds"] == 2.0
    assert (cpu["hits_per_s"], disk["hits_per_s"]) == (120.0, 60.0)
    assert (cpu["hit_share"], disk["hit_share"]) == (0.6, 0.75)
    assert (view["asked_blocks_per_s"], view["hit_share"]) == (200.0, 0.9)
    assert (cpu["load_bytes_per_s"], cpu["store_bytes_per_s"]) == (8e6, 2e6)
    assert view["restored_tokens_per_s"] == 3200.0
    assert (disk["store_budget_used_bytes"], disk["store_budget_bytes"]) == (64, 128)


def test_the_p99_of_loads_is_of_the_interval() -> None:
    before = tier("disk", {"job_seconds": {"load": histogram(0, 0, 1000, 0)}})
    now = tier("disk", {"job_seconds": {"load": histogram(10, 0, 1000, 0)}})
    view = view_of(answer(status(tier("cpu"), before)), answer(status(tier("cpu"), now, uptime_s=11.0)))
    assert view["tiers"][1]["load_p99_seconds"] is not None
    assert view["tiers"][1]["load_p99_seconds"] < 0.001
    idle = view_of(answer(status(before)), answer(status(before, uptime_s=11.0)))
    assert idle["tiers"][0]["load_p99_seconds"] is None


def test_reasons_are_sorted_the_biggest_now_first_and_those_without_a_block_left_out() -> None:
    view = view_of(answer(busy(10.0, 100)), answer(busy(12.0, 104)))
    assert [tuple(each.values()) for each in view["reasons"]] == [
        ("miss", "cpu", "evicted", 80.0, 4160),
        ("miss", "disk", "absent", 20.0, 1040),
        ("skip", "disk", "budget", 10.0, 520),
        ("load", "disk", "checksum", 2.0, 104),
    ]


@pytest.mark.parametrize("before", [None, busy(10.0, 100, pid=2), busy(50.0, 100)], ids=["first", "other", "restarted"])
def test_the_first_answer_of_a_process_is_compared_with_its_start(before: Status | None) -> None:
    view = view_of(answer(before) if before else None, answer(busy(20.0, 10)))
    assert view["is_since_start"]
    assert view["tiers"][0]["hits_per_s"] == 30.0


def test_without_a_history_loaded_blocks_stand_for_hits() -> None:
    stated = status(tier("cpu", {"loaded_blocks_total": 100}), tier("disk", {"loaded_blocks_total": 30}), uptime_s=10.0)
    view = view_of(None, answer(stated))
    assert [each["hits_per_s"] for each in view["tiers"]] == [7.0, 3.0]
    assert view["hit_share"] is None
    assert view["tiers"][0]["hit_share"] is None


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "a\rb", "\x07", "\x9b2J", "\u202eevil", "\ud800", "\u2028"])
def test_a_name_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    assert printable(text).isprintable()


@settings(max_examples=settings().max_examples // 10)
@given(st.sampled_from(["stack", "tier", "counters"]), st.data(), JSON)
def test_an_answer_of_wrong_types_is_refused(level: str, data: st.DataObject, value: object) -> None:
    stated = busy(12.0, 3, notices=[{"time": 1.0, "tier": "disk", "what": "x", "count": 2}])
    place = {"stack": stated, "tier": stated["tiers"][1], "counters": stated["tiers"][1]["counters"]}[level]
    place[data.draw(st.sampled_from(sorted(place)))] = value
    try:
        view = view_of(answer(busy(10.0, 1)), answer(stated))
    except FormatError:
        return
    assert view["version"].isprintable()
    assert all(each["hits_per_s"] >= 0 and each["load_bytes_per_s"] >= 0 for each in view["tiers"])
    assert all(each["reason"].isprintable() and each["tier"].isprintable() for each in view["reasons"])
    assert all(each["what"].isprintable() and each["age_s"] >= 0 for each in view["notices"])


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b'{"tiers": 5}', b'{"tiers": []}', b"[" * 100_000, b"9" * 10_000]
)
def test_what_is_no_status_is_an_error(body: bytes) -> None:
    with pytest.raises(FormatError):
        read_status(body)


def test_a_notice_says_how_old_it_is_and_how_often_it_came() -> None:
    stated = busy(10.0, 1, notices=[{"time": 1007.0, "tier": "disk", "what": "breaker opened", "count": 3}])
    (notice,) = view_of(None, answer(stated))["notices"]
    assert tuple(notice.values()) == (3.0, "disk", "breaker opened (3 times)")
