"""A scheduler's step is marked from its first call to its end, and delays workers within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.stacks import stack_of
from tiered_kv.base import ReqContext
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.step import PAUSES_MAX, STEP, give_way

CONTEXT = ReqContext("r")
KEYS = make_keys(2)
FIRST_CALLS: dict[str, Callable[[TieringOffloadingManager], object]] = {
    "lookup": lambda manager: manager.lookup(KEYS[0], CONTEXT),
    "lookup_many": lambda manager: manager.lookup_many(KEYS, CONTEXT),
    "prepare_store": lambda manager: manager.prepare_store(KEYS, CONTEXT),
    "prepare_load": lambda manager: manager.prepare_load((), CONTEXT),
}


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(stack_of(blocks=8)) as opened:
        yield opened


@pytest.mark.parametrize("first_call", FIRST_CALLS)
def test_a_step_is_marked_until_it_ends(stack: Stack, first_call: str) -> None:
    stack.manager.on_schedule_end()
    assert STEP.pauses_left == 0
    FIRST_CALLS[first_call](stack.manager)
    assert STEP.pauses_left == PAUSES_MAX
    give_way()
    assert STEP.pauses_left == PAUSES_MAX - 1
    stack.manager.on_schedule_end()
    assert STEP.pauses_left == 0


def test_a_step_without_an_end_delays_workers_a_limited_number_of_times(stack: Stack) -> None:
    stack.manager.lookup(KEYS[0], CONTEXT)
    for _ in range(PAUSES_MAX + 10):
        give_way()
    assert STEP.pauses_left == 0
