"""What fair shares promise in any order of events, of any tier that has them: who loses blocks, and exact counts."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits

NUM_BLOCKS = 20
TENANTS = ("a", "b", "c")  # c has no share of its own
limits = st.fixed_dictionaries(
    {name: st.sampled_from(["0", "10%", "25%", "50%", "100%"]) for name in ("a", "b", "default")}
)
tenants = st.sampled_from(TENANTS)
picks = st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=6)


class TenantsMachine(RuleBasedStateMachine):
    """Requests of three tenants in a tier of few blocks, whose state `brought` repeats: whose each block is."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: dict[OffloadKey, str] = {}
        self.evicted = Counter[str]()
        self.numbers = 0

    @property
    @abstractmethod
    def tier_limits(self) -> TenantLimits:
        """Return the limits of the tier."""

    @abstractmethod
    def shares(self) -> Mapping[str, float]:
        """Return the share of each tenant that the tier knows now, in blocks."""

    @rule(limits=limits)
    def set_limits(self, limits: dict[str, str]) -> None:
        self.tier_limits.change(limits)

    def new_keys(self, count: int) -> list[OffloadKey]:
        self.numbers += count
        return [OffloadKey(b"%8d" % number) for number in range(self.numbers - count, self.numbers)]

    def held(self) -> dict[str, int]:
        return {name: count for name in TENANTS if (count := list(self.brought.values()).count(name))}

    def take_in(self, tenant: str, keys: list[OffloadKey], evicted: list[OffloadKey], may_go: set[OffloadKey]) -> None:
        """Note the blocks of a store, and what it has evicted of those that might go."""
        assert set(evicted) <= may_go
        losses = Counter(self.brought[key] for key in evicted)
        self.evicted += losses
        self.forget(evicted)
        self.brought.update(dict.fromkeys(keys, tenant))
        self.check_the_rule(losses, may_go - set(evicted))

    def check_the_rule(self, losses: Counter[str], left: set[OffloadKey]) -> None:
        """If a tenant lost blocks of its share, all that were over theirs have none left that may go."""
        share, now = self.shares(), self.held()
        for loser in losses:
            if now.get(loser, 0) + 1 > share[loser]:
                continue
            for other in now:
                may_lose = any(self.brought.get(key) == other for key in left)
                assert now[other] <= share[other] or not may_lose, f"{loser} lost blocks of its share for {other}"

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            del self.brought[key]

    def pick(self, picks: list[int], keys: list[OffloadKey]) -> list[OffloadKey]:
        return list(dict.fromkeys(keys[pick % len(keys)] for pick in picks)) if keys else []
