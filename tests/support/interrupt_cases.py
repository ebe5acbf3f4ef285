"""What is interrupted: calls of a stack and of tiers over a caller's memory, and what must hold after each."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from tests.support.interrupts import Call, Interrupt, interrupt, interrupts, signalled
from tests.support.stacks import stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.stack_config import load_config
from tiered_kv.direct import DirectTiers
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack, open_stack
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
    """Check that the stack stores in all of its memory and in its tier, and loads, as if nothing had happened."""

    def check() -> None:
        assert stack.flush(WAIT_S)
        (name,) = stack.tier_names
        keys, before, out = new_keys(BLOCKS), stack.counters(), np.zeros_like(CONTENT)
        assert stack.put(keys, CONTENT, timeout=WAIT_S) == BLOCKS, "rows are taken"
        assert stack.flush(WAIT_S)
        after = stack.counters()
        # A full fs directory may have evicted a block that was in memory: it is offered again, beside the new ones.
        stored, again = (
            count_of(after[name], each) - count_of(before[name], each)
            for each in ("stored_blocks_total", "offered_again_blocks_total")
        )
        assert stored - again == BLOCKS, "the tier's budget is taken"
        assert after[name]["pinned_bytes"] == 0 == after["cpu"]["promotion_blocks"]
        assert stack.get(keys, out, timeout=WAIT_S) == BLOCKS
        assert np.array_equal(out, CONTENT)

    _on_another_thread(check)


def direct_calls(tiers: DirectTiers) -> dict[str, Callable[[], object]]:
    known, offsets = new_keys(2), [0, BLOCK_BYTES]
    assert tiers.wait("store", known, offsets) == [True, True]
    return {
        "wait-store": lambda: tiers.wait("store", new_keys(2), offsets),
        "wait-load": lambda: tiers.wait("load", known, offsets),
        "wait-contains": lambda: tiers.wait("contains", known),
        "store": lambda: tiers.store(new_keys(2), offsets, lambda _: None),
        "load": lambda: tiers.load(known, offsets, lambda _: None),
        "contains": lambda: tiers.contains(known, lambda _: None),
        "reset": tiers.reset,
        "counters": tiers.counters,
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


class Subject(NamedTuple):
    """What is opened, called and closed."""

    opener: Callable[[Entry], Callable[[], Any]]
    calls: Callable[[Any], dict[str, Callable[[], object]]]
    """Returns its calls by their names, and stores what they load."""
    check: Callable[[Any], None]


SUBJECTS = {
    "stack": Subject(
        lambda entry: partial(open_stack, load_config(stack_of(entry, blocks=BLOCKS))), stack_calls, check_stack
    ),
    "direct": Subject(
        lambda entry: (
            lambda: DirectTiers(CONTENT.copy(), block_bytes=BLOCK_BYTES, tiers=[entry], namespace=Namespace(model="m"))
        ),
        direct_calls,
        check_direct,
    ),
}
VERBS = {
    "stack": ("put", "get", "prefetch", "flush", "counters", "explain", "reset_cache", "close", "open"),
    "direct": (
        *("wait-store", "wait-load", "wait-contains", "store", "load", "contains", "reset", "counters"),
        *("close", "open"),
    ),
}
CALLS = [(over, verb) for over, verbs in VERBS.items() for verb in verbs]


def interrupt_call(over: str, verb: str, entry: Entry, one_in: int) -> int:
    """Interrupt a call at one in so many of its instructions, and return at how many.

    After an interrupted close, a second one closes the rest. An opening is interrupted where a signal handler may run.
    A test fails if it leaves anything open.
    """
    subject, opened = SUBJECTS[over], list[Any]()
    open_one = subject.opener(entry)

    def used() -> Call:
        opened.append(open_one())
        subject.calls(opened[-1])
        return cast(Call, opened[-1].close)

    def close_all() -> None:
        while opened:
            _on_another_thread(opened.pop().close)

    if verb == "close":
        return _count(interrupts(used, one_in), close_all)
    if verb == "open":
        calls = interrupts(lambda: lambda: opened.append(open_one()), one_in, where_handlers_run=True)
        return _count(calls, close_all)
    with open_one() as one:
        call = subject.calls(one)[verb]
        return _count(interrupts(lambda: call, one_in), lambda: subject.check(one))


def interrupt_by_signals(over: str, entry: Entry, seconds: float) -> int:
    """Interrupt calls by signals at random; return how many were."""
    subject, hits, end_s = SUBJECTS[over], 0, time.monotonic() + seconds
    with subject.opener(entry)() as one:
        calls = list(subject.calls(one).values())
        while time.monotonic() < end_s:
            for _ in range(20):
                call = random.choice(calls)
                try:
                    with signalled(interrupt, random.uniform(5e-5, 1e-3)):
                        call()
                        call()
                except Interrupt:
                    hits += 1
            subject.check(one)
    return hits


def _count(interrupted: Iterator[int], check: Callable[[], None]) -> int:
    count = 0
    for _ in interrupted:
        check()
        count += 1
    check()  # after the call that was not interrupted
    return count


def _on_another_thread(check: Callable[[], object]) -> None:
    """Call on another thread: a lock that is held makes this fail, not hang."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result(2 * WAIT_S)
