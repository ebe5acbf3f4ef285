"""What every policy promises, in any order of events: exact counts, nothing protected goes, and tails before heads."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.support.policy_rows import make_ready, pin
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, CachePolicy, RequestChain, RowTable, density, make_policy
from tiered_kv.cpu.row_table import NO_KEY
from tiered_kv.cpu.writers import PROMOTED

NUM_BLOCKS = 40

Prefix = tuple[int, ...]

prompts = st.lists(st.integers(0, 2), min_size=3, max_size=7).map(tuple)
picks = st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=6)
counts = st.integers(1, 4)


class PolicyMachine(RuleBasedStateMachine):
    """A tier of few blocks, which holds prefixes of prompts, and its policy."""

    policy_name: str
    num_blocks = NUM_BLOCKS
    has_pins: bool
    """Whether blocks are pinned and protected. While they are, a head may go before a tail that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RowTable(self.num_blocks)
        self.policy: CachePolicy = make_policy(self.policy_name, self.table)
        self.resident: dict[Prefix, int] = {}
        self.pinned: dict[Prefix, int] = {}
        self.free = list(self.table.grow(self.num_blocks))
        self.last = RequestChain()
        self.step = 0

    @rule(prompt=prompts, chunk=st.integers(1, 4))
    def request(self, prompt: Prefix, chunk: int) -> None:
        """A request uses what is there of its prompt, and stores the rest in chunks."""
        chain = self.last = RequestChain()
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        found = next((index for index, prefix in enumerate(prefixes) if prefix not in self.resident), len(prefixes))
        if found:
            self.policy.use([self.resident[prefix] for prefix in prefixes[:found]], chain)
        for first in range(found, len(prefixes), chunk):
            wanted = prefixes[first : first + chunk]
            absent = [prefix for prefix in wanted if prefix not in self.resident]
            for prefix in wanted:
                if prefix in self.resident:
                    self.table.step[self.resident[prefix]] = self.step
            if len(absent) > len(self.free) and not self._make_room(len(absent) - len(self.free), chain):
                return
            new = [self._allocate(prefix) for prefix in absent]
            self.policy.admit(new, chain)
            if len(absent) < len(wanted):
                self.policy.use([self.resident[prefix] for prefix in wanted], chain)
            else:
                chain.extend(new, self.table)
            make_ready(self.policy, new)

    @rule(count=counts, is_spared=st.booleans())
    def evict(self, count: int, is_spared: bool) -> None:
        if is_spared:
            self.policy.use((), self.last)  # as a store that needs room does
        self._evict(count, self.last if is_spared else None)

    @rule()
    def use_again(self) -> None:
        rows = [row for row in self.resident.values() if self.table.chain[row] is self.last]
        self.policy.use(sorted(rows, key=self.table.position.__getitem__), self.last)

    @precondition(lambda self: self.has_pins)
    @rule(picks=picks)
    def pin(self, picks: list[int]) -> None:
        chosen = self._pick(picks, [prefix for prefix in self.resident if prefix not in self.pinned])
        pin(self.policy, [self.resident[prefix] for prefix in chosen])
        self.pinned.update((prefix, self.resident[prefix]) for prefix in chosen)

    @precondition(lambda self: self.pinned)
    @rule(picks=picks)
    def unpin(self, picks: list[int]) -> None:
        self._unpin(self._pick(picks, list(self.pinned)))

    @precondition(lambda self: self.has_pins)
    @rule(picks=picks, count=counts)
    def look_up(self, picks: list[int], count: int) -> None:
        """Requests are answered, which have not used their blocks yet; another one needs room in the same step."""
        for tail in self._pick(picks, list(self.resident)):
            for prefix in self.resident:
                if prefix == tail[: len(prefix)]:
                    self.table.step[self.resident[prefix]] = self.step
        self._evict(count, None)

    @precondition(lambda self: self.has_pins)
    @rule()
    def reset(self) -> None:
        """Everything is forgotten, but for what is pinned; a policy does not learn of that."""
        ready = {prefix: row for prefix, row in self.resident.items() if prefix not in self.pinned}
        self.policy.remove(list(ready.values()))
        for prefix in ready:
            self._free(prefix)

    @rule()
    def end_step(self) -> None:
        self.step += 1
        self.policy.end_step()

    def teardown(self) -> None:
        self._unpin(list(self.pinned))
        self.step += 1
        self.policy.end_step()
        self._evict(len(self.resident), None)
        assert not self.resident

    def _make_room(self, count: int, chain: RequestChain) -> bool:
        self.policy.use((), chain)
        return self._evict(count, chain) or self._evict(count, None)

    def _evict(self, count: int, spare: RequestChain | None) -> bool:
        held = {prefix: row for prefix, row in self.resident.items() if prefix not in self.pinned}
        assert len(self.policy) == len(held)
        may_go = {prefix for prefix, row in held.items() if self.table.step[row] != self.step}
        others = {prefix for prefix in may_go if self.table.chain[held[prefix]] is not spare}
        if self.policy_name != "density":  # which keeps a request's own blocks only while it has stored none
            may_go = others
        victims = self.policy.evict(count, self.step, spare)
        assert len(others) < count if victims is None else count <= len(may_go)
        if victims is None:
            assert len(self.policy) == len(held), "a refused eviction changes nothing"
            return False
        gone = {tuple(self.table.key[row]) for row in victims}
        assert len(victims) == len(gone) == count
        assert gone <= may_go
        if not self.has_pins:
            for prefix in may_go - gone:
                assert not any(prefix[:end] in gone for end in range(1, len(prefix))), "a head went before its tail"
        for prefix in gone:
            self._free(prefix)
        return True

    def _unpin(self, prefixes: list[Prefix]) -> None:
        make_ready(self.policy, [self.pinned.pop(prefix) for prefix in prefixes])

    def _allocate(self, prefix: Prefix) -> int:
        row = self.resident[prefix] = self.free.pop()
        self.table.key[row], self.table.ref_cnt[row] = OffloadKey(bytes(prefix)), PROMOTED
        return row

    def _free(self, prefix: Prefix) -> None:
        row, table = self.resident.pop(prefix), self.table
        table.key[row], table.chain[row], table.step[row], table.ref_cnt[row] = NO_KEY, None, -1, -1
        self.free.append(row)

    def _pick(self, picks: list[int], prefixes: list[Prefix]) -> list[Prefix]:
        return list(dict.fromkeys(prefixes[pick % len(prefixes)] for pick in picks)) if prefixes else []


@pytest.mark.hypothesis
@pytest.mark.parametrize("has_pins", [False, True], ids=["plain", "pins"])
@pytest.mark.parametrize("policy_name", BUILT_IN_POLICIES)
def test_a_policy_keeps_its_promises_in_any_order_of_events(
    policy_name: str, has_pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density, "LEARN_EVERY", 12)
    machine = type("Machine", (PolicyMachine,), {"policy_name": policy_name, "has_pins": has_pins})
    examples = hypothesis.settings().max_examples // 4
    run_state_machine_as_test(machine, settings=hypothesis.settings(max_examples=examples, stateful_step_count=30))


@pytest.mark.parametrize("num_blocks", [12, 16])
@pytest.mark.parametrize("policy_name", BUILT_IN_POLICIES)
def test_a_small_tier_keeps_them_over_many_requests(policy_name: str, num_blocks: int) -> None:
    """Blocks come back while a policy still remembers some of their keys: rare in the short runs above."""
    attributes = {"policy_name": policy_name, "num_blocks": num_blocks, "has_pins": False}
    machine = type("Machine", (PolicyMachine,), attributes)()
    chance = random.Random(0)
    for _ in range(1000):
        machine.request(tuple(chance.choices([0, 0, 1], k=chance.randint(1, 7))), chance.randint(1, 4))
        machine.end_step()
    machine.teardown()
