"""The blocks of a tier by tenant, for a tier that evicts the least recently used block, and gives tenants shares.

The tier makes a `SharedBlocks` of `TierSpec.limits`, and calls it under the lock of its index. `use` needs no lock: so
the scheduler's thread may call it while workers evict. What must stay true: each key is in the keys of one tenant, and
the tier changes a tenant's `held` wherever it changes the bytes that it uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.shares import Shares, Tenant

__all__ = ["SharedBlocks", "TenantBlocks"]


class TenantBlocks(Tenant):
    """A tenant's blocks in a tier. It holds bytes."""

    __slots__ = ("keys",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.keys: OrderedDict[OffloadKey, None] = OrderedDict()
        """The least recently used first."""

    def use(self, key: OffloadKey) -> None:
        """Make a block the most recently used one of the tenant. Any thread may call."""
        try:
            self.keys.move_to_end(key)
        except KeyError:  # evicted meanwhile; `suppress` takes as long as all the rest
            pass

    def lose(self, key: OffloadKey) -> None:
        """Note that the tier evicts a block by its own order, because `make_room` found no tenant over its share."""
        self.keys.pop(key, None)
        self.evicted_blocks += 1


class SharedBlocks:
    """Chooses the blocks to evict by the tenants' shares: see `tiered_kv.shares`."""

    def __init__(self, limits: TenantLimits, capacity_bytes: int) -> None:
        self.limits = limits
        self._shares = Shares(limits, capacity_bytes, 1, TenantBlocks)
        self.tenant = self._shares.tenant
        """Returns a tenant by its name, such as `QueuedTier.part_tenant`."""
        self.numbers = self._shares.numbers
        """Returns the metrics of `stats`."""

    def make_room(
        self,
        missing_bytes: int,
        asking: TenantBlocks,
        incoming_bytes: int,
        evict: Callable[[OffloadKey, TenantBlocks], int],
    ) -> int:
        """Evict blocks of tenants that hold more than their shares, and return how many bytes are missing still.

        For these no tenant has to give up its share: the tier evicts by its own order.

        Args:
            missing_bytes: How much to evict.
            asking: The tenant whose store needs the room, and will hold `incoming_bytes` more.
            evict: Evicts a block of a tenant, and returns how many bytes this has released: 0 while it is being read.
        """

        def take(tenant: TenantBlocks, wanted_bytes: int) -> int:
            released = 0
            while released < wanted_bytes and tenant.keys:
                key, _ = tenant.keys.popitem(last=False)
                tenant.evicted_blocks += 1
                released += evict(key, tenant)
            return released

        self._shares.follow_limits()
        return self._shares.evict(missing_bytes, asking, incoming_bytes, take)

    def clear(self) -> list[OrderedDict[OffloadKey, None]]:
        """Forget all keys, at a reset; return what the tier has to drop, in parts if there is much of it."""
        old = [tenant.keys for tenant in self._shares.tenants if tenant.keys]
        for tenant in self._shares.tenants:
            tenant.keys = OrderedDict()
        return old
