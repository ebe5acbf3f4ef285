"""Tenants' shares of a memory tier: in a stack, in its counters, over a removal, and in a simulation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.entries import rig_of
from tests.support.stacks import manager_of, stack_of
from tiered_kv.base import ReqContext
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.namespace import Namespace
from tiered_kv.config.stack_config import load_config
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import ConfigError
from tiered_kv.hints import HINTS_KEY
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.toolkit.record import HEADER_BYTES
from tiered_kv.workload.request import Request
from tiered_kv.workload.simulation import Fleet, simulate

BLOCK_BYTES = 4096
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES
BLOCKS = 40
ENTRY: dict[str, object] = {"type": "memory", "capacity": BLOCKS * RECORD_BYTES, "lookup_timeout": "1h"}


def config_of(limits: dict[str, str] | None, **top: Any) -> dict[str, object]:
    return stack_of(ENTRY if limits is None else {**ENTRY, "limits": limits}, blocks=32, **top)


@pytest.fixture
def stack() -> Iterator[Stack]:
    with open_stack(config_of({"quiet": "25%", "default": "75%"})) as stack:
        yield stack


def put(stack: Stack, tenant: str, count: int, first: int = 0) -> None:
    for at in range(first, first + count, 5):
        keys = [f"{tenant}-{number}".encode() for number in range(at, at + 5)]
        assert stack.put(keys, bytes(5 * BLOCK_BYTES), hints={"tenant": tenant}) == 5
        assert stack.flush(60.0)


def counted(stack: Stack, name: str) -> dict[str, int]:
    found: dict[str, int] = stack.counters()["memory"]["tier"][f"tenant_{name}"]
    return found


def used(stack: Stack) -> dict[str, int]:
    return {name: count // RECORD_BYTES for name, count in counted(stack, "used_bytes").items() if count}


def put_back(stack: Stack) -> None:
    """Take the memory tier out and put it back: then it is empty."""
    removals, removed = manager_of(stack).removals, manager_of(stack).removed_tiers
    removals.ask("drain", "memory")
    wait_until(lambda: removed().get("memory") == "drained")
    removals.ask("attach", "memory")
    wait_until(lambda: not removed())


@pytest.fixture
def rig() -> Iterator[TierRig]:
    limits = TenantLimits({"a": "50%", "b": "50%"})
    spec = TierSpec("memory", BLOCK_BYTES, bytes(16), limits=limits)
    with closing(rig_of(ENTRY, block_bytes=BLOCK_BYTES, num_blocks=64, spec=spec)) as rig:
        yield rig


def test_a_tenant_that_floods_a_tier_leaves_another_its_share(stack: Stack) -> None:
    put(stack, "quiet", 10)
    put(stack, "flooding", 60)
    assert used(stack) == {"quiet": 10, "flooding": 30}
    assert counted(stack, "share_bytes")["quiet"] == BLOCKS * RECORD_BYTES // 4
    assert counted(stack, "evicted_blocks_total") == {"quiet": 0, "default": 0, "flooding": 30}
    found = np.zeros((1, BLOCK_BYTES), np.uint8)
    assert all(stack.get([f"quiet-{number}".encode()], found) for number in range(10))


def test_without_limits_the_least_recently_used_block_goes_whosever_it_is() -> None:
    with open_stack(config_of(None)) as stack:
        put(stack, "quiet", 10)
        put(stack, "flooding", 60)
        assert not stack.contains([b"quiet-0"])
        assert not any(name.startswith("tenant") for name in stack.counters()["memory"]["tier"])


def test_a_tenant_that_stores_more_than_its_share_takes_only_its_own(rig: TierRig) -> None:
    """Its share is counted with what comes: so the older block of another, whose share is full, stays."""
    theirs, own = make_keys(20, "b"), make_keys(20, "a")
    for at in range(0, 20, 5):
        rig.store(theirs[at : at + 5], tenant="b")
        rig.store(own[at : at + 5], tenant="a")
    rig.store(make_keys(5, "more"), tenant="a")
    assert rig.lookup_all(theirs) == [True] * 20
    assert rig.lookup_all(own).count(True) == 15


def test_after_a_reset_the_shares_count_from_nothing(rig: TierRig) -> None:
    rig.store(make_keys(40, "old"), tenant="a")
    assert rig.tier.reset_cache()
    rig.epoch += 1
    assert rig.store(make_keys(20, "b"), tenant="b").success
    assert rig.store(make_keys(20, "c"), tenant="c").success
    stats = rig.tier.stats()
    held = {name: count // RECORD_BYTES for name, count in stats["tenant_used_bytes"].items()}
    assert held == {"default": 0, "a": 0, "b": 20, "c": 20}
    assert rig.store(make_keys(5, "more"), tenant="b").success
    assert rig.lookup_all(make_keys(20, "c")) == [True] * 20


def test_stores_of_two_tenants_that_wait_count_for_their_own(rig: TierRig) -> None:
    """The queue runs small stores together, but not those of several tenants."""
    jobs = [
        rig.submit_store(make_keys(1, f"{tenant}-{number}"), tenant=tenant) for number in range(5) for tenant in "abc"
    ]
    rig.wait(jobs)
    held = rig.tier.stats()["tenant_used_bytes"]
    assert {name: held[name] // RECORD_BYTES for name in "abc"} == {"a": 5, "b": 5, "c": 5}


def test_blocks_of_one_store_that_two_tenants_use_count_for_their_own(stack: Stack) -> None:
    """Another tenant's request may use a shared prefix while it is written."""
    manager, keys = manager_of(stack), make_keys(8)
    contexts = [ReqContext(name, {HINTS_KEY: {"tenant": name}}) for name in ("quiet", "other")]
    for context in contexts:
        manager.on_new_request(context)
    assert manager.prepare_store(keys, contexts[0]) is not None
    manager.touch(keys[:3], contexts[1])
    manager.complete_store(keys, contexts[0])
    for context in contexts:
        manager.on_request_finished(context)
    assert stack.flush(60.0)
    assert used(stack) == {"quiet": 5, "other": 3}


def test_a_block_that_is_read_counts_for_its_tenant_until_the_read_ends(rig: TierRig) -> None:
    keys = make_keys(40)
    rig.store(keys, tenant="a")
    tier: Any = rig.tier
    tier._records[keys[0]].readers = 1  # as of a load that copies now
    rig.store(make_keys(30, "b"), tenant="b")
    rig.store(make_keys(10, "c"), tenant="b")
    stats = tier.stats()
    assert stats["used_bytes"] == sum(stats["tenant_used_bytes"].values()) <= BLOCKS * RECORD_BYTES
    assert stats["tenant_used_bytes"]["a"] >= RECORD_BYTES


def test_a_tier_that_was_taken_out_and_put_back_has_its_changed_limits(stack: Stack) -> None:
    manager_of(stack).tenant_limits()["memory"].change({"quiet": "50%", "default": "50%"})
    put(stack, "quiet", 10)
    put_back(stack)
    assert used(stack) == {}
    put(stack, "flooding", 30)
    put(stack, "quiet", 20, first=100)
    put(stack, "flooding", 60, first=100)
    assert used(stack) == {"quiet": 20, "flooding": 20}


def test_a_block_that_is_offered_again_counts_for_the_tenant_that_uses_it() -> None:
    """The tier lacks used blocks of two tenants: each gets a store of its own."""
    entry = {**ENTRY, "limits": {"a": "50%"}}
    with open_stack(stack_of(entry, blocks=64)) as stack:
        for tenant in "ab":
            put(stack, tenant, 5)
        put_back(stack)
        out = np.zeros((5, BLOCK_BYTES), np.uint8)
        end = time.monotonic() + 60.0
        while used(stack) != {"a": 5, "b": 5}:
            assert time.monotonic() < end
            for tenant in "ab":
                keys = [f"{tenant}-{number}".encode() for number in range(5)]
                assert stack.get(keys, out, hints={"tenant": tenant}) == 5
            stack.flush(60.0)


def test_a_simulation_follows_the_limits() -> None:
    requests = []
    for turn in range(10):
        requests.append(Request(100_000 * turn, 160, 16, tuple(range(10)), hints={"tenant": "quiet"}))
        requests += [
            Request(100_000 * turn + 1000 * number, 160, 16, tuple(range(first, first + 10)))
            for number, first in enumerate(range(1000 * turn + 100, 1000 * turn + 300, 10), 1)
        ]

    def config(limits: dict[str, object]) -> dict[str, object]:
        return stack_of({**ENTRY, "store_budget": "1MiB", **limits}, blocks=48)

    alone = Fleet(concurrency=1)
    limited = simulate(load_config(config({"limits": {"quiet": "25%", "default": "75%"}})), requests, alone)
    unlimited = simulate(load_config(config({})), requests, alone)
    assert limited.tiers["memory"].hits >= 85 > unlimited.tiers["memory"].hits


def test_tiers_over_a_caller_s_memory_refuse_limits_by_name() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    with pytest.raises(ConfigError, match=r"tiers\.0\.limits: a call over a caller's memory names no tenant"):
        DirectTiers(memory, block_bytes=BLOCK_BYTES, tiers=[{**ENTRY, "limits": {}}], namespace=Namespace(model="m"))
