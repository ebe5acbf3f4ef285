"""A block is stored when it has been offered often enough."""

from __future__ import annotations

import pytest

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.tiering.admission import Admission, Offer


def test_admission_counts_offers_and_starts_over_once_admitted() -> None:
    admission = Admission(admit_after=3)
    key = make_offload_key(b"k", 0)
    assert [admission.admit(key) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not admission.is_open()
    assert Admission(1).is_open()


def test_an_offer_that_finds_no_room_does_not_count() -> None:
    admission, keys = Admission(admit_after=2), [make_offload_key(b"%d" % row, 0) for row in range(4)]

    def select(first: int, room: int, req_id: str) -> tuple[list[OffloadKey], list[int], int, list[OffloadKey]]:
        stored, refused, late = admission.select(Offer(keys[first:], list(range(first, 4))), room, req_id)
        return stored.keys, stored.rows, len(refused), list(late)

    assert select(0, 4, "first") == ([], [], 4, [])
    assert select(0, 2, "second") == (keys[:2], [0, 1], 0, keys[2:])
    assert select(2, 2, "third") == (keys[2:], [2, 3], 0, [])


def test_admission_remembers_two_generations_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.tiering.admission.TRACKED_KEYS_MAX", 10)
    admission = Admission(admit_after=2)
    keys = [make_offload_key(b"%d" % i, 0) for i in range(40)]
    for key in keys[:15]:
        assert not admission.admit(key)
    assert admission.admit(keys[0]), "in the older generation"
    for key in keys[15:]:
        assert not admission.admit(key)
    assert not admission.admit(keys[1]), "forgotten"
