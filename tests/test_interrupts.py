"""A signal handler that raises amid a call: nothing stays taken, held or open, and the calls after it work.

A sample of the proof in `tests/trust/test_interrupts.py`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import FrameType

import numpy as np
import pytest

from tests.support.interrupt_cases import BLOCK_BYTES, BLOCKS, CONTENT, INTERRUPTED, WAIT_S, check_stack, new_keys
from tests.support.interrupts import Interrupt, interrupt, signalled
from tests.support.stacks import PATIENT, Register, stack_of
from tests.support.threads import no_threads
from tiered_kv import interrupts
from tiered_kv.errors import ShutdownError
from tiered_kv.stack import open_stack
from tiered_kv.testing.control import Gate
from tiered_kv.testing.faults import HeldJobsTier
from tiered_kv.testing.rig import FourMethodTier
from tiered_kv.tiering.base import TierSpec

MEMORY: dict[str, object] = {"type": "memory", "capacity": "1 MiB", **PATIENT}


@pytest.mark.parametrize("verb", ["put", "get", "close", "wait-store", "direct-close"])
def test_an_interrupted_call_leaves_nothing_behind(verb: str) -> None:
    assert INTERRUPTED[verb](MEMORY, verb, 12) >= 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt of a generator's close
@pytest.mark.parametrize("verb", ["open_stack", "DirectTiers"])
def test_an_interrupted_opening_leaves_nothing_open(verb: str) -> None:
    assert INTERRUPTED[verb](MEMORY, verb, 199) >= 5


@pytest.fixture
def held(register: Register, closing: ExitStack) -> Gate:
    """Register the tier `held`, with a budget of two blocks, which ends no job before the gate opens."""
    gate = Gate(is_open=False)
    closing.callback(gate.open)

    class Held(HeldJobsTier):
        def __init__(self, spec: TierSpec, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    return gate


HELD: dict[str, object] = {"type": "held", "store_budget": 2 * BLOCK_BYTES, **PATIENT}


def test_a_put_that_waits_for_room_ends_when_it_is_interrupted(held: Gate) -> None:
    with open_stack(stack_of(HELD, blocks=BLOCKS)) as stack:
        assert stack.put(new_keys(2), CONTENT[:2]) == 2
        began_s = time.monotonic()
        with signalled(interrupt, 0.05), pytest.raises(Interrupt):
            stack.put(new_keys(2), CONTENT[:2], timeout=10 * WAIT_S)
        assert time.monotonic() - began_s < WAIT_S
        held.open()
        check_stack(stack)


def test_a_handler_may_close_the_stack_while_a_call_waits(held: Gate) -> None:
    stack = open_stack(stack_of(HELD, blocks=BLOCKS))
    assert stack.put(new_keys(2), CONTENT[:2]) == 2

    def close(number: int, frame: FrameType | None) -> None:
        try:
            stack.close(timeout=0.1)
        finally:
            held.open()

    with signalled(close, 0.05), pytest.raises(ShutdownError):
        stack.put(new_keys(2), CONTENT[:2], timeout=10 * WAIT_S)


def test_an_interrupted_caller_waits_a_limited_time_for_a_call_that_hangs(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_END_S", 0.1)
    gate.close()
    calls, began_s, undone = interrupts.CallThread("tiered-kv-calls"), time.monotonic(), Gate(is_open=False)

    def hang() -> bool:
        gate.pass_through()
        return True

    with signalled(interrupt, 0.05), pytest.raises(Interrupt):
        calls.run_only(hang, undo=lambda _: undone.open())
    assert time.monotonic() - began_s < WAIT_S / 2
    gate.open()
    undone.pass_through()


def test_without_a_thread_for_it_a_call_runs_all_the_same() -> None:
    with open_stack(stack_of(blocks=BLOCKS)) as stack, no_threads():
        keys = new_keys(2)
        assert stack.put(keys, CONTENT[:2]) == 2
        assert stack.get(keys, np.zeros_like(CONTENT[:2])) == 2
