"""An engine tells where a block ends in its request: tails go before heads by that, whatever the order of the calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.performance.policy_hits import documents, hits_of
from tiered_kv.base import OffloadKey, ReqContext, get_offload_block_hash, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, CachePolicy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager

TOKENS = 16

Block = tuple[tuple[int, ...], int]
"""A prefix of a prompt, and the KV cache group."""


def key_of(block: Block) -> OffloadKey:
    prefix, group = block
    return make_offload_key(bytes(prefix), group)


def opened(policy: str | CachePolicy, num_blocks: int) -> TieringOffloadingManager:
    return TieringOffloadingManager(PrimaryRows(CPUBackend(PrimaryRegion(num_blocks, 8)), policy))


def telling(name: str, blocks: list[Block]) -> ReqContext:
    context = ReqContext(name)
    for block in blocks:
        context.set_offload_key_position(key_of(block), TOKENS * len(block[0]))
    return context


def blocks_of(prompt: tuple[int, ...], groups: int) -> list[Block]:
    return [(prompt[:end], group) for group in range(groups) for end in range(1, len(prompt) + 1)]


def evictions(manager: TieringOffloadingManager, count: int) -> Iterator[OffloadKey]:
    """Yield the keys that go when `count` new requests store a block each."""
    for number in range(count):
        output = manager.prepare_store([make_offload_key(b"\xff%d" % number, 0)], ReqContext(f"new {number}"))
        assert output is not None
        manager.on_schedule_end()
        yield from output.evicted_keys


def store(manager: TieringOffloadingManager, blocks: list[Block], context: ReqContext) -> Callable[[], None]:
    output = manager.prepare_store([key_of(block) for block in blocks], context)
    assert output is not None
    return lambda: manager.complete_store(output.keys_to_store, context)


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_a_head_that_returns_late_goes_after_its_tail(policy: str) -> None:
    """ARC and S3-FIFO remember the tail, so it is in their list of frequent blocks; the head is new."""
    blocks = blocks_of((1, 2, 3, 4), groups=1)
    manager = opened(policy, 4)
    store(manager, blocks[2:], telling("one", blocks))()
    for other in range(4):
        store(manager, [((9, other), 0)], ReqContext(f"other {other}"))()
    assert key_of(blocks[2]) not in manager.primary.blocks
    again = telling("again", blocks)
    for part in (blocks[2:], blocks[:2]):
        store(manager, part, again)()
        manager.on_schedule_end()
    assert list(evictions(manager, 4)) == [key_of(block) for block in reversed(blocks)]


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
@hypothesis.given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5),
    groups=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_no_head_goes_before_its_tail_in_whatever_order_a_request_stores(
    policy: str, prompts: list[tuple[int, ...]], groups: int, seed: int
) -> None:
    chance = random.Random(seed)
    wanted = {key_of(block): block for prompt in prompts for block in blocks_of(prompt, groups)}
    manager = opened(policy, len(wanted))
    ends: list[Callable[[], None]] = []
    for number, prompt in enumerate(prompts):
        blocks = blocks_of(prompt, groups)
        context = telling(str(number), blocks)
        present = [key_of(block) for block in blocks if key_of(block) in manager.primary.blocks]
        absent = [block for block in blocks if key_of(block) not in manager.primary.blocks]
        for end in ends:
            end()
        manager.prepare_load(present, context)
        ends = [lambda present=present, context=context: manager.complete_load(present, context)]  # type: ignore[misc]
        chance.shuffle(absent)
        while absent:
            size = chance.randint(1, len(absent))
            ends.append(store(manager, absent[:size], context))
            del absent[:size]
        chance.shuffle(ends)
        manager.on_request_finished(context)
        manager.on_schedule_end()
    for end in ends:
        end()
    resident = dict(wanted)
    for key in evictions(manager, len(wanted)):
        prefix, _ = resident.pop(key)
        deeper = [block for block in resident.values() if len(block[0]) > len(prefix) == len(_common(block[0], prefix))]
        assert not deeper, f"{prefix} went before {deeper}"


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return one[: len(other)] if one[: len(other)] == other else ()


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_positions_of_blocks_that_are_stored_in_order_change_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt for prompt, _ in zip(documents(), range(400), strict=False)]
    counted = hits_of(prompts, policy, 300)
    places = {make_offload_key(i.to_bytes(8, "big"), 0): index for prompt in prompts for index, i in enumerate(prompt)}
    monkeypatch.setattr(ReqContext, "get_offload_key_position", lambda _, key: TOKENS * (places[key] + 1))
    assert hits_of(prompts, policy, 300) == counted


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_untrue_positions_lose_no_block(policy: str) -> None:
    blocks = blocks_of((1, 2, 3), groups=2)
    manager = opened(policy, len(blocks) + 2)
    context = ReqContext("liar")
    for block in blocks:
        context.set_offload_key_position(key_of(block), 16)
    store(manager, blocks, context)()
    store(manager, [((7,), 0), ((8,), 0)], context)()  # of these it tells none
    assert len(list(evictions(manager, len(blocks) + 2))) == len(blocks) + 2


def test_a_tier_gets_the_blocks_of_all_groups_in_the_order_of_the_prefix() -> None:
    blocks = blocks_of((1, 2, 3), groups=2)
    manager = opened("lru", len(blocks))
    context = telling("one", blocks)
    output = manager.prepare_store([key_of(block) for block in blocks], context)
    assert output is not None
    assert output.keys_to_store == [key_of(block) for block in blocks], "the engine's order"
    written = manager.primary.written_by("one", set(output.keys_to_store))
    stored = [manager.primary.table.key[row] for row in written]
    assert [len(get_offload_block_hash(key)) for key in stored] == [1, 1, 2, 2, 3, 3]
