"""The names of unreadable records: limited in number and age, and safe from any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_kv.testing.control import ManualClock
from tiered_kv.toolkit import unreadable
from tiered_kv.toolkit.unreadable import LIFETIME_S, Unreadable


def test_a_name_is_dropped_after_its_lifetime_from_when_it_was_noted_last(clock: ManualClock) -> None:
    names: Unreadable[str] = Unreadable(clock=clock)
    names.note(["once", "twice"])
    clock.advance(LIFETIME_S - 1)
    names.note(["twice"])
    assert "once" in names
    clock.advance(1)
    assert "once" not in names
    assert "twice" in names
    clock.advance(LIFETIME_S - 1)
    assert "twice" not in names


def test_beyond_the_limit_the_name_that_was_noted_longest_ago_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable, "NAMES_MAX", 3)
    names: Unreadable[int] = Unreadable()
    names.note(range(3))
    names.note([0])  # again
    names.note([3, 4])
    assert [number for number in range(5) if number in names] == [0, 3, 4]
    names.note(range(1000))
    assert [number for number in range(1000) if number in names] == [997, 998, 999]


def test_threads_may_note_forget_and_ask_at_once() -> None:
    names: Unreadable[int] = Unreadable()

    def work(mine: range) -> None:
        for _ in range(200):
            names.note(mine)
            assert all(name in names for name in mine)
            names.forget(mine)
            assert not any(name in names for name in mine)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [range(at * 10, at * 10 + 10) for at in range(4)]))
