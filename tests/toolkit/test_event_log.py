"""The log of a tier's events keeps their order, and a limit."""

from __future__ import annotations

from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.event_log import KEYS_MAX, EventLog

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


def test_beyond_its_limit_the_oldest_events_are_lost() -> None:
    quarter = KEYS_MAX // 4
    log = EventLog(True)
    for key in KEYS:
        log.stored([key] * quarter)
    assert told(log) == [(False, [key for key in KEYS[2:] for _ in range(quarter)])]
    most = KEYS[:3] * quarter
    for _ in range(3):  # what was taken takes no room
        log.stored(most)
        assert told(log) == [(False, most)]
    log.stored(most)
    log.clear()
    log.removed(KEYS[:4] * quarter)
    assert told(log) == [(True, KEYS[:4] * quarter)]
    log.removed(KEYS * quarter)
    assert told(log) == [], "more than there is room for at once"
