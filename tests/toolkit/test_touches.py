"""Touched blocks that a background thread notes in a storage."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.touches import Touches

TIME_S = 60.0


def test_a_shorter_interval_also_shortens_the_pause_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("tiered_kv.toolkit.touches.time", SimpleNamespace(monotonic=lambda: now_s))
    written: Queue[list[OffloadKey]] = Queue()

    def write(keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        written.put([*keys])
        return []

    first, second = make_keys(1, "first"), make_keys(1, "second")
    touches = Touches(write, "touches", interval_s=60.0)
    try:
        touches.note(first)
        assert written.get(timeout=TIME_S) == first
        touches.set_interval(0.05)  # as a tier does that has seen how soon its blocks are evicted
        assert written.get(timeout=TIME_S) == first
        now_s += 0.03
        touches.note(second)
        assert written.get(timeout=TIME_S) == second
    finally:
        touches.stop(TIME_S)
