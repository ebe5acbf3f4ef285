"""What fair shares of the memory tier promise in any order of events: the primary tier's rule, and its capacity."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from tests.support.entries import rig_of
from tests.support.shares_machine import NUM_BLOCKS, TenantsMachine, limits, picks, tenants
from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.record import HEADER_BYTES

BLOCK_BYTES = 64
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
RUN_BLOCKS = NUM_BLOCKS // 4
"""The most blocks that the tier makes room for at once."""
CAPACITY = NUM_BLOCKS * RECORD_BYTES + 7
owners = st.lists(tenants, min_size=4, max_size=4)


class MemorySharesMachine(TenantsMachine):
    """Stores and loads of three tenants in a memory tier with workers."""

    def __init__(self) -> None:
        super().__init__()
        spec = TierSpec("memory", BLOCK_BYTES, bytes(16), limits=TenantLimits({}))
        entry = {"type": "memory", "capacity": CAPACITY}
        self.rig = rig_of(entry, block_bytes=BLOCK_BYTES, num_blocks=64, spec=spec)

    @property
    def tier_limits(self) -> TenantLimits:
        assert self.rig.spec.limits is not None
        return self.rig.spec.limits

    def shares(self) -> dict[str, float]:
        shares: dict[str, int] = self.rig.tier.stats()["tenant_share_bytes"]
        return {name: share_bytes / RECORD_BYTES for name, share_bytes in shares.items()}

    @initialize(limits=limits, owners=owners)
    def begin(self, limits: dict[str, str], owners: list[str]) -> None:
        self.set_limits(limits)
        self.fill(owners)

    def fill(self, owners: list[str]) -> None:
        """The tier is full: so each store evicts."""
        for owner in owners:
            self.store(owner, RUN_BLOCKS)

    @rule(tenant=tenants, count=st.integers(2, RUN_BLOCKS))
    def store(self, tenant: str, count: int) -> None:
        before, keys = set(self.brought), self.new_keys(count)
        assert self.rig.store(keys, tenant=tenant).success, "nothing is refused because of a share"
        evicted = self.lost()
        assert len(evicted) == max(0, len(before) + count - NUM_BLOCKS), "what others leave free may be used"
        self.take_in(tenant, keys, evicted, before)

    @rule(stores=st.lists(st.tuples(tenants, st.integers(1, 12)), min_size=2, max_size=4))
    def store_at_once(self, stores: list[tuple[str, int]]) -> None:
        """Workers make room at the same time, in any order: the capacity holds, and the counts."""
        named = [(tenant, self.new_keys(count)) for tenant, count in stores]
        jobs = [self.rig.submit_store(keys, tenant=tenant) for tenant, keys in named]
        self.rig.wait(jobs)
        for tenant, keys in named:
            self.brought.update(dict.fromkeys(keys, tenant))
        evicted = self.lost()
        self.evicted.update(self.brought[key] for key in evicted)
        self.forget(evicted)

    @rule(tenant=tenants, picks=picks)
    def store_again(self, tenant: str, picks: list[int]) -> None:
        """Blocks that are stored go on counting for those that brought them."""
        assert self.rig.store(self.pick(picks, list(self.brought)), tenant=tenant).success

    @rule(picks=picks)
    def use(self, picks: list[int]) -> None:
        self.rig.tier.touch(self.pick(picks, list(self.brought)), self.rig.new_request())

    @rule(picks=picks)
    def load(self, picks: list[int]) -> None:
        keys = self.pick(picks, list(self.brought))
        assert self.rig.load(keys) == set(keys)

    @rule(owners=owners)
    def reset(self, owners: list[str]) -> None:
        assert self.rig.tier.reset_cache()
        self.brought.clear()
        self.counts_are_exact()
        self.fill(owners)

    @rule(owners=owners)
    def reopen(self, owners: list[str]) -> None:
        """As a tier that was taken out and put back: it is empty, and changed limits still count."""
        self.rig.reopen()
        self.brought.clear()
        self.evicted.clear()
        self.fill(owners)

    @invariant()
    def counts_are_exact(self) -> None:
        stats = self.rig.tier.stats()
        used, evicted = stats["tenant_used_bytes"], stats["tenant_evicted_blocks_total"]
        assert {name: held // RECORD_BYTES for name, held in used.items() if held} == self.held()
        assert sum(used.values()) == stats["used_bytes"] == len(self.brought) * RECORD_BYTES <= CAPACITY
        assert {name: count for name, count in evicted.items() if count} == dict(self.evicted)
        assert sum(evicted.values()) == stats["evicted_blocks_total"]

    def teardown(self) -> None:
        self.rig.close()

    def lost(self) -> list[OffloadKey]:
        answers = self.rig.lookup_all(list(self.brought)) if self.brought else []
        return [key for key, is_there in zip(self.brought, answers, strict=True) if not is_there]


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_shares_of_a_memory_tier_hold_in_any_order_of_events(part: int) -> None:
    examples = hypothesis.settings().max_examples // part  # each opens a tier, and waits for its workers
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=20)
    run_state_machine_as_test(MemorySharesMachine, settings=settings)
