"""Fair shares: which tenant's block leaves the primary tier, before a policy chooses among the blocks of that tenant.

`PrimaryRows` makes one `FairShares` if the stack has `limits`, and calls it as its policy, on the scheduler's thread.
Each tenant has a policy of its own over its rows, so no eviction looks at the rows of others. What must stay true:
every evictable row is in one tenant's policy, and a tenant's `held` counts its rows in every state.

`Shares` chooses a tenant that holds more than its share. If none does, the blocks that were used least recently decide
which tenant loses one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from tiered_kv.config.limits import DEFAULT_TENANT, TenantLimits
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import CachePolicy
from tiered_kv.cpu.policies.checked import CheckedPolicy
from tiered_kv.cpu.row_table import RowTable, unwatched
from tiered_kv.shares import Shares, Tenant

_SAMPLES: Final = 16
"""Rows drawn at random to find the tenant whose blocks were used least recently."""


class PolicyTenant(Tenant):
    """A tenant of the primary tier, with the policy over its rows. It holds rows in every state."""

    __slots__ = ("policy",)

    def __init__(self, name: str, policy: CachePolicy) -> None:
        super().__init__(name)
        self.policy = policy


class FairShares(CachePolicy):
    """Chooses a tenant, and lets this tenant's policy choose the block.

    A block counts for the tenant whose request brought it into memory, also while others use it. A request that uses
    blocks of other tenants has a chain of its own in each of their policies (`RequestChain.guests`).

    Args:
        table: The state of the rows.
        make: Makes the policy of one tenant.
        limits: The limits by tenant.
        block_bytes: Bytes of a row.
    """

    def __init__(
        self, table: RowTable, make: Callable[[RowTable], CachePolicy], limits: TenantLimits, block_bytes: int
    ) -> None:
        super().__init__(table)
        self.limits = limits
        self._shares = Shares(limits, self.num_blocks, block_bytes, lambda name: PolicyTenant(name, make(table)))
        self.numbers = self._shares.numbers
        self._tenant_of: list[PolicyTenant | None] = unwatched([])  # by row; no tenant leads back to this list
        self._size = 0
        self._asking: PolicyTenant | None = None
        self._incoming = 0
        self._evicted_from: dict[PolicyTenant, None] = {}  # in this step
        self._chance = random.Random(0)
        self.ends_every_step = isinstance(self._shares.tenant(DEFAULT_TENANT).policy, CheckedPolicy)
        """Whether `end_step` is called after each step, and not only after those with an eviction."""

    def __len__(self) -> int:
        return self._size

    @property
    def tenants(self) -> list[PolicyTenant]:
        """All tenants that have had requests, and `DEFAULT_TENANT`. Any thread may call."""
        return self._shares.tenants

    @property
    def failure(self) -> str:
        """Why lru replaced a third-party policy of a tenant; empty while it is used."""
        return next(filter(None, (getattr(each.policy, "failure", "") for each in self.tenants)), "")

    def expect(self, chain: RequestChain, rows: int) -> None:
        """Note that room is made for so many rows of the request of `chain`; `evict` follows."""
        self._shares.follow_limits()
        self._asking, self._incoming = self._tenant_for(chain), rows

    def freed(self, rows: Collection[int]) -> None:
        """Note that rows became free without an eviction."""
        tenant_of = self._tenant_of
        for row in rows:
            if row < len(tenant_of) and (tenant := tenant_of[row]) is not None:
                tenant_of[row] = None
                tenant.held -= 1

    # As a policy.

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        tenant, tenant_of = self._tenant_for(chain), self._tenant_of
        if len(tenant_of) < len(self.table):
            tenant_of += [None] * (len(self.table) - len(tenant_of))
        for row in rows:
            tenant_of[row] = tenant
        tenant.held += len(rows)
        self._ready(tenant).admit(rows, chain)

    def add(self, rows: Collection[int]) -> None:
        self._size += len(rows)
        for tenant, own in self._by_tenant(rows):
            tenant.policy.add(own)

    def remove(self, rows: Collection[int]) -> None:
        self._size -= len(rows)
        for tenant, own in self._by_tenant(rows):
            tenant.policy.remove(own)

    def clear(self, rows: Iterable[int]) -> list[Any]:  # Any: the policies' own
        self._size = 0
        kept = list(rows) if self.ends_every_step else []  # the built-in policies do not look at them
        remains: list[Any] = []
        for tenant in self.tenants:
            remains += tenant.policy.clear([row for row in kept if self._tenant_of[row] is tenant])
        return remains

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.refresh()
        tenant = self._tenant_for(chain)
        if not rows:
            self._ready(tenant).use(rows, chain)
            for host, guest in (chain.guests or {}).items():
                guest.refresh()
                self._ready(host).use(rows, guest)
            return
        for host, own in self._by_tenant(rows):
            self._ready(host).use(list(own), chain if host is tenant else self._guest(chain, host))

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        if count > self._size:
            return None
        taken: list[tuple[PolicyTenant, list[int]]] = []
        missing = self._take_from_those_over(count, step, spare, taken)
        if missing:
            missing = self._take_by_recency(missing, step, spare, taken)
        if missing:
            for tenant, rows in taken:
                tenant.policy.add(rows)
                tenant.held += len(rows)
            return None
        self._size -= count
        victims: list[int] = []
        for tenant, rows in taken:
            tenant.evicted_blocks += len(rows)
            victims += rows
        for row in victims:
            self._tenant_of[row] = None
        return victims

    def end_step(self) -> None:
        for tenant in self.tenants if self.ends_every_step else self._evicted_from:
            tenant.policy.end_step()
        self._evicted_from.clear()

    # The tenant that loses blocks.

    def _take_from_those_over(
        self, count: int, step: int, spare: RequestChain | None, taken: list[tuple[PolicyTenant, list[int]]]
    ) -> int:
        """Evict up to `count` rows of tenants over their shares, and return how many are missing.

        Rows that engines have been granted in advance belong to no tenant, and make all shares smaller.
        """

        def take(tenant: PolicyTenant, wanted: int) -> int:
            rows = self._take(tenant, wanted, step, spare)
            if not rows and spare is not None and tenant is self._asking:
                # Its own request has all that it can give: others do not lose blocks for it.
                rows = self._take(tenant, wanted, step, None)
            if rows:
                taken.append((tenant, rows))
            return len(rows)

        return self._shares.evict(count, self._asking, self._incoming, take)

    def _take_by_recency(
        self, count: int, step: int, spare: RequestChain | None, taken: list[tuple[PolicyTenant, list[int]]]
    ) -> int:
        """Evict up to `count` rows of any tenants, and return how many are missing."""
        unable: set[PolicyTenant] = set()
        most = max(8, count // 8)
        while count and (tenant := self._least_recent(unable)) is not None:
            rows = self._take(tenant, min(count, most), step, spare)
            if not rows:
                unable.add(tenant)
                continue
            taken.append((tenant, rows))
            count -= len(rows)
        return count

    def _least_recent(self, unable: Collection[PolicyTenant]) -> PolicyTenant | None:
        """Return the tenant of the least recently used of some evictable rows, which are drawn at random.

        Clients make up names of tenants: only where no drawn row may go does it look at all of them.
        """
        tenant_of, table = self._tenant_of, self.table
        found, least = None, math.inf
        for row in self._chance.choices(range(len(tenant_of)), k=_SAMPLES):
            tenant, chain = tenant_of[row], table.chain[row]
            if tenant is None or tenant in unable or chain is None or table.ref_cnt[row]:
                continue
            if chain.last_use < least:
                found, least = tenant, chain.last_use
        if found is not None:
            return found
        able = [each for each in self.tenants if each not in unable and len(each.policy)]
        return max(able, key=lambda each: len(each.policy), default=None)

    def _take(self, tenant: PolicyTenant, count: int, step: int, spare: RequestChain | None) -> list[int]:
        """Evict `count` rows of one tenant, or as many of them as it can give."""
        policy = self._ready(tenant)
        if spare is not None and self._tenant_for(spare) is not tenant:
            spare = (spare.guests or {}).get(tenant)
        self._evicted_from[tenant] = None
        count = min(count, len(policy))
        while count:
            rows = policy.evict(count, step, spare)
            if rows is not None:
                tenant.held -= len(rows)
                return rows
            count //= 2
        return []

    # Tenants.

    def _tenant_for(self, chain: RequestChain) -> PolicyTenant:
        """Return the tenant of a request."""
        name = chain.hints.tenant if chain.hints is not None else ""
        return self._shares.tenant(name or DEFAULT_TENANT)

    def _ready(self, tenant: PolicyTenant) -> CachePolicy:
        """Return a tenant's policy, which knows the time, and how many rows are its own."""
        policy = tenant.policy
        policy.now_s = self.now_s
        policy.num_blocks = max(1, int(tenant.share), tenant.held)
        return policy

    def _guest(self, chain: RequestChain, host: PolicyTenant) -> RequestChain:
        """Return the chain that stands for a request in the policy of another tenant."""
        if chain.guests is None:
            chain.guests = {}
        guest = chain.guests.get(host)
        if guest is None:
            guest = chain.guests[host] = RequestChain()
        guest.hints, guest.position_of = chain.hints, chain.position_of
        guest.refresh()
        return guest

    def _by_tenant(self, rows: Collection[int]) -> Iterable[tuple[PolicyTenant, Collection[int]]]:
        """Return the rows of each tenant, in their order; most often all are of one tenant."""
        tenant_of = self._tenant_of
        found = dict.fromkeys(map(tenant_of.__getitem__, rows))
        if len(found) == 1:
            return [(tenant, rows) for tenant in found if tenant is not None]
        return [(each, [row for row in rows if tenant_of[row] is each]) for each in found if each is not None]
