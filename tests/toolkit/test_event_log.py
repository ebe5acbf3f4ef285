"""The log of a tier's events keeps their order, and a limit."""

from __future__ import annotations

import pytest

from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit import event_log
from tiered_kv.toolkit.event_log import EventLog

KEYS = make_keys(6)


def told(log: EventLog) -> list[tuple[bool, list[bytes]]]:
    return [(event.removed, list(event.keys)) for event in log.take(7, "mine")]


def test_successive_events_of_one_kind_are_one() -> None:
    log = EventLog(True)
    log.stored(KEYS[:2])
    log.stored(KEYS[2:3])
    log.removed(KEYS[:1])
    log.removed([])
    log.stored(KEYS[:1])
    assert told(log) == [(False, KEYS[:3]), (True, KEYS[:1]), (False, KEYS[:1])]
    assert told(log) == []
    log.stored(KEYS[:1])
    (event,) = log.take(7, "mine")
    assert (event.block_size, event.medium) == (7, "mine")


def test_where_nobody_takes_events_none_are_kept() -> None:
    log = EventLog(False)
    log.stored(KEYS)
    log.removed(KEYS)
    assert told(log) == []


def test_beyond_its_limit_the_oldest_events_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEYS_MAX", 4)
    log = EventLog(True)
    for key in KEYS:
        log.stored([key])
    assert told(log) == [(False, KEYS[2:])]
    for _ in range(3):  # what was taken takes no room
        log.stored(KEYS[:3])
        assert told(log) == [(False, KEYS[:3])]
    log.stored(KEYS[:3])
    log.clear()
    log.removed(KEYS[:4])
    assert told(log) == [(True, KEYS[:4])]
    log.removed(KEYS)
    assert told(log) == [], "more than there is room for at once"
