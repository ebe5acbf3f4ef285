"""Fair shares: which tenant of a tier loses blocks. The tier's own order decides which of this tenant's blocks go.

The primary tier (`cpu/policies/shares.py`) and secondary tiers (`toolkit/shares.py`) have a `Shares` each, and call it
where they evict, on one thread or under one lock. Threads that show shares only read. What must stay true: a tenant's
`held` counts all that the tier keeps for it, also what is being written or read.

The rule: blocks go from the tenant that holds most of its share, while one holds more than its share. A share refuses
nothing, and reserves nothing that is free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tiered_kv.config.limits import DEFAULT_TENANT, TenantLimits, limit_bytes

TENANTS_MAX: Final = 1000
"""Limit of the tenants that `limits` does not name; the requests of further ones count for `DEFAULT_TENANT`."""
_ROUNDS_MAX: Final = 16
"""About how many times one eviction chooses a tenant, if several are over their shares."""


class Tenant:
    """A tenant of a tier: what it may keep, and what it has."""

    __slots__ = ("evicted_blocks", "held", "name", "share")

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = 0.0  # units
        self.held = 0  # units
        self.evicted_blocks = 0


T = TypeVar("T", bound=Tenant)


class Shares(Generic[T]):
    """The tenants of a tier, and the rule that chooses among them.

    Args:
        limits: The limits, which may change.
        units: The capacity, in the units in which the tier counts: rows, or bytes.
        unit_bytes: Bytes of a unit.
        make: Makes the tier's object for a tenant.
    """

    def __init__(self, limits: TenantLimits, units: int, unit_bytes: int, make: Callable[[str], T]) -> None:
        self.limits = limits
        self._units, self._unit_bytes, self._make = units, unit_bytes, make
        self._limits = limits.latest  # those that count since the last eviction
        self._tenants: dict[str, T] = {}
        self._unnamed = 0
        self.tenant(DEFAULT_TENANT)

    @property
    def tenants(self) -> list[T]:
        """All tenants that have had requests, and `DEFAULT_TENANT`. Any thread may call."""
        return list(self._tenants.values())

    def tenant(self, name: str) -> T:
        """Return a tenant by its name; a new one unless there are too many."""
        tenant = self._tenants.get(name)
        if tenant is None:
            if name not in self._limits:
                if self._unnamed >= TENANTS_MAX:
                    return self._tenants[DEFAULT_TENANT]
                self._unnamed += 1
            tenant = self._tenants[name] = self._make(name)
            self._set_share(tenant)
        return tenant

    def share_bytes(self, name: str) -> int:
        """Return the share of a tenant by the last limits, in bytes. Any thread may call."""
        limits = self.limits.latest
        return limit_bytes(limits.get(name, limits[DEFAULT_TENANT]), self._units * self._unit_bytes)

    def numbers(self) -> dict[str, dict[str, int]]:
        """Return the metrics `vocabulary.TENANTS`: by name, the number of each tenant. Any thread may call."""
        found, named = self.tenants, dict.fromkeys(self.limits.latest, 0)  # those without a request yet have 0
        return {
            "tenant_used_bytes": named | {each.name: each.held * self._unit_bytes for each in found},
            "tenant_share_bytes": {name: self.share_bytes(name) for name in named | {each.name: 0 for each in found}},
            "tenant_evicted_blocks_total": named | {each.name: each.evicted_blocks for each in found},
        }

    def follow_limits(self) -> None:
        """Let limits count that have changed. Called before an eviction."""
        if self.limits.latest is not self._limits:
            self._limits = self.limits.latest
            self._unnamed = sum(name not in self._limits for name in self._tenants)
            for tenant in self._tenants.values():
                self._set_share(tenant)

    def evict(self, count: int, asking: T | None, incoming: int, take: Callable[[T, int], int]) -> int:
        """Evict up to `count` units of tenants over their shares, and return how many are missing.

        The incoming units count for the tenant that asks: else each store would take from others what is just its
        share. What the tier keeps for no tenant makes all shares smaller alike.

        Args:
            count: How many units to evict.
            asking: The tenant whose request needs the room; None if it is for no tenant.
            incoming: The units that `asking` will hold then, and does not yet.
            take: Evicts about so many units of a tenant and returns how many; 0 if none of its blocks may go.
        """
        total = sum([tenant.held for tenant in self._tenants.values()]) + incoming
        part = max(total - count, 0) / self._units
        used: dict[T, int] = {}
        shares: dict[T, float] = {}
        over: dict[T, float] = {}
        for tenant in self._tenants.values():
            held, share = tenant.held, tenant.share * part
            if tenant is asking:
                held += incoming
            if held > share:
                used[tenant], shares[tenant], over[tenant] = held, share, held / max(share, 0.5)
        least = max(1, count // _ROUNDS_MAX)
        while count > 0 and over:
            tenant = max(over, key=over.__getitem__)
            ratio = over.pop(tenant)
            share = shares[tenant]
            excess = math.ceil(used[tenant] - share)
            until_next = math.ceil(used[tenant] - max(over.values(), default=0.0) * max(share, 0.5))
            taken = take(tenant, min(count, excess, max(until_next, least)))
            if not taken:
                continue
            count -= taken
            used[tenant] -= taken
            if used[tenant] > share:
                over[tenant] = min(ratio, used[tenant] / max(share, 0.5))
        return max(count, 0)

    def _set_share(self, tenant: T) -> None:
        limit = self._limits.get(tenant.name, self._limits[DEFAULT_TENANT])
        tenant.share = limit_bytes(limit, self._units * self._unit_bytes) / self._unit_bytes
