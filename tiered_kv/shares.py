"""Fair shares: which tenant of a tier loses blocks. The tier's own order decides which of this tenant's blocks go.

The primary tier (`cpu/policies/shares.py`) and secondary tiers (`toolkit/shares.py`) have a `Shares` each, and call it
where they evict, on one thread or under one lock. Threads that show shares only read. What must stay true: a tenant's
`held` counts all that the tier keeps for it, also what is being written or read.

The rule: blocks go from the tenant that holds most of its share, while one holds more than its share. A share refuses
nothing, and reserves nothing that is free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, TypeVar

from tiered_kv.config.limits import DEFAULT_TENANT, TenantLimits, limit_bytes

TENANTS_MAX: Final = 1000
"""Limit of the tenants that `limits` does not name; the requests of further ones count for `DEFAULT_TENANT`."""
_ROUNDS_MAX: Final = 16
"""About how many times one eviction chooses a tenant, if several are over their shares."""
_NEAR: Final = 0.75
"""The part of its share above which an eviction looks at a tenant, while tenants hold so much of the tier together."""


class Tenant:
    """A tenant of a tier: what it may keep, and what it has."""

    __slots__ = ("_held", "changed", "counted", "evicted_blocks", "name", "share")

    def __init__(self, name: str) -> None:
        self.name = name
        self.share = 0.0  # units
        self._held = self.counted = 0  # units; how many of them count in the total of all tenants
        self.evicted_blocks = 0
        self.changed: dict[Any, None] = {}  # Any: tenants of this type
        """The tenants that hold more or less than at the last eviction."""

    @property
    def held(self) -> int:
        """What it has, in units. The tier changes it."""
        return self._held

    @held.setter
    def held(self, units: int) -> None:
        self._held = units
        self.changed[self] = None


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
        self._changed: dict[T, None] = {}
        self._total = 0  # of what all tenants held at the last eviction
        self._near: dict[T, None] = {}
        """The tenants that held more than `_NEAR` of their shares then."""
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
            tenant.changed = self._changed
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
        self._count_changes()
        part = max(self._total + incoming - count, 0) / self._units
        used: dict[T, int] = {}
        shares: dict[T, float] = {}
        over: list[tuple[float, int, T]] = []  # a heap: the one that holds most of its share is first
        orders = itertools.count()  # of equal ones the first, which is the one that waits longest
        near = self._near if asking is None else {**self._near, asking: None}
        for tenant in near if part >= _NEAR else self._tenants.values():
            held, share = tenant.held, tenant.share * part
            if tenant is asking:
                held += incoming
            if held > share:
                used[tenant], shares[tenant] = held, share
                over.append((-held / max(share, 0.5), next(orders), tenant))
        heapify(over)
        least = max(1, count // _ROUNDS_MAX)
        while count > 0 and over:
            negative_ratio, _, tenant = heappop(over)
            share = shares[tenant]
            excess = math.ceil(used[tenant] - share)
            next_ratio = -over[0][0] if over else 0.0
            until_next = math.ceil(used[tenant] - next_ratio * max(share, 0.5))
            taken = take(tenant, min(count, excess, max(until_next, least)))
            if not taken:
                continue
            count -= taken
            used[tenant] -= taken
            if used[tenant] > share:
                heappush(over, (max(negative_ratio, -used[tenant] / max(share, 0.5)), next(orders), tenant))
        return max(count, 0)

    def _count_changes(self) -> None:
        for tenant in self._changed:
            self._total += tenant.held - tenant.counted
            tenant.counted = tenant.held
            if tenant.held > tenant.share * _NEAR:
                self._near[tenant] = None
            else:
                self._near.pop(tenant, None)
        self._changed.clear()

    def _set_share(self, tenant: T) -> None:
        self._changed[tenant] = None
        limit = self._limits.get(tenant.name, self._limits[DEFAULT_TENANT])
        tenant.share = limit_bytes(limit, self._units * self._unit_bytes) / self._unit_bytes
