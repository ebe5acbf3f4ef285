"""What is interrupted: calls of a stack and of tiers over a host's memory, and what must hold after each.

Each function `interrupt_...` interrupts a call at one in so many of its instructions, and returns at how many.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np

from tests.support.interrupts import Call, Interrupt, interrupt, interrupts, signalled
from tests.support.stacks import stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.metrics.instruments import count_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.stack_config import load_config
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

BLOCKS, BLOCK_BYTES = 8, 4096
WAIT_S = 60.0
CONTENT = np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)
_numbers = itertools.count()

Entry = Mapping[str, object]


def new_keys(count: int) -> list[OffloadKey]:
    return make_keys(count, f"interrupts-{next(_numbers)}")


def stack_calls(stack: Stack) -> dict[str, Callable[[], object]]:
    """Return the calls of a stack by their names, and store what they load."""
    known, out = new_keys(2), np.zeros_like(CONTENT)
    assert stack.put(known, CONTENT[:2]) == 2
    return {
        "put": lambda: stack.put(new_keys(2), CONTENT[:2]),
        "get": lambda: stack.get(known, out[:2]),
        "prefetch": lambda: stack.prefetch(known),
        "flush": stack.flush,
        "counters": stack.counters,
        "explain": lambda: stack.explain(known),
        "reset_cache": stack.reset_cache,
    }


def check_stack(stack: Stack) -> None:
    """Check that the stack stores in all of its memory and in its tier, and loads, as if nothing had happened.

    On another thread: a lock that is held makes this fail, not hang.
    """

    def check() -> None:
        assert stack.flush(WAIT_S)
        (name,) = stack.tier_names
        keys, before, out = new_keys(BLOCKS), stack.counters(), np.zeros_like(CONTENT)
        assert stack.put(keys, CONTENT, timeout=WAIT_S) == BLOCKS, "rows are taken"
        assert stack.flush(WAIT_S)
        after = stack.counters()
        stored = [count_of(each[name], "stored_blocks_total") for each in (before, after)]
        assert stored[1] == stored[0] + BLOCKS, "the tier's budget is taken"
        assert after[name]["pinned_bytes"] == 0 == after["cpu"]["promotion_blocks"]
        assert stack.get(keys, out, timeout=WAIT_S) == BLOCKS
        assert np.array_equal(out, CONTENT)

    _on_another_thread(check)


def interrupt_stack(entry: Entry, verb: str, one_in: int) -> int:
    with open_stack(stack_of(entry, blocks=BLOCKS)) as stack:
        call = stack_calls(stack)[verb]
        return _count(interrupts(lambda: call, one_in), lambda: check_stack(stack))


def interrupt_closing(entry: Entry, _: str, one_in: int) -> int:
    """After an interrupt, a second call closes the rest."""
    stacks: list[Stack] = []

    def used() -> Call:
        stacks.append(open_stack(stack_of(entry, blocks=BLOCKS)))
        stacks[-1].put(new_keys(2), CONTENT[:2])
        return stacks[-1].close

    return _count(interrupts(used, one_in), lambda: _close_all(stacks))


def interrupt_opening(entry: Entry, _: str, one_in: int) -> int:
    """Interrupts come where a signal handler may run. A test fails if it leaves anything open."""
    config = load_config(stack_of(entry, blocks=BLOCKS))
    stacks: list[Stack] = []
    found = interrupts(lambda: lambda: stacks.append(open_stack(config)), one_in, where_handlers_run=True)
    return _count(found, lambda: _close_all(stacks))


def direct_calls(tiers: DirectTiers) -> dict[str, Callable[[], object]]:
    known, offsets = new_keys(2), [0, BLOCK_BYTES]
    assert tiers.wait("store", known, offsets) == [True, True]
    return {
        "wait-store": lambda: tiers.wait("store", new_keys(2), offsets),
        "wait-load": lambda: tiers.wait("load", known, offsets),
        "wait-contains": lambda: tiers.wait("contains", known),
        "direct-store": lambda: tiers.store(new_keys(2), offsets, lambda _: None),
        "direct-load": lambda: tiers.load(known, offsets, lambda _: None),
        "direct-contains": lambda: tiers.contains(known, lambda _: None),
        "direct-reset": tiers.reset,
        "direct-counters": tiers.counters,
    }


def check_direct(tiers: DirectTiers) -> None:
    def check() -> None:
        keys, offsets = new_keys(2), [0, BLOCK_BYTES]
        wait_until(lambda: tiers.counters()[""]["open_tasks"] == 0, WAIT_S)
        assert tiers.wait("store", keys, offsets, timeout_s=WAIT_S) == [True, True]
        assert tiers.wait("contains", keys, timeout_s=WAIT_S) == [True, True]
        assert tiers.wait("load", keys, offsets, timeout_s=WAIT_S) == [True, True]
        # The task of the interrupted call may have been posted, and begin only now.
        wait_until(lambda: [each.get("jobs_in_flight", 0) for each in tiers.counters().values()] == [0, 0], WAIT_S)

    _on_another_thread(check)


def open_direct(entry: Entry) -> DirectTiers:
    return DirectTiers(CONTENT.copy(), block_bytes=BLOCK_BYTES, tiers=[entry], namespace=Namespace(model="m"))


def interrupt_direct(entry: Entry, verb: str, one_in: int) -> int:
    with open_direct(entry) as tiers:
        call = direct_calls(tiers)[verb]
        return _count(interrupts(lambda: call, one_in), lambda: check_direct(tiers))


def interrupt_direct_closing(entry: Entry, _: str, one_in: int) -> int:
    opened: list[DirectTiers] = []

    def used() -> Call:
        opened.append(open_direct(entry))
        opened[-1].wait("store", new_keys(2), [0, BLOCK_BYTES])
        return opened[-1].close

    return _count(interrupts(used, one_in), lambda: _close_all(opened))


def interrupt_direct_opening(entry: Entry, _: str, one_in: int) -> int:
    opened: list[DirectTiers] = []
    found = interrupts(lambda: lambda: opened.append(open_direct(entry)), one_in, where_handlers_run=True)
    return _count(found, lambda: _close_all(opened))


def interrupt_by_signals(entry: Entry, over: str, seconds: float) -> int:
    """Interrupt calls of a stack, or of tiers over a host's memory, by signals at random; return how many were."""
    hits, end_s = 0, time.monotonic() + seconds
    with ExitStack() as closing:
        if over == "stack":
            stack = closing.enter_context(open_stack(stack_of(entry, blocks=BLOCKS)))
            calls, check = stack_calls(stack), partial(check_stack, stack)
        else:
            tiers = closing.enter_context(open_direct(entry))
            calls, check = direct_calls(tiers), partial(check_direct, tiers)
        while time.monotonic() < end_s:
            for _ in range(20):
                call = random.choice(list(calls.values()))
                try:
                    with signalled(interrupt, random.uniform(5e-5, 1e-3)):
                        call()
                        call()
                except Interrupt:
                    hits += 1
            check()
    return hits


INTERRUPTED: Mapping[str, Callable[[Entry, str, int], int]] = {
    **dict.fromkeys(("put", "get", "prefetch", "flush", "counters", "explain", "reset_cache"), interrupt_stack),
    "close": interrupt_closing,
    "open_stack": interrupt_opening,
    **dict.fromkeys(("wait-store", "wait-load", "wait-contains"), interrupt_direct),
    **dict.fromkeys(("direct-store", "direct-load", "direct-contains"), interrupt_direct),
    **dict.fromkeys(("direct-reset", "direct-counters"), interrupt_direct),
    "direct-close": interrupt_direct_closing,
    "DirectTiers": interrupt_direct_opening,
}
"""How each call is interrupted."""


def _close_all(opened: list[Stack] | list[DirectTiers]) -> None:
    """Close on another thread: a lock that is held makes this fail, not hang."""
    while opened:
        close = opened.pop().close
        _on_another_thread(close)


def _count(interrupted: Iterator[int], check: Callable[[], None]) -> int:
    count = 0
    for _ in interrupted:
        check()
        count += 1
    check()  # after the call that was not interrupted
    return count


def _on_another_thread(check: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result(2 * WAIT_S)
