"""Who loses blocks when tenants share the primary tier, by one rule; and a quiet tenant beside one that floods it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import pytest

from tests.support.shares import QUIET, NoMemory, flood, flooded, found_by_tenant, quiet_requests
from tiered_kv import shares
from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.chain import RequestChain
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, CachePolicy
from tiered_kv.cpu.row_table import RowTable
from tiered_kv.cpu.shared_rows import SharedRows
from tiered_kv.hints import Hints

numbers = itertools.count()


class Shared:
    """A tier of 100 rows, and what tenants do with it."""

    def __init__(self, policy: str = "lru", **limits: str) -> None:
        self.rows = SharedRows(CPUBackend(NoMemory(100)), policy, limits)
        self.evicted: list[OffloadKey] = []

    def request(self, tenant: str) -> RequestChain:
        chain = RequestChain()
        chain.hints = Hints(tenant=tenant)
        return chain

    def store(self, tenant: str, count: int, chain: RequestChain | None = None) -> list[OffloadKey]:
        chain = chain or self.request(tenant)
        keys, writer = [OffloadKey(b"%9d" % next(numbers)) for _ in range(count)], f"{next(numbers)}"
        rows = self.rows.allocate(keys, writer, chain, self.evicted)
        assert rows is not None, "a share refuses nothing"
        chain.extend(rows, self.rows.table)
        self.rows.commit(self.rows.written_by(writer, keys), keys)
        self.rows.end_step()
        return keys

    def held(self) -> dict[str, int]:
        return {tenant.name: tenant.held for tenant in self.rows.shares.tenants if tenant.held}


class OldestRow(CachePolicy):
    """A policy of another distribution."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self.rows: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Collection[int]) -> None:
        self.rows.update(dict.fromkeys(rows))

    def remove(self, rows: Collection[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        chain.take(rows, self.table)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> list[int] | None:
        chain_of, step_of = self.table.chain, self.table.step
        able = [row for row in self.rows if step_of[row] != step and chain_of[row] is not spare]
        if len(able) < count:
            return None
        self.remove(able[:count])
        return able[:count]


OTHERS = f"{__name__}:OldestRow"


@pytest.mark.parametrize("policy", [*BUILT_IN_POLICIES, OTHERS])
def test_who_is_over_its_share_loses_blocks_and_no_other_tenant(policy: str) -> None:
    shared = Shared(policy, quiet="30%", default="70%")
    kept = shared.store("quiet", 30)
    for _ in range(40):
        shared.store("flooding", 7)
    assert shared.held() == {"quiet": 30, "flooding": 70}
    assert len(shared.rows.ready(kept)) == 30
    assert shared.rows.shares.failure == ""


@pytest.mark.parametrize("policy", [*BUILT_IN_POLICIES, OTHERS])
def test_what_others_leave_free_may_be_used_and_is_taken_back_first(policy: str) -> None:
    shared = Shared(policy, a="20%", b="80%")
    shared.store("a", 100)
    assert shared.held() == {"a": 100}
    for _ in range(8):
        shared.store("b", 10)
    assert shared.held() == {"a": 20, "b": 80}


def test_the_tenant_that_holds_most_of_its_share_loses_first() -> None:
    shared = Shared(a="10%", b="40%", c="50%")
    for name, count in (("a", 25), ("b", 75)):
        shared.store(name, count)
    shared.store("c", 25)
    assert shared.held() == {"a": 15, "b": 60, "c": 25}, "both hold one and a half of their shares"


def test_a_tenant_without_a_share_loses_all_before_others_lose_one() -> None:
    shared = Shared(batch="0", a="50%", b="50%")
    shared.store("batch", 40)
    shared.store("a", 60)
    shared.store("b", 40)
    assert shared.held() == {"a": 60, "b": 40}


def test_an_eviction_looks_at_no_tenant_that_is_far_below_its_share() -> None:
    looked: list[str] = []

    class Looked(shares.Tenant):
        @property
        def share(self) -> float:
            looked.append(self.name)
            return self.given

        @share.setter
        def share(self, units: float) -> None:
            self.given = units

    tier = shares.Shares(TenantLimits({"default": "10%"}), 1000, 1, Looked)
    for number in range(500):
        tier.tenant(f"small-{number}").held += 1
    large = tier.tenant("large")
    large.held += 500
    taken: list[tuple[str, int]] = []

    def take(tenant: Looked, units: int) -> int:
        taken.append((tenant.name, units))
        tenant.held -= units
        return units

    assert tier.evict(2, tier.tenant("small-7"), 2, take) == 0
    looked.clear()
    assert tier.evict(3, tier.tenant("small-8"), 3, take) == 0
    assert taken == [("large", 2), ("large", 3)]
    assert set(looked) == {"large", "small-8"}
    tier.limits.change({"default": "0"})
    tier.follow_limits()
    large.held = 0
    assert tier.evict(1, large, 0, take) == 0
    assert taken[-1][0].startswith("small"), "with other limits others are over their shares"


def test_pinned_blocks_never_go_and_their_tenant_is_passed_over() -> None:
    shared = Shared(a="10%", b="10%")
    pinned = shared.rows.ready(shared.store("a", 60))
    shared.store("b", 40)
    shared.rows.pin(pinned)
    shared.store("c", 40)
    assert shared.held() == {"a": 60, "c": 40}


def test_a_long_request_over_its_share_gives_its_own_blocks_before_others_lose_any() -> None:
    shared = Shared(quiet="40%", default="60%")
    shared.store("quiet", 40)
    chain = shared.request("flooding")
    for _ in range(10):
        shared.store("flooding", 20, chain)
    assert shared.held() == {"quiet": 40, "flooding": 60}


def test_rows_that_engines_are_granted_in_advance_are_taken_from_all_shares() -> None:
    shared = Shared(a="50%", b="50%")
    shared.store("a", 50)
    shared.store("b", 50)
    for _ in range(30):
        granted = shared.rows.grant(10)
        assert granted is not None
        keys = [OffloadKey(b"%9d" % next(numbers)) for _ in granted]
        shared.rows.adopt(keys, granted, "engine", shared.request("a"))
        shared.rows.commit(shared.rows.written_by("engine", keys), keys)
        shared.rows.end_step()
        assert shared.held()["b"] >= 45  # half of the rows that no engine has in advance


def test_shares_of_more_than_the_memory_leave_blocks_of_idle_tenants_to_others() -> None:
    """If none is over its share, the least recently used blocks go, as without shares."""
    shared = Shared(default="50%")
    idle = [shared.store(f"idle-{number}", 10) for number in range(10)]
    for _ in range(30):
        shared.store("busy", 5)
    left = [len(shared.rows.ready(keys)) for keys in idle]
    assert shared.held()["busy"] == 50
    assert sum(left[:5]) < sum(left[5:])


def test_blocks_count_for_the_tenant_that_brought_them_also_while_others_use_them() -> None:
    shared = Shared(a="50%", b="50%")
    prompt = shared.store("a", 20)
    request = shared.request("b")
    shared.rows.touch(prompt, request)
    shared.store("b", 10, request)
    assert shared.held() == {"a": 20, "b": 10}
    shared.rows.touch(prompt, request)
    request.finish()
    for _ in range(20):
        shared.store("b", 10)
    assert len(shared.rows.ready(prompt)) == 20
    assert shared.held() == {"a": 20, "b": 80}


def test_a_smaller_share_takes_effect_with_later_stores() -> None:
    shared = Shared(a="80%", b="20%")
    shared.store("a", 80)
    shared.store("b", 20)
    shared.rows.shares.limits.change({"a": "20%", "b": "80%"})
    assert shared.held() == {"a": 80, "b": 20}
    for _ in range(6):
        shared.store("b", 10)
    assert shared.held() == {"a": 20, "b": 80}


def test_tenants_that_the_limits_do_not_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "TENANTS_MAX", 3)
    shared = Shared(a="10%")
    for number in range(9):
        shared.store(f"invented-{number}", 2)
    names = {tenant.name for tenant in shared.rows.shares.tenants}
    assert names == {"default", "invented-0", "invented-1", "invented-2"}
    assert shared.held()["default"] == 12


def test_a_reset_and_failed_writes_leave_nothing_that_counts() -> None:
    shared = Shared(a="10%", b="90%")
    shared.store("a", 10)
    keys = [OffloadKey(b"%9d" % next(numbers)) for _ in range(5)]
    assert shared.rows.allocate(keys, "failing", shared.request("b"), shared.evicted)
    shared.rows.abandon(shared.rows.written_by("failing", keys))
    assert shared.held() == {"a": 10}
    shared.rows.reset()
    shared.rows.end_step()
    assert shared.held() == {}
    assert len(shared.rows.shares) == 0


def kept_beside_a_flood(policy: str, blocks: int, chats: int, flooding: Iterator[tuple[int, ...]]) -> float:
    """Return the quiet tenant's hits beside ten times its requests, by those that its share alone would have."""
    quiet = quiet_requests(chats, active_chats=4)
    limits = {QUIET: "25%", "default": "75%"}
    _, alone = found_by_tenant(((QUIET, ids) for ids in quiet), policy, blocks // 4, None)
    _, beside = found_by_tenant(flooded(quiet, flooding, 10), policy, blocks, limits)
    assert alone[QUIET] > 100
    return beside[QUIET] / alone[QUIET]


@pytest.mark.parametrize("policy", [*BUILT_IN_POLICIES, OTHERS])
def test_a_quiet_tenant_keeps_its_hits_beside_one_that_floods_the_memory(policy: str) -> None:
    assert kept_beside_a_flood(policy, 480, 6, flood(480, is_chatting=False)) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("policy", BUILT_IN_POLICIES)
@pytest.mark.parametrize("blocks", [240, 800, 2400])
@pytest.mark.parametrize("kind", ["new", "chats", "the same system prompts"])
def test_it_keeps_them_in_any_size_and_beside_any_flood(policy: str, blocks: int, kind: str) -> None:
    flooding = flood(20_000, is_chatting=kind == "chats")
    if kind == "the same system prompts":
        heads = itertools.cycle(sorted({ids[:8] for ids in quiet_requests(40)}))
        flooding = ((*next(heads), *tail) for tail in flooding)
    assert kept_beside_a_flood(policy, blocks, 40, flooding) >= 0.95
