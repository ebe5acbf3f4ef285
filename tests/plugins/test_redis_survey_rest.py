"""Surveys of a Redis take a small share of the time, and what they are for is put right all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis import quota as quota_module
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.grants import QuotaLimits
from tiered_kv_redis.node import NodeDownError
from tiered_kv_redis.quota import Quota
from tiered_kv_redis.rest import REST_S_MAX, SURVEY_SHARE, Rest
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.survey import Found
from tiered_kv_redis.topology import Topology, topology_of

__all__ = ["redis_server"]

DIGEST = bytes(range(16))
ACCOUNT = f"tkv1:{DIGEST.hex()}:account"
RECORD_BYTES = 65_536
QUOTA_BYTES = 8 << 20
SURVEY_S = 4.0
REST_S = SURVEY_S * (1 / SURVEY_SHARE - 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Unstarted:
    """A thread that the test is instead of."""

    def __init__(self, **options: object) -> None:
        return

    def start(self) -> None:
        return


class Bench:
    """Quotas whose keepers' steps the test makes, and surveys that take `SURVEY_S` of its own clock."""

    def __init__(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.clock = Clock()
        self.surveys_at_s: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self._monkeypatch = monkeypatch
        self._topologies: list[Topology] = []
        monkeypatch.setattr(quota_module, "survey", self._survey)
        monkeypatch.setattr(quota_module, "_STEP_S_MAX", 60.0)  # by a clock that is not ours

    def open(self, dead_s: float = 1e9) -> Quota:
        # No survey is made again because of ticks, which would be told by a clock that is not ours.
        limits = QuotaLimits(QUOTA_BYTES, RECORD_BYTES, room_wait_s=0.0, transfer_s=dead_s, tick_s=1e9, valid_s=0.0)
        self._topologies.append(topology_of(RedisSettings.model_validate({**PATIENT, "url": self.server.url})))
        with self._monkeypatch.context() as patch:
            patch.setattr(threading, "Thread", Unstarted)
            quota = Quota(self._topologies[-1], DIGEST, limits, Counters(), "redis")
        quota._rest = Rest(self.clock)
        return quota

    def grant(self, owner: str, size_bytes: int) -> None:
        """Give somebody a grant, and let nobody hear of them again."""
        self.server.call("HSET", ACCOUNT, f"g:{owner}", f"{size_bytes} 1")
        self.server.call("HINCRBY", ACCOUNT, "net", str(size_bytes))

    def knows(self, owner: str) -> bool:
        return self.server.call("HEXISTS", ACCOUNT, f"g:{owner}") == b":1\r\n"

    def close(self) -> None:
        for topology in self._topologies:
            topology.close()

    def _survey(self, *_: Any) -> Found:  # Any: as the real one
        self.surveys_at_s.append(self.clock())
        self.clock.now_s += SURVEY_S
        self.meanwhile()
        return Found()


@pytest.fixture
def bench(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(redis_server, monkeypatch)
    yield bench
    bench.close()


def step_until(bench: Bench, end_s: float, *quotas: Quota) -> None:
    """Have every quota look after its account again and again, as stores that find no room make it."""
    while bench.clock.now_s < end_s:
        for quota in quotas:
            quota._look_after()
        bench.clock.now_s += 1.0


def test_a_quota_full_of_grants_is_not_surveyed_all_the_time_by_all_who_share_it_together(bench: Bench) -> None:
    quotas = [bench.open() for _ in range(3)]
    quotas[0]._look_after()  # which opens the account
    bench.grant("ended", QUOTA_BYTES)
    end_s = 20 * (SURVEY_S + REST_S)
    step_until(bench, end_s, *quotas)
    first, second, *rest = bench.surveys_at_s
    assert [first, second, rest[0]] == [0.0, SURVEY_S, 2 * SURVEY_S], "one for each that knows of no earlier one"
    assert len(rest) >= 18
    assert all(later - earlier >= SURVEY_S + REST_S for earlier, later in pairwise(rest))
    assert not quotas[0]._look_after(), "who waits for room does not ask again at once"


def test_surveys_that_fail_are_followed_by_a_rest_too(bench: Bench) -> None:
    def fail() -> None:
        raise NodeDownError("timeout")

    quotas = [bench.open() for _ in range(2)]
    bench.meanwhile = fail
    for _ in range(50):
        for quota in quotas:
            try:
                quota._look_after()
            except NodeDownError:
                continue
        bench.clock.now_s += 1.0
    # The second has not looked before, and may try once without a rest.
    assert len(bench.surveys_at_s) <= 3
    assert bench.surveys_at_s[-1] - bench.surveys_at_s[0] >= REST_S


def test_a_failed_survey_that_cannot_be_told_is_told_when_the_server_answers_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NodeDownError("timeout")

    first, second = quotas = [bench.open() for _ in range(2)]
    for quota in quotas:
        quota._look_after()
    bench.clock.now_s += 10 * REST_S
    for quota in quotas:
        quota.grants.are_in_doubt = True
    bench.meanwhile = fail
    with monkeypatch.context() as patch:
        patch.setattr(first._account, "note_try", fail)
        with pytest.raises(NodeDownError):
            first._look_after()
    surveys = len(bench.surveys_at_s)
    first._look_after()
    second._look_after()
    assert not first._rest.is_over
    assert not second._rest.is_over
    assert len(bench.surveys_at_s) == surveys
    bench.clock.now_s += REST_S
    assert first._rest.is_over, "it is told once"


@pytest.mark.parametrize("loss", ["lost", "somebody else's"])
def test_the_rest_ends_with_the_account(bench: Bench, loss: str) -> None:
    first, second = quotas = [bench.open() for _ in range(2)]
    for quota in quotas:
        quota._look_after()
    bench.server.call("HSET", ACCOUNT, "took", "60000")
    bench.server.call("HINCRBY", ACCOUNT, "tries", "1")
    for quota in quotas:
        quota._look_after()
        assert not quota._rest.is_over
    surveys = len(bench.surveys_at_s)
    if loss == "lost":
        bench.server.call("FLUSHALL")
    else:
        bench.server.call("HSET", ACCOUNT, "id", "another", "tries", "0")
        bench.server.call("HDEL", ACCOUNT, "offset")
    assert first._look_after()
    assert len(bench.surveys_at_s) == surveys + 1
    assert first._account.statement(1e12).is_settled
    second._look_after()
    assert not second._rest.is_over, "after what the survey of the new account has taken"
    bench.clock.now_s += REST_S
    assert second._rest.is_over


def test_an_account_that_is_lost_during_a_survey_is_surveyed_at_once(bench: Bench) -> None:
    quota = bench.open()

    def lose() -> None:
        bench.meanwhile = lambda: None
        bench.server.call("FLUSHALL")

    bench.meanwhile = lose
    quota._look_after()
    assert not quota._account.statement(1e12).is_settled
    quota._look_after()
    assert quota._account.statement(1e12).is_settled
    assert bench.surveys_at_s == [0.0, SURVEY_S]


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_no_rest_is_longer_than_the_longest(bench: Bench, whose: str) -> None:
    quota = bench.open()
    if whose == "own":
        bench.meanwhile = lambda: setattr(bench.clock, "now_s", bench.clock.now_s + 1e6)  # it was stopped
    quota._look_after()
    if whose != "own":
        bench.server.call("HSET", ACCOUNT, "took", "600000")
        bench.server.call("HINCRBY", ACCOUNT, "tries", "1")
        quota._look_after()
    assert not quota._rest.is_over
    assert quota._rest.took_s <= REST_S_MAX * SURVEY_SHARE / (1 - SURVEY_SHARE), "nor are others told so"
    bench.clock.now_s += REST_S_MAX + 1e-6
    assert quota._rest.is_over


def test_a_survey_is_made_after_the_rest_where_blocks_could_not_be_replaced(bench: Bench) -> None:
    first, second = quotas = [bench.open() for _ in range(2)]
    for quota in quotas:
        quota._look_after()
    step_until(bench, bench.clock.now_s + REST_S, *quotas)
    surveys = len(bench.surveys_at_s)
    assert not first._woken.is_set()
    share = first.take_replacements(QUOTA_BYTES // RECORD_BYTES)
    assert first._woken.is_set()
    assert 0 < share <= QUOTA_BYTES // RECORD_BYTES // 16
    assert second.take_replacements(QUOTA_BYTES // RECORD_BYTES) == share
    assert first.take_replacements(1) == 0
    step_until(bench, bench.clock.now_s + REST_S, *quotas)
    assert len(bench.surveys_at_s) == surveys + 1, "one for both"
    assert first.take_replacements(1) == second.take_replacements(1) == 1


def test_a_grant_of_the_dead_is_free_again_after_the_rest(bench: Bench) -> None:
    quota = bench.open(dead_s=-1.0)  # dead is who has not been heard of between two looks
    quota._look_after()
    bench.grant("ended", QUOTA_BYTES // 4)
    began_s = bench.clock.now_s
    step_until(bench, began_s + REST_S, quota)
    assert bench.knows("ended")
    step_until(bench, began_s + REST_S + 3, quota)
    assert not bench.knows("ended")
    quota._look_after()
    assert quota.grants.total_bytes == 0
    assert len(bench.surveys_at_s) == 2


def test_the_dead_without_a_grant_are_no_reason_for_a_survey(bench: Bench) -> None:
    quota = bench.open(dead_s=-1.0)
    quota._look_after()
    bench.grant("ended", 0)
    step_until(bench, 2 * REST_S, quota)
    assert len(bench.surveys_at_s) == 1
    bench.grant("another", RECORD_BYTES)
    step_until(bench, bench.clock.now_s + 3, quota)
    assert len(bench.surveys_at_s) == 2
    assert not bench.knows("ended"), "it is forgotten by the next one"


def test_who_was_taken_for_dead_and_is_back_before_the_survey_ends_stays_counted(bench: Bench) -> None:
    quota = bench.open(dead_s=-1.0)
    quota._look_after()
    bench.grant("stopped", RECORD_BYTES)

    def come_back() -> None:
        bench.server.call("HSET", ACCOUNT, "g:stopped", f"{3 * RECORD_BYTES} 2")
        bench.server.call("HINCRBY", ACCOUNT, "net", str(3 * RECORD_BYTES))

    bench.meanwhile = come_back
    step_until(bench, bench.clock.now_s + REST_S + 3, quota)
    assert len(bench.surveys_at_s) == 2
    assert bench.knows("stopped")
    total_bytes = quota._account.statement(1e12).total_bytes
    assert total_bytes >= 3 * RECORD_BYTES


def test_what_somebody_writes_for_a_duration_is_not_believed_beyond_a_limit(bench: Bench) -> None:
    quota = bench.open()
    quota._look_after()
    for text in ("9" * 19, "-5", "x"):
        bench.server.call("HSET", ACCOUNT, "took", text)
        assert 0.0 <= quota._account.statement(1e12).took_s <= 600.0
