"""A tier of ten servers of which one is dead, in simulated time: the blocks of the other nine are found."""

from __future__ import annotations

import hashlib
import itertools
from random import Random

from tests.support.simulation.storage import SimulatedStorage
from tests.support.simulation.tier import SimulatedTier
from tests.support.simulation.world import World
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.model import StackModel, StackUnderTest
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 64
SERVERS = 10
PROMPTS, PROMPT_BLOCKS = 60, 8
SECONDS = 120.0


def is_on_the_dead_one(key: OffloadKey) -> bool:
    return hashlib.blake2b(key).digest()[0] % SERVERS == 0


def reachable_of(keys: list[OffloadKey]) -> int:
    """Return how many blocks of a prompt come before the first that the dead server has."""
    return [*map(is_on_the_dead_one, keys), True].index(True)


class TenServers(SimulatedStorage):
    """Records spread over servers, of which one may die."""

    is_one_dead = False
    reason = ""
    unanswered = 0

    def store(self, key: OffloadKey, block: memoryview) -> str:
        return self.reason if self.is_one_dead and is_on_the_dead_one(key) else super().store(key, block)

    def load(self, key: OffloadKey, block: memoryview) -> str:
        return self.reason if self.is_one_dead and is_on_the_dead_one(key) else super().load(key, block)

    def has(self, key: OffloadKey) -> bool:
        if self.is_one_dead and is_on_the_dead_one(key):
            self.unanswered += self.reason != "unanswered"
            return False
        return super().has(key)


class ServersTier(SimulatedTier):
    """A tier over them, which says of a lost block what it knows: that the server, or that the tier failed."""

    def __init__(self, world: World, spec: TierSpec, region: PrimaryRegion) -> None:
        super().__init__(world, spec, region.kv_view, records_max=10_000)
        self.servers = TenServers(world, spec.namespace_digest, 10_000)
        self.storage = self.servers

    @property
    def lookup_failures(self) -> int:
        return self.servers.unanswered


def share_found(reason: str) -> tuple[float, int]:
    """Return what is found of the prefixes that living servers hold, and how often the breaker opened."""
    world, spec, rng = World(), TierSpec("servers", BLOCK_BYTES), Random(7)
    region = PrimaryRegion(48, BLOCK_BYTES)
    tier = ServersTier(world, spec, region)
    limits = TierSettings(type="servers", store_budget=32 * BLOCK_BYTES, load_budget=32 * BLOCK_BYTES)
    primary = CPUOffloadingManager(CPUBackend(region), "lru")
    manager = TieringOffloadingManager(primary, [tier], settings=[limits], clock=world.clock)
    model = StackModel(StackUnderTest(manager, world.clock))

    def end_step(seconds: float) -> None:
        manager.on_schedule_end()
        world.advance(seconds)
        manager.poll()

    prompts = [make_keys(PROMPT_BLOCKS, f"prompt {number}") for number in range(PROMPTS)]
    for keys in prompts:
        model.begin_store(ReqContext("first"), keys)
        model.complete_store(0, success=True)
        end_step(1.0)
    assert all(key in tier.storage.records for keys in prompts for key in keys)
    tier.servers.is_one_dead, tier.servers.reason = True, reason
    found = living = 0
    end_s = world.clock() + SECONDS
    # An engine that only loads. Nothing can be found of many requests in a row, as where prompts begin alike.
    order = itertools.cycle(sorted(prompts, key=reachable_of))
    while world.clock() < end_s:
        primary.reset_cache()
        keys = next(order)
        req_id = model.start(keys)
        request = model.requests[req_id][0]
        prefix: list[OffloadKey] = []
        while len(prefix) < len(keys):  # as an engine asks: nothing behind the first miss
            answer = manager.lookup(keys[len(prefix)], request)
            if answer is None:
                end_step(0.02)
            elif answer:
                prefix.append(keys[len(prefix)])
            else:
                break
        found += min(len(prefix), reachable_of(keys))  # the primary tier may have more
        living += reachable_of(keys)
        if prefix:
            model.begin_load(req_id, prefix)
            model.complete_load(0)
        model.finish(req_id)
        end_step(rng.random() * 0.1)
    opened = manager.counters()["servers"].get("breaker_opened_total", 0)
    world.advance(60.0)
    manager.poll()
    manager.shutdown(timeout_s=0.0)
    return found / living, opened


def test_a_dead_server_costs_its_own_blocks_only() -> None:
    share, opened = share_found("unanswered")
    assert opened == 0
    assert share >= 0.9


def test_a_tier_that_takes_it_for_its_own_failure_loses_the_others_blocks() -> None:
    """What the reason is there for; if this no longer holds, the test above proves nothing."""
    share, opened = share_found("timeout")
    assert opened > 0
    assert share < 0.9
