"""The primary tier's rows, of which tenants have shares.

A stack with `limits` makes one in place of `PrimaryRows`; the manager's thread owns it. Without `limits` nothing of
this runs. What must stay true: each row counts for one tenant from its first use until it is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import make_policy
from tiered_kv.cpu.policies.checked import checked_policy
from tiered_kv.cpu.policies.shares import FairShares
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.series import Family, by_label
from tiered_kv.metrics.vocabulary import TENANTS


class SharedRows(PrimaryRows):
    """`PrimaryRows` whose victims `FairShares` chooses.

    Args:
        backend: Allocates the rows.
        policy: The name of the policy that orders the blocks of each tenant.
        limits: The shares, by tenant.
        enable_events: As of `PrimaryRows`.
    """

    __slots__ = ()

    def __init__(
        self, backend: CPUBackend, policy: str, limits: Mapping[str, str], *, enable_events: bool = False
    ) -> None:
        self.shares = FairShares(
            backend.table,
            lambda table: checked_policy(make_policy(policy, table), table),
            TenantLimits(limits),
            backend.block_size,
        )
        super().__init__(backend, self.shares, enable_events=enable_events)
        self._ends_every_step = self.shares.ends_every_step
        self._is_granting = False

    def grant(self, count: int) -> list[int] | None:
        self._is_granting = True
        try:
            return super().grant(count)
        finally:
            self._is_granting = False

    def release(self, rows: Collection[int]) -> None:
        self.shares.freed(rows)
        super().release(rows)

    def measure(self) -> Iterator[tuple[str, list[Family]]]:
        numbers = self.shares.numbers()
        yield PRIMARY_NAME, [by_label(TENANTS[name], by_tenant) for name, by_tenant in numbers.items()]

    def _make_room(self, count: int, chain: RequestChain, evicted: list[OffloadKey], *, ahead: int = 0) -> bool:
        self.shares.expect(chain, 0 if self._is_granting else max(count, ahead))
        return super()._make_room(count, chain, evicted, ahead=ahead)


def primary_rows(
    backend: CPUBackend, policy: str, limits: Mapping[str, str] | None, *, enable_events: bool = False
) -> PrimaryRows:
    """Return the rows of a primary tier, with shares if there are `limits`."""
    if limits is None:
        return PrimaryRows(backend, policy, enable_events=enable_events)
    return SharedRows(backend, policy, limits, enable_events=enable_events)
