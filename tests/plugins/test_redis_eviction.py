"""What a survey of a Redis lists as the next to go, and what of it is evicted later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis import survey as survey_module
from tiered_kv_redis.listing import Page, Value
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.survey import Found, evict, survey
from tiered_kv_redis.topology import topology_of

__all__ = ["redis_server"]

DIGEST = bytes(range(16))
PREFIX = f"tkv1:{DIGEST.hex()}:{'0' * 16}:"
RECORD_BYTES = 65_536
EVERYTHING = 1 << 40


class Shelf:
    """A server of blocks of 1000 bytes that tells for how long each was not used.

    Args:
        clock: Its clock, and that of who asks.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.used_s: dict[bytes, float] = {}
        self._clock = clock

    def ask(self, _node: object, commands: Sequence[bytes], _deadline: float) -> list[Value]:
        return [self._answer(sent.split(b"\r\n")[2::2]) for sent in commands]

    def scan(self, *_: object) -> Page:
        return Page(b"0", list(self.used_s))

    def survey(self) -> Found:
        node: Any = self  # it is only passed on
        found = survey([node], DIGEST, RECORD_BYTES, lambda: 0.0, lambda: True, self._clock)
        assert found is not None
        return found

    def _answer(self, words: list[bytes]) -> Value:
        match words[0]:
            case b"OBJECT":
                return int(self._clock()) - int(self.used_s[words[2]])
            case b"UNLINK":
                return 1 if self.used_s.pop(words[1], None) is not None else 0
        assert words[0] in (b"MEMORY", b"STRLEN")
        return 1000


@pytest.fixture
def shelf(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    shelf = Shelf(clock)
    monkeypatch.setattr(survey_module, "_ask", shelf.ask)
    monkeypatch.setattr(survey_module, "scan", shelf.scan)
    return shelf


def test_a_block_that_was_used_after_it_was_listed_stays_however_long_ago_that_was(
    shelf: Shelf, clock: ManualClock
) -> None:
    clock.advance(100.0)
    shelf.used_s = {b"used": clock() - 3, b"unused": clock() - 3}
    listed = shelf.survey().candidates
    shelf.used_s[b"used"] = clock()
    clock.advance(4.5)  # now it is idle for longer than it was then
    assert evict(listed, EVERYTHING, 0.0, clock) == (1, 1000)
    assert list(shelf.used_s) == [b"used"]


def test_whole_seconds_do_not_make_an_unused_block_look_used(shelf: Shelf, clock: ManualClock) -> None:
    shelf.used_s = {b"%d" % number: number / 10 for number in range(10)}
    clock.advance(5.25)
    listed = shelf.survey().candidates
    clock.advance(7.5)
    assert evict(listed, EVERYTHING, 0.0, clock) == (10, 10_000)


@pytest.mark.parametrize(("blocks", "listed"), [(3, 3), (20, 4), (64, 8), (1000, 16)])
def test_a_share_of_the_blocks_is_listed_within_limits(
    shelf: Shelf, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, blocks: int, listed: int
) -> None:
    monkeypatch.setattr(survey_module, "CANDIDATES_MIN", 4)
    monkeypatch.setattr(survey_module, "CANDIDATES_MAX", 16)
    clock.advance(2000.0)
    shelf.used_s = {b"%d" % number: float(number) for number in range(blocks)}
    found = shelf.survey()
    assert found.blocks == blocks
    assert [each.name for each in found.candidates] == [b"%d" % number for number in range(listed)]


def test_a_block_that_was_stored_again_smaller_is_taken_for_what_it_is_now(redis_server: RedisServer) -> None:
    topology = topology_of(RedisSettings.model_validate({**PATIENT, "url": redis_server.url}))

    def deadline() -> float:
        return time.monotonic() + 60.0

    def still() -> float:
        return 0.0

    def before() -> float:
        """A time before all others: nothing has been used since it was listed, however long that took."""
        return -1e6

    try:
        topology.split([b""], deadline())
        redis_server.call("SET", PREFIX + "block", "x" * 60_000)
        found = survey(topology.nodes(), DIGEST, 60_000, deadline, lambda: True, still)
        assert found is not None
        ours, theirs, late = (deque(found.candidates) for _ in range(3))
        assert evict(theirs, EVERYTHING, deadline(), before) == (1, 60_000)
        redis_server.call("SET", PREFIX + "block", "x" * 1000)
        assert evict(ours, EVERYTHING, deadline(), before) == (1, 1000)
        assert evict(late, EVERYTHING, deadline(), before) == (0, 0)
    finally:
        topology.close()
