"""What counts as a use: that an engine asks for blocks, and not that a transfer of them ends."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies as st

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import BUILT_IN_POLICIES
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager

PROMPTS, LENGTH = 5, 4
NUM_BLOCKS = PROMPTS * LENGTH

calls = st.lists(st.tuples(st.integers(0, PROMPTS - 1), st.integers(1, LENGTH)), min_size=1, max_size=12)
"""The prompt of a request, and how many blocks of it the request has."""


def opened(policy: str) -> TieringOffloadingManager:
    return TieringOffloadingManager(PrimaryRows(CPUBackend(PrimaryRegion(NUM_BLOCKS, 8)), policy))


def prompt(number: int, length: int = LENGTH) -> list[OffloadKey]:
    return [make_offload_key(b"%d.%d" % (number, index), 0) for index in range(length)]


def evictions(manager: TieringOffloadingManager) -> list[OffloadKey]:
    """Return all keys of prompts, in the order in which new requests evict them."""
    gone: list[OffloadKey] = []
    for number in range(NUM_BLOCKS):
        other = ReqContext(f"other {number}")
        output = manager.prepare_store([make_offload_key(b"other %d" % number, 0)], other)
        assert output is not None
        gone += output.evicted_keys
        manager.on_schedule_end()
    return gone


def serve(manager: TieringOffloadingManager, call: tuple[int, int], name: str) -> list[Callable[[], None]]:
    """Serve a request but for the ends of its transfers, which are returned."""
    context, keys = ReqContext(name), prompt(*call)
    present = [key for key in keys if key in manager.primary.blocks]
    ready = [key for key in present if manager.lookup(key, context)]
    ends = []
    if ready:
        manager.prepare_load(ready, context)
        ends.append(lambda: manager.complete_load(ready, context))
    output = manager.prepare_store(keys[len(present) :], context)
    assert output is not None
    ends.append(lambda: manager.complete_store(output.keys_to_store, context))
    manager.on_request_finished(context)
    manager.on_schedule_end()
    return ends


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
@hypothesis.given(calls=calls, data=st.data())
def test_the_order_of_eviction_is_that_of_uses_in_whatever_order_transfers_end(
    policy: str, calls: list[tuple[int, int]], data: st.DataObject
) -> None:
    at_once, later = opened(policy), opened(policy)
    running: list[Callable[[], None]] = []
    for number, call in enumerate(calls):
        running += serve(later, call, str(number))
        ended = serve(at_once, call, str(number))
        for end in ended:
            end()
        # A block that is being written cannot be used, so the next request would be another one.
        blocked = number + 1 < len(calls) and not all(
            later.primary.blocks[key].ref_cnt >= 0 for key in prompt(*calls[number + 1]) if key in later.primary.blocks
        )
        while running and (blocked or data.draw(st.booleans())):
            running.pop(data.draw(st.integers(0, len(running) - 1)))()
    while running:
        running.pop(data.draw(st.integers(0, len(running) - 1)))()
    assert evictions(later) == evictions(at_once)


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_a_read_of_a_secondary_tier_is_no_use(policy: str) -> None:
    manager = opened(policy)
    for number in range(PROMPTS):
        for end in serve(manager, (number, LENGTH), str(number)):
            end()
    expected = [key for number in range(PROMPTS) for key in reversed(prompt(number))]
    cascaded = manager.primary.ready(prompt(0))
    manager.primary.pin(cascaded)
    manager.primary.unpin(cascaded)
    assert evictions(manager) == expected


@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
def test_a_lookup_protects_blocks_for_its_step_and_is_no_use(policy: str) -> None:
    manager = opened(policy)
    for number in range(PROMPTS):
        for end in serve(manager, (number, LENGTH), str(number)):
            end()
    for key in prompt(0):
        manager.lookup(key, ReqContext("waits"))
    output = manager.prepare_store([make_offload_key(b"other", 0)], ReqContext("other"))
    assert output is not None
    assert output.evicted_keys == prompt(1)[-1:]
    manager.on_schedule_end()
    output = manager.prepare_store([make_offload_key(b"more", 0)], ReqContext("more"))
    assert output is not None
    assert output.evicted_keys == prompt(0)[-1:]
