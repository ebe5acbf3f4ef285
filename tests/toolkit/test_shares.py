"""A third-party tier gives tenants shares by the toolkit alone: a built-in tier's rule, metrics and changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.stack.exporters.test_prefetch import ask
from tests.support.stacks import plugged, stack_of
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.limits import Limits
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.toolkit import BlockingTier, Bytes, Outcome, Reason, TierSettings, TierType, common_metrics
from tiered_kv.toolkit.shares import SharedBlocks, TenantBlocks

BLOCK_BYTES = 4096
BLOCKS = 20
METRICS = common_metrics("capacity_bytes", "tenant_used_bytes", "tenant_share_bytes", "tenant_evicted_blocks_total")


class PantrySettings(TierSettings):
    type: str = "pantry"
    capacity: Bytes
    limits: Limits | None = None


class PantryTier(BlockingTier):
    """Keeps blocks in a dictionary, and evicts the least recently used."""

    def __init__(self, spec: Any, view: memoryview, tier_type: str, settings: PantrySettings) -> None:
        super().__init__(spec, view, tier_type, lookup_timeout_s=settings.lookup_timeout)
        self._pantry_lock, self._capacity_bytes = threading.Lock(), settings.capacity
        self._kept: OrderedDict[OffloadKey, tuple[bytes, TenantBlocks | None]] = OrderedDict()
        limits = self.tier_spec.limits
        self._shared = None if limits is None else SharedBlocks(limits, settings.capacity)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [key in self._kept for key in keys]

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        with self._pantry_lock:
            tenant = None if self._shared is None else self._shared.tenant(self.part_tenant)
            for key, block in zip(keys, blocks, strict=True):
                if key in self._kept:
                    continue
                missing = (len(self._kept) + 1) * self.block_bytes - self._capacity_bytes
                if missing > 0 and self._shared is not None and tenant is not None:
                    missing = self._shared.make_room(missing, tenant, self.block_bytes, self._evict)
                if missing > 0:
                    oldest, (_, loser) = next(iter(self._kept.items()))
                    if loser is not None:
                        loser.lose(oldest)
                    self._evict(oldest, loser)
                self._kept[key] = bytes(block), tenant
                if tenant is not None:
                    tenant.keys[key] = None
                    tenant.held += self.block_bytes
        return Outcome()

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        found = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self._kept:
                block[:] = self._kept[key][0]
                found.append(key)
        return Outcome(found, Reason.ABSENT)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in reversed(list(keys)):
            if key in self._kept:
                self._kept.move_to_end(key)
                if (tenant := self._kept[key][1]) is not None:
                    tenant.use(key)

    def stats(self) -> Mapping[str, Any]:
        shared = {} if self._shared is None else self._shared.numbers()
        return {**super().stats(), "capacity_bytes": self._capacity_bytes, **shared}

    def _evict(self, key: OffloadKey, tenant: TenantBlocks | None) -> int:
        del self._kept[key]
        if tenant is not None:
            tenant.held -= self.block_bytes
        return self.block_bytes


def pantry(**more: object) -> dict[str, object]:
    return {"type": "pantry", "capacity": BLOCKS * BLOCK_BYTES, "lookup_timeout": "1h", **more}


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with plugged(TierType("pantry", PantrySettings, lambda: PantryTier, metrics=METRICS)):
        yield


def put(stack: Stack, tenant: str, count: int, first: int = 0) -> None:
    for at in range(first, first + count, 5):
        keys = [f"{tenant}-{number}".encode() for number in range(at, at + 5)]
        assert stack.put(keys, bytes(5 * BLOCK_BYTES), hints={"tenant": tenant}) == 5
        assert stack.flush(60.0)


def held(stack: Stack) -> dict[str, int]:
    used: dict[str, int] = stack.counters()["pantry"]["tier"]["tenant_used_bytes"]
    return {name: count // BLOCK_BYTES for name, count in used.items() if count}


def test_the_blocks_of_a_quiet_tenant_stay_and_its_share_can_be_changed() -> None:
    entry = pantry(limits={"quiet": "25%", "default": "75%"})
    with open_stack(stack_of(entry, blocks=20, metrics={"listen": "127.0.0.1:0"})) as stack:
        put(stack, "quiet", 5)
        put(stack, "flooding", 30)
        assert held(stack) == {"quiet": 5, "flooding": 15}
        for tenant, limit in (("quiet", "50%"), ("default", "50%")):
            change = {"tenant": tenant, "limit": limit, "tier": "pantry"}
            status, answer = ask(stack.server, "POST", "/limits", change)
        assert status == 200
        assert answer["tiers"]["pantry"]["tenants"]["quiet"] == {
            "limit": "50%",
            "is_changed": True,
            "share_bytes": 10 * BLOCK_BYTES,
            "used_bytes": 5 * BLOCK_BYTES,
            "evicted_blocks": 0,
        }
        put(stack, "quiet", 10, first=5)
        put(stack, "flooding", 30, first=30)
        assert held(stack) == {"quiet": 10, "flooding": 10}


def test_it_works_without_limits_and_a_tier_without_the_field_refuses_them() -> None:
    with open_stack(stack_of(pantry(), blocks=20)) as stack:
        put(stack, "quiet", 5)
        put(stack, "flooding", 30)
        assert not stack.contains([b"quiet-0"])

    class Plain(TierSettings):
        type: str = "plain"

    with plugged(TierType("plain", Plain, lambda: PantryTier)), pytest.raises(ConfigError, match="belong to no tenant"):
        open_stack(stack_of({"type": "plain", "limits": {}}))
