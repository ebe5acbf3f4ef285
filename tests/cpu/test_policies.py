"""Pinned blocks are never evicted, and a prefix's tail goes before its head; also with the code on the page."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import write_shown
from tests.support.policy_rows import pin, stored
from tiered_kv.cpu.policies import CachePolicy, RequestChain, RowTable, make_policy
from tiered_kv.cpu.policies.checked import CheckedPolicy
from tiered_kv.cpu.policies.density import DensityPolicy
from tiered_kv.cpu.policies.recency import ARCPolicy, LRUPolicy
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_engine_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.request import ChatWorkload

POLICIES = [LRUPolicy, ARCPolicy, DensityPolicy]
BY_RECENCY = [LRUPolicy, ARCPolicy]


def evicted_ids(policy: CachePolicy, count: int, step: int = 0) -> list[int]:
    victims = policy.evict(count, step)
    assert victims is not None
    return victims


def test_blocks_that_another_request_uses_move_to_it_in_the_order_of_its_prefix() -> None:
    policy = LRUPolicy(RowTable(100))
    old, new = RequestChain(), RequestChain()
    prefix = stored(policy, old, 4)
    tail = stored(policy, new, 2, 10)  # stored before the prefix is touched, as some engines do
    policy.use([*prefix[:2], *tail], new)
    assert evicted_ids(policy, 6) == [3, 2, 11, 10, 1, 0]


@pytest.mark.parametrize("policy_class", POLICIES)
def test_blocks_return_to_their_place_when_their_request_uses_them_again(policy_class: type[CachePolicy]) -> None:
    policy = policy_class(RowTable(100))
    one, other = RequestChain(), RequestChain()
    rows = stored(policy, one, 8)
    policy.use(rows[:4], other)
    policy.use(rows[:4], one)
    assert policy.table.position == list(range(8))
    if policy_class is LRUPolicy:
        assert evicted_ids(policy, 8) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("policy_class", POLICIES)
def test_what_was_refused_leaves_the_order_as_it_was(policy_class: type[CachePolicy]) -> None:
    policy = policy_class(RowTable(100))
    prompts = [stored(policy, RequestChain(), 2, 2 * index) for index in range(4)]
    for row in prompts[3]:
        policy.table.step[row] = 1  # looked up in this step
    assert policy.evict(7, step=1) is None
    policy.end_step()
    assert evicted_ids(policy, 8) == [1, 0, 3, 2, 5, 4, 7, 6]


@pytest.mark.parametrize("policy_class", POLICIES)
def test_pinned_blocks_cost_an_eviction_nothing(policy_class: type[CachePolicy]) -> None:
    def evict_one(pinned: int) -> float:
        policy = policy_class(RowTable(pinned + 200))
        chains = [stored(policy, RequestChain(), 100, first) for first in range(0, pinned, 100)]
        for rows in chains:
            pin(policy, rows)
        stored(policy, RequestChain(), 200, pinned)
        start = time.thread_time()  # of the processor: what others have of it meanwhile is not the eviction's
        for _ in range(100):
            assert policy.evict(1, step=0)
        return time.thread_time() - start

    few = min(evict_one(100) for _ in range(3))
    many = min(evict_one(20_000) for _ in range(3))
    assert many < 10 * few + 0.001, f"{many * 1e6:.0f} us with many pinned blocks, {few * 1e6:.0f} us with few"


def test_arc_keeps_blocks_of_several_requests_through_a_scan() -> None:
    policy = ARCPolicy(RowTable(40))
    shared = stored(policy, RequestChain(), 10)
    policy.use(shared, RequestChain())
    evicted: list[int] = []
    for first in range(100, 400, 10):
        if len(policy) + 10 > 40:
            evicted += evicted_ids(policy, 10)
        stored(policy, RequestChain(), 10, first)
    assert not set(evicted) & set(shared)


def test_arc_admits_what_comes_back_as_frequent_and_bounds_its_memory() -> None:
    policy = ARCPolicy(RowTable(10))
    for first in range(0, 1000, 5):
        if len(policy) + 5 > 10:
            evicted_ids(policy, 5)
        stored(policy, RequestChain(), 5, first)
    evicted_ids(policy, 5)
    stored(policy, RequestChain(), 5, 500)
    assert not len(policy._frequent), "it remembers as many as it holds"
    stored(policy, RequestChain(), 5, 990)
    assert len(policy._frequent) == 5


def test_arc_gives_up_no_head_before_the_tail_of_an_older_request() -> None:
    policy = ARCPolicy(RowTable(12))
    policy._recent_target = 12.0  # as after many returns to T1: T2 is to shrink
    old = stored(policy, RequestChain(), 8)
    policy.use(old[:4], RequestChain())  # the head is shared now, its old tail is not
    assert evicted_ids(policy, 8) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_a_policy_is_found_by_name_or_by_module_and_class() -> None:
    assert [type(make_policy(name, RowTable(4))) for name in ("lru", "arc", "density")] == POLICIES
    assert isinstance(make_policy("tiered_kv.cpu.policies.recency:LRUPolicy", RowTable(4)), LRUPolicy)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_policy", "known are lru, arc, density"),
        ("no_such_module:X", "ModuleNotFoundError"),
        ("builtins:repr", "not a subclass"),
        ("tiered_kv.cpu.policies:CachePolicy", "TypeError: Can't instantiate abstract class"),
        (":x", "ValueError"),
        ("..x:y", "TypeError"),
    ],
)
def test_a_policy_that_cannot_be_had_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name, RowTable(4))


@pytest.fixture
def stack_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files that the page shows, each with the name above it."""
    names = write_shown("how-to/writing-a-policy.md", tmp_path)
    assert names == ["deepest_first.py", "stack.yaml", "test_deepest_first.py"]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "stack.yaml"
    for name in ("deepest_first", "test_deepest_first"):
        sys.modules.pop(name, None)


def test_the_policy_on_the_page_evicts_tails_and_loses_no_block(stack_file: Path) -> None:
    stack_file.write_text(stack_file.read_text().replace("64KiB", "4KiB").replace("64MiB", "256KiB"))
    chats = ChatWorkload(chats=20, turns=4, active_chats=10, turn_blocks=3)
    with open_engine_stack(stack_file) as stack:
        report = replay(stack.manager, stack.kv_view, chats.requests())
        assert isinstance(stack.primary.policy, CheckedPolicy)
        assert type(stack.primary.policy.inner).__name__ == "DeepestFirst"
        assert stack.primary.evicted_blocks > 0
    assert report.hits["cpu"] > 0
    assert report.corrupt_blocks == 0


@pytest.mark.usefixtures("stack_file")
@pytest.mark.slow
def test_the_test_on_the_page_finds_that_the_policy_keeps_the_rules() -> None:
    importlib.import_module("test_deepest_first").test_the_policy_keeps_the_rules()
