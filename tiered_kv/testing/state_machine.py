"""A Hypothesis state machine over a whole stack, against a dictionary.

    def test_a_stack_with_my_tier_keeps_its_promises() -> None:
        run_state_machine_as_test(make_state_machine(open_my_stack))

The machine acts as an engine, on the test's thread: it makes all permitted calls, in any order, while tiers fail, hang
and lose data. `model` checks the invariants. What must stay true: preconditions depend only on the machine's own
actions, since the stack's answers may depend on its threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.model import StackModel, StackUnderTest
from tiered_kv.testing.rig import make_keys

OpenStack = Callable[[Path], StackUnderTest]
"""Opens a stack over a directory. The machine calls it again with the same directory: persistent tiers keep blocks."""

REQUESTS_MAX = 6  # that run at one time
TRANSFERS_MAX = 4  # open loads, and open stores

_picks = st.integers(0, 1 << 16)
_seldom = st.sampled_from([False, False, False, True])


def _prefixes() -> list[list[OffloadKey]]:
    """Return the keys of four chats: two with a common prefix, a third, and the third in another KV cache group."""
    shared = make_keys(3, "system prompt")
    return [
        shared + make_keys(5, "first chat"),
        shared + make_keys(5, "second chat"),
        make_keys(8, "long document"),
        make_keys(8, "long document", group_idx=1),
    ]


def make_state_machine(open_stack: OpenStack) -> type[RuleBasedStateMachine]:
    """Return a state machine for stacks of `open_stack`, with at least 12 blocks in the primary tier."""

    class StackStateMachine(_StackRules):
        @initialize()
        def open(self) -> None:
            self.directory = tempfile.TemporaryDirectory(prefix="tiered-kv-")
            self.model = StackModel(open_stack(Path(self.directory.name)))

        @rule(is_due=_seldom)
        def settle_and_reopen(self, is_due: bool) -> None:
            if is_due and self.model.has_much_stored:
                self.model.settle()
                self.model.manager.shutdown()
                self.model.reopen(open_stack(Path(self.directory.name)))

    return StackStateMachine


class _StackRules(RuleBasedStateMachine):
    """The actions of an engine, and the faults of its storage."""

    directory: tempfile.TemporaryDirectory[str]
    model: StackModel

    def _request(self, pick: int) -> str:
        return sorted(self.model.requests)[pick % len(self.model.requests)]

    def _store_at_once(self, request: ReqContext, keys: list[OffloadKey], *, success: bool) -> None:
        before = len(self.model.stores)
        self.model.begin_store(request, keys)
        if len(self.model.stores) > before:
            self.model.complete_store(before, success=success)

    # The engine's usual work.

    @rule(chat=st.integers(0, 3), length=st.integers(1, 8), waits=st.booleans())
    def serve(self, chat: int, length: int, waits: bool) -> None:
        """Play a whole request: look its keys up, load the found prefix, store the rest."""
        req_id = self.model.start(_prefixes()[chat][:length])
        request, keys = self.model.requests[req_id]
        found = self.model.look_up(req_id)
        if found:
            self.model.begin_load(req_id, found)
            self.model.complete_load(len(self.model.loads) - 1)
        self._store_at_once(request, keys[len(found) :], success=True)
        self.model.manager.on_schedule_end()
        self.model.finish(req_id)
        if waits and not self.model.faults_on:
            assert self.model.manager.drain_jobs(10.0)

    @rule(count=st.integers(4, 12), which=st.integers(0, 15))
    def store_others(self, count: int, which: int) -> None:
        """Store blocks that are seldom requested again, so that others are evicted."""
        request = ReqContext("filler")
        self._store_at_once(request, make_keys(count, f"filler-{which}"), success=True)
        self.model.manager.on_schedule_end()
        self.model.manager.on_request_finished(request)

    # The engine, step by step.

    @precondition(lambda self: len(self.model.requests) < REQUESTS_MAX)
    @rule(chat=st.integers(0, 3), length=st.integers(1, 8))
    def start_request(self, chat: int, length: int) -> None:
        self.model.start(_prefixes()[chat][:length])

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks)
    def begin_store(self, pick: int) -> None:
        request, keys = self.model.requests[self._request(pick)]
        if len(self.model.stores) < TRANSFERS_MAX:
            self.model.begin_store(request, keys)

    @rule(pick=_picks, success=st.sampled_from([True, True, True, False]))
    def complete_store(self, pick: int, success: bool) -> None:
        if self.model.stores:
            self.model.complete_store(pick % len(self.model.stores), success=success)

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks, pressure=st.integers(0, 12))
    def look_up_and_begin_load(self, pick: int, pressure: int) -> None:
        """Between the lookup and the load of one step, store `pressure` blocks, which need room."""
        req_id = self._request(pick)
        found = self.model.look_up(req_id)
        if pressure:
            request = ReqContext("pressure")
            self._store_at_once(request, make_keys(pressure, "pressure"), success=False)
            self.model.manager.on_request_finished(request)
        if found and len(self.model.loads) < TRANSFERS_MAX:
            self.model.begin_load(req_id, found)

    @rule(pick=_picks)
    def complete_load(self, pick: int) -> None:
        if self.model.loads:
            self.model.complete_load(pick % len(self.model.loads))

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks)
    def ask_once(self, pick: int) -> None:
        """Look up each key once, and do not wait for answers that are None."""
        request, keys = self.model.requests[self._request(pick)]
        for key in keys:
            self.model.check_answer(key, self.model.manager.lookup(key, request), request)

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks)
    def prefetch(self, pick: int) -> None:
        request, keys = self.model.requests[self._request(pick)]
        self.model.manager.prefetch(keys, request)

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks)
    def touch(self, pick: int) -> None:
        request, keys = self.model.requests[self._request(pick)]
        self.model.manager.touch(keys, request)

    @precondition(lambda self: self.model.requests)
    @rule(pick=_picks)
    def finish_request(self, pick: int) -> None:
        self.model.finish(self._request(pick))

    @rule()
    def end_step(self) -> None:
        self.model.manager.on_schedule_end()

    @rule()
    def poll(self) -> None:
        self.model.manager.poll()

    @rule()
    def take_events(self) -> None:
        list(self.model.manager.take_events())

    @precondition(lambda self: not self.model.faults_on)
    @rule()
    def drain(self) -> None:
        assert self.model.manager.drain_jobs(10.0)

    @rule(is_due=_seldom)
    def reset_cache(self, is_due: bool) -> None:
        if is_due and self.model.has_much_stored:
            self.model.reset()

    # Faults.

    @rule(seconds=st.sampled_from([0.1, 1.5, 11.0, 31.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.model.stack.clock.advance(seconds)

    @precondition(lambda self: self.model.stack.faults)
    @rule(pick=_picks, on=st.booleans())
    def switch_a_fault(self, pick: int, on: bool) -> None:
        names = sorted(self.model.stack.faults)
        self.model.switch_fault(names[pick % len(names)], on)

    @rule(is_due=_seldom)
    def corrupt(self, is_due: bool) -> None:
        if is_due and self.model.has_much_stored:
            self.model.stack.corrupt()

    @invariant()
    def transfers_keep_their_bytes(self) -> None:
        self.model.check_transfers()

    @invariant()
    def counts_add_up(self) -> None:
        self.model.check_counts()

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            self.model.settle()
        finally:
            self.model.manager.shutdown()
            self.directory.cleanup()
