"""What fair shares of the nvme tier promise in any order of events: exact counts, right bytes, and its capacity."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.entries import rig_of
from tests.support.shares_machine import limits, picks, tenants
from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.base import TierSpec

BLOCK_BYTES = 4096
SEGMENTS, SEGMENT_BYTES = 8, 16 * BLOCK_BYTES
CAPACITY = SEGMENTS * (SEGMENT_BYTES + 4096) + (64 << 10)
STORED_MAX = 10


class NvmeSharesMachine(RuleBasedStateMachine):
    """Stores and loads of three tenants in a directory, which is opened again, also after a kill."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="nvme-shares-"))
        self.entry: dict[str, object] = {
            "type": "nvme",
            "path": str(self.folder / "0"),
            "capacity": CAPACITY,
            "segment": SEGMENT_BYTES,
        }
        self.spec = TierSpec("nvme", BLOCK_BYTES, bytes(16), limits=TenantLimits({}))
        self.rig = rig_of(self.entry, block_bytes=BLOCK_BYTES, num_blocks=64, spec=self.spec)
        self.brought: dict[OffloadKey, str] = {}
        """Whose each block is; empty for nobody's, and those of whom nobody knows it."""
        self.numbers = self.kills = 0

    def new_keys(self, count: int) -> list[OffloadKey]:
        self.numbers += count
        return [OffloadKey(b"%8d" % number) for number in range(self.numbers - count, self.numbers)]

    def settle(self) -> None:
        """Wait until the reclaimer has nothing to do, and forget what it has evicted."""
        wait_until(lambda: self.rig.tier.stats()["free_segments"] >= 2, 60.0)
        keys = list(self.brought)
        answers = self.rig.lookup_all(keys) if keys else []
        for key, is_there in zip(keys, answers, strict=True):
            if not is_there:
                del self.brought[key]

    @initialize(limits=limits)
    def begin(self, limits: dict[str, str]) -> None:
        self.set_limits(limits)

    @rule(limits=limits)
    def set_limits(self, limits: dict[str, str]) -> None:
        assert self.spec.limits is not None
        self.spec.limits.change(limits)

    @rule(tenant=tenants, counts=st.lists(st.integers(1, STORED_MAX), min_size=1, max_size=12))
    def store(self, tenant: str, counts: list[int]) -> None:
        for count in counts:
            keys = self.new_keys(count)
            assert self.rig.store(keys, tenant=tenant).success, "nothing is refused because of a share"
            self.brought.update(dict.fromkeys(keys, tenant))
        self.settle()

    @rule(stores=st.lists(st.tuples(tenants, st.integers(1, STORED_MAX)), min_size=2, max_size=4))
    def store_at_once(self, stores: list[tuple[str, int]]) -> None:
        named = [(tenant, self.new_keys(count)) for tenant, count in stores]
        self.rig.wait([self.rig.submit_store(keys, tenant=tenant) for tenant, keys in named])
        for tenant, keys in named:
            self.brought.update(dict.fromkeys(keys, tenant))
        self.settle()

    @rule(tenant=tenants, picks=picks)
    def store_again(self, tenant: str, picks: list[int]) -> None:
        """Blocks that are stored go on counting for those that brought them."""
        if keys := self.pick(picks):
            assert self.rig.store(keys, tenant=tenant).success

    @rule(picks=picks)
    def use(self, picks: list[int]) -> None:
        self.rig.tier.touch(self.pick(picks), self.rig.new_request())

    @rule(picks=picks)
    def load(self, picks: list[int]) -> None:
        if keys := self.pick(picks):
            assert self.rig.load(keys) == set(keys)

    @rule()
    def reset(self) -> None:
        assert self.rig.tier.reset_cache()
        self.rig.epoch += 1
        self.brought.clear()

    @rule()
    def restart(self) -> None:
        before = self.used()
        self.rig.reopen()
        self.settle()
        if len(before) and "" not in self.brought.values():
            assert {name: count for name, count in before.items() if count > self.used().get(name, 0)} == {}

    @rule()
    def kill(self) -> None:
        """Continue on a copy of the directory: what was being filled counts for nobody."""
        before = self.used()
        self.kills += 1
        self.entry["path"] = shutil.copytree(str(self.entry["path"]), str(self.folder / str(self.kills)))
        self.rig.reopen()
        self.settle()
        after = self.used()
        assert all(count <= before.get(name, 0) for name, count in after.items())
        self.brought = {key: tenant if after == before else "" for key, tenant in self.brought.items()}

    @invariant()
    def counts_are_exact(self) -> None:
        stats, used = self.rig.tier.stats(), self.used()
        present = Counter(self.brought.values())
        assert stats["blocks"] == len(self.brought)
        assert sum(used.values()) <= len(self.brought)
        if "" not in present:
            assert used == dict(present)
        assert sum(stats["tenant_evicted_blocks_total"].values()) <= stats["evicted_blocks_total"]
        assert stats["used_bytes"] <= CAPACITY

    @invariant()
    def every_block_has_its_bytes(self) -> None:
        assert self.rig.load(list(self.brought)[:32]) == set(list(self.brought)[:32])

    def used(self) -> dict[str, int]:
        used: dict[str, int] = self.rig.tier.stats()["tenant_used_bytes"]
        return {name: held_bytes // BLOCK_BYTES for name, held_bytes in used.items() if held_bytes}

    def pick(self, picks: list[int]) -> list[OffloadKey]:
        keys = list(self.brought)
        return list(dict.fromkeys(keys[pick * 7 % len(keys)] for pick in picks)) if keys else []

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)


@pytest.mark.hypothesis
@pytest.mark.parametrize("part", [20, pytest.param(2, marks=pytest.mark.slow)])
def test_shares_of_an_nvme_tier_hold_in_any_order_of_events(part: int) -> None:
    examples = max(1, hypothesis.settings().max_examples // part)  # each opens directories, and waits for its workers
    settings = hypothesis.settings(max_examples=examples, stateful_step_count=20)
    run_state_machine_as_test(NvmeSharesMachine, settings=settings)
