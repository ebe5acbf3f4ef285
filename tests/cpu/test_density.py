"""What the policy `density` learns, and what it needs for that."""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.performance.policy_hits import Prompt, agent_steps, documents, hits_of, open_manager, serve
from tests.support.policy_rows import stored
from tiered_kv.base import ReqContext
from tiered_kv.cpu.hit_density import BUCKETS, HitDensity
from tiered_kv.cpu.policies import RequestChain, RowTable
from tiered_kv.cpu.policies.density import KIND_GROUPS, PACES_S, DensityPolicy, _class_of
from tiered_kv.hints import Hints
from tiered_kv.workload.request import Request, hints_from_sessions
from tiered_kv.workload.trace import read_trace

AGENTS_TRACE = Path(__file__).parents[3] / "shared/traces/agents_trace.jsonl"


def returning_and_new_prompts() -> Iterator[Prompt]:
    """Twenty prompts that return in turn, each with a block more, among three times as many that never do."""
    prompts = [[index << 32] for index in range(20)]
    for number in range(1600):
        if number % 4:
            yield [number << 16 | block for block in range(1, 20)]
        else:
            prompt = prompts[number // 4 % 20]
            prompt.append(number << 16)
            yield list(prompt)


def test_density_keeps_what_returns_among_what_does_not() -> None:
    prompts = list(returning_and_new_prompts())
    lru, density = (hits_of(prompts, policy, 700) for policy in ("lru", "density"))
    assert density > 2 * lru


def test_density_gives_equal_results_in_every_run() -> None:
    prompts = [prompt for prompt, _ in zip(documents(), range(500), strict=False)]
    assert hits_of(prompts, "density", 400) == hits_of(prompts, "density", 400)


def test_density_remembers_a_bounded_number_of_tails() -> None:
    policy = DensityPolicy(RowTable(80))
    for number in range(3000):
        stored(policy, RequestChain(), 8, first=8 * number)
        if len(policy) == 80:
            policy.evict(8, step=0)
    tails = {id(tail) for aging in policy._aging for tail in aging}
    assert len(policy._ghosts) <= 110
    assert len(tails) < 2 * (110 + 10), "tails that are neither resident nor remembered are forgotten as they age"


def test_density_forgets_requests_that_find_all_they_need() -> None:
    policy = DensityPolicy(RowTable(80))
    prompts = [stored(policy, RequestChain(), 8, first=8 * number) for number in range(10)]
    for number in range(3000):
        policy.use(prompts[number % 10], RequestChain())
    assert sum(map(len, policy._aging)) < 100


def test_requests_that_use_blocks_in_contradicting_orders_hold_none_of_them_for_ever() -> None:
    policy = DensityPolicy(RowTable(100))
    one, other = RequestChain(), RequestChain()
    blocks = stored(policy, one, 3)
    last = stored(policy, other, 1, first=10)
    policy.use(blocks[:2], other)
    policy.use(last, one)
    stored(policy, RequestChain(), 4, first=20)
    assert policy.evict(2, step=0) == [1, 0]
    assert not policy._order._hanging


def test_blocks_after_an_evicted_one_go_first() -> None:
    policy, chain = DensityPolicy(RowTable(100)), RequestChain()
    older = stored(policy, RequestChain(), 4)
    for row in older:
        policy.table.step[row] = 0  # looked up in this step
    prompt = stored(policy, chain, 4, first=10)
    assert policy.evict(2, step=0) == prompt[:1:-1]
    policy.end_step()
    after = stored(policy, chain, 3, first=20)
    assert policy.evict(5, step=1) == [*after[::-1], *older[:1:-1]]


def test_without_evidence_the_older_is_worth_less() -> None:
    level = np.array(HitDensity(2, 24).level).reshape(-1, BUCKETS)
    assert (np.diff(level, axis=1) <= 0).all()
    assert (level == level[0]).all()


def test_a_group_that_returns_is_worth_more_at_every_age() -> None:
    density = HitDensity(2, 24)
    for bucket in range(BUCKETS):
        for group in (0, 1):
            density.seen[group * BUCKETS + bucket] = 100.0
            density.hits[group * BUCKETS + bucket] = 2.0 + 20.0 * group
    density.learn()
    level = np.array(density.level).reshape(-1, BUCKETS)
    assert (level[1] > level[0]).all()


def test_a_density_is_that_of_the_best_time_to_keep_a_tail() -> None:
    density = HitDensity(1, 1)
    returned = 4  # all tails return in this bucket of age, and none before
    for bucket in range(returned + 1):
        density.seen[bucket] = 1000.0
    density.hits[returned] = 900.0
    density.learn()
    level = density.level
    assert level[:returned] == sorted(level[:returned]), "the nearer, the more"
    assert level[returned] == max(level)
    assert level[returned] > level[returned + 1] + 4


def test_a_kind_without_evidence_is_worth_what_its_prior_is_worth() -> None:
    density = HitDensity(2, 24)
    said = density.add_kind()
    paced = density.add_kind(said)
    for bucket in range(BUCKETS):
        cell = said * 24 * BUCKETS + bucket
        density.seen[cell], density.hits[cell] = 100.0, 30.0
    density.learn()
    level = np.array(density.level).reshape(-1, 24, BUCKETS)
    assert (level[paced] == level[said]).all()
    assert (level[paced, 0] > level[0, 0]).all()


# Hints.


def test_a_tail_whose_request_says_that_it_does_not_return_goes_first() -> None:
    policy = DensityPolicy(RowTable(100))
    old, new = stored(policy, RequestChain(), 4), stored(policy, _hinted(ttl_s=0), 4, first=10)
    assert policy.evict(4, step=0) == new[::-1]
    assert policy.evict(4, step=0) == old[::-1]


def test_a_tail_goes_first_once_its_ttl_is_over() -> None:
    policy = DensityPolicy(RowTable(80))
    old = stored(policy, RequestChain(), 8)
    expiring = stored(policy, _hinted(ttl_s=60), 8, first=8)
    policy.now_s = 61.0
    for number in range(2, 8):
        stored(policy, RequestChain(), 8, first=8 * number)
    assert policy.evict(8, step=0) == expiring[::-1]
    assert policy.evict(8, step=0) == old[::-1]


def test_a_priority_is_worth_some_age_and_no_more() -> None:
    policy = DensityPolicy(RowTable(400))
    order: list[int] = []
    for number in range(4000):
        while len(policy) > 396:
            order += [row // 4 for row in policy.evict(4, step=0) or ()]
        stored(policy, _hinted(priority=1) if number == 300 else RequestChain(), 4, first=4 * number)
    assert 300 in order, "it goes in the end"
    assert order.index(300) > order.index(301), "later than the next one"


def test_the_next_request_of_a_session_says_anew_what_its_blocks_are_worth() -> None:
    policy = DensityPolicy(RowTable(100))
    first, again = _hinted(ttl_s=0), RequestChain()
    blocks = stored(policy, first, 4)
    others = stored(policy, RequestChain(), 4, first=10)
    policy.use(blocks, again)
    assert policy.evict(4, step=0) == others[::-1], "its first hint holds no longer"
    policy.use(blocks, _hinted(ttl_s=0))
    more = stored(policy, RequestChain(), 4, first=20)
    assert policy.evict(4, step=0) == blocks[::-1]
    assert policy.evict(4, step=0) == more[::-1]


def test_what_others_share_with_a_request_is_not_its_to_expire() -> None:
    policy = DensityPolicy(RowTable(100))
    blocks = stored(policy, RequestChain(), 6)
    hinted = _hinted(ttl_s=0)
    policy.use(blocks[:3], hinted)
    own = stored(policy, hinted, 2, first=10)
    assert policy.evict(2, step=0) == own[::-1]
    assert policy.evict(3, step=0) == blocks[:2:-1]


def test_announced_returns_are_weighed_by_how_often_they_come() -> None:
    policy = DensityPolicy(RowTable(200))
    for number in range(2000):
        if len(policy) > 150:
            policy.evict(8, step=0)
        says = (1.0, 300.0)[number % 2]
        blocks = stored(policy, _hinted(expect_return_s=says), 4, first=4 * number)
        if number % 2:
            policy.use(blocks, _hinted(expect_return_s=says))
    liars, honest = policy._kinds[1, 0, 0], policy._kinds[5, 0, 0]
    level = np.array(policy._density.level).reshape(-1, BUCKETS)
    assert level[honest * KIND_GROUPS : (honest + 1) * KIND_GROUPS, 0].max() > level[liars * KIND_GROUPS, 0]


@pytest.mark.parametrize(("returns_s", "counts_as_s"), [(20, 20), (60, 20), (200, 200), (2, 2), (20_000, 20)])
def test_what_a_session_says_of_its_returns_is_corrected_by_its_last_ones(returns_s: float, counts_as_s: float) -> None:
    policy, prompt, chain = DensityPolicy(RowTable(100)), list[int](), RequestChain()
    for turn in range(6):
        policy.now_s = 1.0 + turn * returns_s
        chain = _hinted(expect_return_s=20.0)
        policy.use(prompt, chain)
        prompt += stored(policy, chain, 4, first=4 * turn)
    (kind,) = (hinted for hinted, kind in policy._kinds.items() if kind == chain.note.kind)
    assert kind == (_class_of(counts_as_s), 0, bisect_right(PACES_S, returns_s))


@pytest.mark.parametrize("hint", [{"expect_return": 1000}, {"ttl": 0}, None])
def test_a_long_prompt_that_returns_late_or_never_does_not_evict_those_that_return_soon(
    hint: dict[str, int] | None,
) -> None:
    manager, found = open_manager("density", 100), 0
    for turn in range(120):
        for agent in range(6):
            soon = ReqContext(f"{turn}-{agent}", hint and {"tiered_kv": {"expect_return": 4}})
            hits = serve(manager, range(100 * agent, 100 * agent + 10), soon)
            found += hits if turn >= 40 else 0
        late = range(1000 * (turn + 1), 1000 * (turn + 1) + 90)
        serve(manager, late, ReqContext(f"{turn}", hint and {"tiered_kv": hint}))
    manager.shutdown()
    assert found > 0.9 * 80 * 6 * 10


def test_a_session_that_paused_counts_as_one_that_pauses_again_if_the_clock_tells() -> None:
    def hits(speed: float) -> int:
        """Return what sessions find that come every 20 s, among twice as many that come every 120 s."""
        chance, now_s, found = random.Random(0), 0.0, 0
        waits = {session: 120.0 if session % 3 else 20.0 for session in range(60)}
        due = sorted((wait_s * chance.random(), session) for session, wait_s in waits.items())
        manager = open_manager("density", 250, clock=lambda: now_s / speed)
        for number in range(4000):
            now_s, session = due[0]
            found += serve(manager, range(10 * session, 10 * session + 10), ReqContext(str(number)))
            heapq.heapreplace(due, (now_s + waits[session] * chance.uniform(0.8, 1.2), session))
        manager.shutdown()
        return found

    assert hits(1) > 1.1 * hits(1000)


@pytest.mark.slow
def test_kept_promises_gain_hits_and_lies_lose_none() -> None:
    requests = list(itertools.islice(agent_steps(), 1500))

    def hits(hint: Callable[[float | None], float | None]) -> int:
        """Return the blocks found in 1,000, where each request tells a function of the time until its agent returns."""
        now_s, found = 0.0, 0
        manager = open_manager("density", 1000, clock=lambda: now_s)
        for number, (now_s, _, ids, wait_s) in enumerate(requests):  # noqa: B007 - the clock reads the time
            told = hint(wait_s)
            said = None if told is None else {"tiered_kv": {"expect_return": told}}
            found += serve(manager, ids, ReqContext(str(number), said))
        manager.shutdown()
        return found

    chance = random.Random(0)
    without = hits(lambda _: None)
    assert hits(lambda wait_s: wait_s) > 1.02 * without
    for lie in (
        lambda wait_s: (wait_s or 20) * chance.choice((0.1, 10)),
        lambda _: chance.choice((1, 4, 16, 64, 256, 1024)),
        lambda _: 1,
    ):
        assert hits(lie) > 0.99 * without


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(not AGENTS_TRACE.exists(), reason="the trace of agents is not here")
@pytest.mark.parametrize(
    ("blocks", "least", "least_without"), [(500, 0.43, 0.35), (1000, 0.65, 0.55), (2000, 0.85, 0.79)]
)
def test_sessions_of_real_agents_gain_by_their_hints_and_others_wrong_hints_cost_them_little(
    blocks: int, least: float, least_without: float
) -> None:
    unhinted = list(read_trace(AGENTS_TRACE))
    requests = hints_from_sessions(unhinted)

    def found(factors: Mapping[str, float], requests: Sequence[Request] = requests) -> list[int]:
        """Return the blocks that each request finds; the times that a session says are too long by a factor."""
        now_s, hits = 0.0, []
        manager = open_manager("density", blocks, clock=lambda: now_s)
        for number, request in enumerate(requests):
            now_s, hints = request.timestamp_ms / 1000, dict[str, Any](request.hints or {})
            if "expect_return" in hints:
                hints["expect_return"] *= factors.get(request.session, 1)
            hits.append(serve(manager, request.hash_ids, ReqContext(str(number), {"tiered_kv": hints})))
        manager.shutdown()
        return hits

    def rate(hits: Sequence[int], left_out: Collection[str] = ()) -> float:
        chosen = [each.session not in left_out for each in requests]
        return sum(compress(hits, chosen)) / sum(compress((len(each.hash_ids) for each in requests), chosen))

    chance = random.Random(0)
    names = sorted({request.session for request in requests})
    wrong = {name: chance.choice((0.1, 10)) for name in chance.sample(names, len(names) // 2)}
    drawn = [replace(each, hints={"expect_return": chance.choice((1, 4, 16, 64, 256, 1024))}) for each in unhinted]
    false, absent = list(requests), list(requests)
    for at in chance.sample(range(len(requests)), len(requests) // 2):
        hints = dict[str, Any](requests[at].hints or {})
        if said_s := hints.pop("expect_return", None):
            absent[at] = replace(requests[at], hints=hints)
            false[at] = replace(requests[at], hints={**hints, "expect_return": said_s * chance.choice((0.1, 10))})
    right, half_wrong, without = found({}), found(wrong), rate(found({}, unhinted))
    assert without >= least_without
    assert rate(right) >= least
    assert rate(half_wrong) >= rate(right) - 0.02
    assert rate(half_wrong, wrong) >= rate(right, wrong) - 0.02, "the others' hits"
    assert rate(found({}, false)) >= rate(found({}, absent)) - 0.02, "a wrong time costs little more than none"
    assert rate(found({}, drawn)) >= without - 0.01, "what nobody can rely on costs next to nothing"


def _hinted(**hints: Any) -> RequestChain:
    chain = RequestChain()
    chain.hints = Hints(**hints)
    return chain
