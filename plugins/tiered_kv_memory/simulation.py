"""The memory tier for `tiered-kv simulate`: keys without bytes. With `limits`, tenants' blocks go as in the real tier.

The simulation calls it on its one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.settings import TierSettings
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv.toolkit.shares import SharedBlocks, TenantBlocks
from tiered_kv_memory.settings import MemorySettings


class MemoryKeys(KeyStore):
    """Keys of records that take the most bytes that a record can take."""

    def __init__(self, settings: TierSettings, block_bytes: int, clock: Callable[[], float]) -> None:
        super().__init__(settings, block_bytes, clock)
        assert isinstance(settings, MemorySettings)
        self._capacity = settings.capacity
        self._tenant_of: dict[OffloadKey, TenantBlocks] = {}
        limits = TenantLimits.of_entry(settings)
        self._tenants = None if limits is None else SharedBlocks(limits, settings.capacity)

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        if self._tenants is None:
            return super().store(keys)
        tenant = self._tenants.tenant(self.tenant)
        for key in reversed(keys):
            if key in self._written_s:
                continue
            missing = (len(self._written_s) + 1) * self.record_bytes - self._capacity
            if missing > 0 and self._tenants.make_room(missing, tenant, self.record_bytes, self._evict_of):
                oldest = next(iter(self._written_s))
                loser = self._tenant_of[oldest]
                loser.lose(oldest)
                self._evict_of(oldest, loser)
            self._written_s[key] = self.clock()
            self._tenant_of[key] = tenant
            tenant.keys[key] = None
            tenant.held += self.record_bytes
            self.written_blocks += 1
        return [key for key in keys if key in self._written_s]

    def use(self, keys: Sequence[OffloadKey]) -> None:
        super().use(keys)
        if self._tenants is not None:
            for key in reversed(keys):
                self._tenant_of[key].use(key)

    def _evict_of(self, key: OffloadKey, tenant: TenantBlocks) -> int:
        del self._written_s[key], self._tenant_of[key]
        tenant.held -= self.record_bytes
        self.evicted_blocks += 1
        return self.record_bytes
