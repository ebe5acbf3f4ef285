"""A tier's event log keeps the order of its events, up to a limit."""

from __future__ import annotations

from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.event_log import BATCHES_MAX, EventLog

KEYS = make_keys(4)


def taken(log: EventLog) -> list[tuple[bool, list[bytes]]]:
    return [(event.removed, list(event.keys)) for event in log.take(7, "mine")]


def test_successive_events_of_one_kind_are_one() -> None:
    log = EventLog(True)
    log.stored(KEYS[:2])
    log.stored(KEYS[2:3])
    log.removed(KEYS[:1])
    log.removed([])
    log.stored(KEYS[:1])
    assert taken(log) == [(False, KEYS[:3]), (True, KEYS[:1]), (False, KEYS[:1])]
    assert taken(log) == []
    log.stored(KEYS[:1])
    (event,) = log.take(7, "mine")
    assert (event.block_size, event.medium) == (7, "mine")


def test_without_a_taker_no_events_are_kept() -> None:
    log = EventLog(False)
    log.stored(KEYS)
    log.removed(KEYS)
    assert taken(log) == []


def test_beyond_its_limit_and_at_a_reset_events_are_lost() -> None:
    log = EventLog(True)
    log.stored(KEYS[:1])
    for _ in range(BATCHES_MAX):
        log.removed(KEYS[1:2])
    assert taken(log) == [(True, KEYS[1:2] * BATCHES_MAX)]
    log.stored(KEYS)
    log.clear()
    log.removed(KEYS[:1])
    assert taken(log) == [(True, KEYS[:1])]
