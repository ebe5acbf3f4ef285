"""What fair shares of the primary tier promise in any order of events, and that nothing is refused."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from tests.support.shares import NoMemory
from tests.support.shares_machine import NUM_BLOCKS, TenantsMachine, limits, picks, tenants
from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, density
from tiered_kv.cpu.shared_rows import SharedRows
from tiered_kv.cpu.writers import PROMOTION
from tiered_kv.hints import Hints

endings = st.sampled_from(["commit", "abandon", "later"])


class SharesMachine(TenantsMachine):
    """Requests of three tenants in few rows, whose state `brought` and `pinned` repeat by key."""

    policy_name: str

    def __init__(self) -> None:
        super().__init__()
        backend = CPUBackend(NoMemory(NUM_BLOCKS))
        self.rows = SharedRows(backend, self.policy_name, {})
        self.pinned: dict[OffloadKey, int] = {}
        self.granted: list[int] = []
        self.writing: list[tuple[str, list[OffloadKey]]] = []
        self.chains: dict[str, RequestChain] = {}

    @property
    def tier_limits(self) -> TenantLimits:
        return self.rows.shares.limits

    def shares(self) -> dict[str, float]:
        usable = (NUM_BLOCKS - len(self.granted)) / NUM_BLOCKS
        return {each.name: each.share * usable for each in self.rows.shares.tenants}

    def chain_of(self, tenant: str, *, is_continued: bool = False) -> RequestChain:
        """Return the chain of a request: of a new one, or of the tenant's last one."""
        self.numbers += 1
        if not is_continued or tenant not in self.chains:
            self.chains[tenant] = RequestChain()
            self.chains[tenant].hints = Hints(tenant=tenant)
        return self.chains[tenant]

    @initialize(limits=limits, tenant=tenants, other=tenants)
    def fill(self, limits: dict[str, str], tenant: str, other: str) -> None:
        """Few rows, which are full: so most events evict."""
        self.set_limits(limits)
        for each in (tenant, other):
            self.store(each, NUM_BLOCKS // 2, "commit", is_continued=False)

    @rule(tenant=tenants, count=st.integers(1, 12), ends=endings, is_continued=st.booleans())
    def store(self, tenant: str, count: int, ends: str, is_continued: bool) -> None:
        chain, keys = self.chain_of(tenant, is_continued=is_continued), self.new_keys(count)
        if self.allocate(tenant, keys, chain, f"request-{self.numbers}"):
            writer = f"request-{self.numbers}"
            if ends == "commit":
                self.rows.commit(self.rows.written_by(writer, keys), keys)
            elif ends == "abandon":
                self.rows.abandon(self.rows.written_by(writer, keys))
                self.forget(keys)
            else:
                self.writing.append((writer, keys))

    @rule()
    def end_writing(self) -> None:
        for writer, keys in self.writing:
            if written := self.rows.written_by(writer, keys):
                self.rows.commit(written, keys)
        self.writing.clear()

    @rule(tenant=tenants)
    def promote(self, tenant: str) -> None:
        chain, keys = self.chain_of(tenant), self.new_keys(1)
        if self.allocate(tenant, keys, chain, PROMOTION):
            row = -2 - self.rows.index[keys[0]]
            self.rows.commit([row], keys)

    @rule(tenant=tenants, picks=picks)
    def use(self, tenant: str, picks: list[int]) -> None:
        """A request uses blocks of any tenants: they go on counting for those that brought them."""
        self.rows.touch(self.pick(picks, list(self.brought)), self.chain_of(tenant))

    @rule(picks=picks)
    def pin(self, picks: list[int]) -> None:
        ready = [key for key in self.brought if self.rows.row_of(key) is not None and key not in self.pinned]
        chosen = self.pick(picks, ready)
        rows = self.rows.ready(chosen)
        self.rows.pin(rows)
        self.pinned.update(zip(chosen, rows, strict=True))

    @rule(picks=picks)
    def unpin(self, picks: list[int]) -> None:
        self.rows.unpin([self.pinned.pop(key) for key in self.pick(picks, list(self.pinned))])

    @rule(picks=picks)
    def look_up(self, picks: list[int]) -> None:
        """Blocks that were found stay until the step ends."""
        self.rows.find_absent(self.pick(picks, list(self.brought)))

    @rule(count=st.integers(1, 8))
    def grant(self, count: int) -> None:
        may_go, before = self.may_go(), dict(self.brought)
        granted = self.rows.grant(count)
        assert (granted is None) == (count > len(may_go) + self.free_before)
        self.granted += granted or []
        evicted = [key for key in before if key not in self.rows]
        self.forget(evicted)
        self.check_the_rule(Counter(before[key] for key in evicted), set(may_go) - set(evicted))

    @rule(tenant=tenants)
    def adopt(self, tenant: str) -> None:
        keys = self.new_keys(len(self.granted))
        writer = f"request-{self.numbers}"
        stored, unused = self.rows.adopt(keys, self.granted, writer, self.chain_of(tenant))
        assert (stored, unused) == (keys, [])
        self.granted.clear()
        self.brought.update(dict.fromkeys(keys, tenant))
        if keys:
            self.rows.commit(self.rows.written_by(writer, keys), keys)

    @rule()
    def free_granted(self) -> None:
        self.rows.backend.free_rows(self.granted)
        self.granted.clear()

    @rule()
    def reset(self) -> None:
        self.end_writing()
        self.unpin(list(range(len(self.pinned))) or [0])
        self.rows.reset()
        self.brought = {key: tenant for key, tenant in self.brought.items() if key in self.pinned}
        if self.pinned:  # until their transfers end, they count
            self.rows.unpin(list(self.pinned.values()))
            self.pinned.clear()
            self.brought.clear()

    @rule()
    def end_step(self) -> None:
        self.rows.end_step()

    @invariant()
    def counts_are_exact(self) -> None:
        shares = self.rows.shares
        held = {tenant.name: tenant.held for tenant in shares.tenants if tenant.held}
        assert held == self.held()
        in_use = len(self.rows.table) - self.rows.backend.get_num_free_blocks() + NUM_BLOCKS - len(self.rows.table)
        assert in_use == sum(held.values()) + len(self.granted)
        evictable = [key for key in self.brought if self.rows.row_of(key) is not None and key not in self.pinned]
        assert len(shares) == sum(len(tenant.policy) for tenant in shares.tenants) == len(evictable)

    # The model.

    @property
    def free_before(self) -> int:
        return NUM_BLOCKS - len(self.brought) - len(self.granted)

    def may_go(self) -> list[OffloadKey]:
        rows, step = self.rows, self.rows.step
        ready = ((key, rows.row_of(key)) for key in self.brought if key not in self.pinned)
        return [key for key, row in ready if row is not None and rows.step_of[row] != step]

    def allocate(self, tenant: str, keys: list[OffloadKey], chain: RequestChain, writer: str) -> bool:
        free, may_go = self.free_before, self.may_go()
        evicted: list[OffloadKey] = []
        allocated = self.rows.allocate(keys, writer, chain, evicted)
        assert (allocated is None) == (len(keys) > free + len(may_go)), "nothing is refused because of a share"
        if allocated is None:
            assert not evicted
            return False
        chain.extend(allocated, self.rows.table)
        self.take_in(tenant, keys, evicted, set(may_go))
        return True


@pytest.mark.hypothesis
@pytest.mark.parametrize("policy_name", BUILT_IN_POLICIES)
def test_shares_hold_in_any_order_of_events(policy_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "LEARN_EVERY", 12)
    machine = type("Machine", (SharesMachine,), {"policy_name": policy_name})
    examples = hypothesis.settings().max_examples // 2
    run_state_machine_as_test(machine, settings=hypothesis.settings(max_examples=examples, stateful_step_count=30))
