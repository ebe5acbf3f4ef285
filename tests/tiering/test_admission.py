"""A block is stored when it has been offered often enough."""

from __future__ import annotations

import pytest

from tiered_kv.base import make_offload_key
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.tiering.admission import Admission


def test_admission_counts_offers_and_starts_over_once_admitted() -> None:
    admission = Admission(admit_after=3)
    key = make_offload_key(b"k", 0)
    assert [admission.admit(key) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not admission.is_open()
    assert Admission(1).is_open()


def test_an_offer_that_finds_no_room_does_not_count() -> None:
    admission, blocks = Admission(admit_after=2), [CPUBlock(row) for row in range(4)]
    for block in blocks:
        block.key = make_offload_key(b"%d" % block.block_id, 0)
    assert admission.select(blocks, 4, "first") == ([], blocks, [])
    assert admission.select(blocks, 2, "second") == (blocks[:2], [], blocks[2:])
    assert admission.select(blocks[2:], 2, "third") == (blocks[2:], [], [])


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
