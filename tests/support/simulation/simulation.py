"""The simulated engine and its faults: the actions on a stack, and the checks after each."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from random import Random

from tests.support.simulation.scenario import Action
from tests.support.simulation.storage import Mood, World
from tests.support.simulation.tiers import SimulatedTier, SimulatedToolkitTier
from tests.support.stacks import forget_memory
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import BUILT_IN_POLICIES
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.testing.model import RowLedger, StackModel, StackUnderTest, WatchedTier
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.requests import PAUSE_S_MAX, ManagerLimits

BLOCK_BYTES = 64
ADMISSIONS: tuple[dict[str, int], ...] = ({}, {}, {}, {"admit_after": 2}, {"write_budget": 1 << 50})
CHATS = 4
CHAT_BLOCKS = 8
REQUESTS_MAX = 6
TRANSFERS_MAX = 4
JOB_TIMEOUT_S = 0.5
LOOKUP_TIMEOUT_S = 0.2
HOLD_S = 0.4
REQUEST_WAIT_S = 2.0
STEP_S_MAX = 0.05
WAIT_S_MAX = 3.0
RECOVERY_S_MAX = 120.0

_MOODS = (
    Mood(block_s=0.05),
    Mood(answer_s=0.05),
    Mood(answer_s=0.4),
    Mood(is_wedged=True),
    Mood(is_mute=True),
    Mood(is_wedged=True, answer_s=0.5, lies=0.5),
    Mood(fails=0.3),
    Mood(fails=1.0),
    Mood(raises=0.2),
    Mood(raises=1.0),
    Mood(lies=0.5),
    Mood(lies=1.0),
    Mood(babbles=0.7),
    Mood(tears=0.5),
    Mood(block_s=0.1, fails=0.2, raises=0.1, lies=0.2, babbles=0.2, tears=0.2, answer_s=0.02),
)


@dataclass(slots=True)
class _Wait:
    """How long a request has waited since its last load, and when it was answered None last."""

    seconds: float = 0.0
    since_s: float = math.inf


class Simulation:
    def __init__(self, seed: int) -> None:
        rng = Random(f"stack {seed}")
        self.world = World()
        self.tiers: list[SimulatedTier | SimulatedToolkitTier] = []
        self._ledger = RowLedger()
        self.manager = self._open(rng)
        self.model = StackModel(StackUnderTest(self.manager, self.world.clock, ledger=self._ledger))
        self._waits: defaultdict[str, _Wait] = defaultdict(_Wait)
        self._fillers = 0
        self._polled_at_s = self.world.clock()

    def act(self, action: Action) -> None:
        """Do one action, and check all promises."""
        self.world.rng = Random(action.salt)
        getattr(self, action.name)()
        self.model.check_transfers()
        self.model.check_counts()
        self._check_limits()
        self._check_expiry()

    def conclude(self) -> None:
        """End all faults and all work; then every tier must be used again, and return what it stores."""
        self._end_faults()
        self._settle()
        self._check_recovery()
        self._settle()
        for tier in self.tiers:
            assert not tier.used_after_refusal, "a tier that could not forget was used again"

    def close(self) -> None:
        self._end_faults()
        self.model.loads.clear()
        self._end_step(JOB_TIMEOUT_S)
        self._end_step(JOB_TIMEOUT_S)
        self.manager.shutdown(timeout_s=0.0)

    def _end_faults(self) -> None:
        self.world.rng = Random(0)
        for tier in self.tiers:
            tier.storage.mood = Mood()

    # The engine.

    def start(self) -> None:
        if len(self.model.requests) < REQUESTS_MAX:
            self.model.start(self._chat()[: self.world.rng.randint(2, CHAT_BLOCKS)])

    def step(self) -> None:
        """Look up every request: answered ones go on, the others ask again."""
        for req_id in list(self.model.requests):
            self._look_at(req_id)
        self._end_step(self.world.rng.random() * STEP_S_MAX)

    def ask_on(self) -> None:
        """Look up until every request is answered."""
        asking = list(self.model.requests)
        while asking:
            asking = [req_id for req_id in asking if not self._look_at(req_id)]
            self._end_step(STEP_S_MAX)

    def finish_transfer(self) -> None:
        rng, model = self.world.rng, self.model
        if model.loads and (not model.stores or rng.random() < 0.5):
            model.complete_load(rng.randrange(len(model.loads)))
        elif model.stores:
            model.complete_store(rng.randrange(len(model.stores)), success=True)

    def fail_store(self) -> None:
        if self.model.stores:
            self.model.complete_store(self.world.rng.randrange(len(self.model.stores)), success=False)

    def abandon(self) -> None:
        if self.model.requests:
            self._finish(self._any_request())

    def prefetch(self) -> None:
        if self.model.requests:
            request, keys = self.model.requests[self._any_request()]
            self.manager.prefetch(keys, request)

    def touch(self) -> None:
        if self.model.requests:
            request, keys = self.model.requests[self._any_request()]
            self.manager.touch(keys, request)

    def ask_once(self) -> None:
        """Look up without a request id."""
        for key in self._chat():
            answer = self.manager.lookup(key, ReqContext())
            assert not answer or key in self.model.stored, f"block {key.hex()} was found, and is not there to be found"

    def store_others(self) -> None:
        """Store blocks that are not looked up again, so that others are evicted."""
        self._store_at_once(self._strangers(self.world.rng.randint(1, 12)))
        self._end_step(0.0)

    def store_under_a_load(self) -> None:
        """Store between the lookup and the load of one step."""
        if not self.model.requests:
            return
        req_id = self._any_request()
        found = self._found(req_id)
        self._store_at_once(self._strangers(12))
        if found and len(self.model.loads) < TRANSFERS_MAX:
            self.model.begin_load(req_id, found)
            self._waits[req_id] = _Wait()
        self._end_step(0.0)

    def take_events(self) -> None:
        list(self.manager.take_events())

    def reset(self) -> None:
        self.model.reset()

    # Time.

    def wait_briefly(self) -> None:
        self._end_step(self.world.rng.random() * 0.2)

    def wait_long(self) -> None:
        """Wait longer than any deadline."""
        self._end_step(self.world.rng.random() * WAIT_S_MAX)

    # Fate.

    def change_mood(self) -> None:
        tier, mood = self.world.rng.choice(self.tiers), self.world.rng.choice(_MOODS)
        tier.storage.mood = mood

    def wedge_busy(self) -> None:
        """Block the tiers that have transfers under way."""
        for tier in self.tiers:
            if tier.storage.transfers_running:
                tier.storage.mood = Mood(is_wedged=True)

    def heal(self) -> None:
        self.world.rng.choice(self.tiers).storage.mood = Mood()

    def damage(self) -> None:
        self.world.rng.choice(self.tiers).storage.damage(self.world.rng)

    def lose_everything(self) -> None:
        self.world.rng.choice(self.tiers).storage.records.clear()

    # How the stack is built.

    def _open(self, rng: Random) -> TieringOffloadingManager:
        region = PrimaryRegion(rng.choice((12, 14, 20)), BLOCK_BYTES)
        primary = PrimaryRows(CPUBackend(region), rng.choice(list(BUILT_IN_POLICIES)))
        limits = []
        self._watched: list[WatchedTier] = []
        for number in range(rng.choice((1, 2, 2, 3))):
            spec = TierSpec(f"tier-{number}", BLOCK_BYTES, bytes(range(16)))
            tier = self._tier(spec, region, rng)
            self.tiers.append(tier)
            self._watched.append(WatchedTier(tier, self._ledger))
            limits.append(
                TierSettings(
                    type=spec.name,
                    store_budget=rng.choice((4, 8, 12)) * BLOCK_BYTES,
                    load_budget=rng.choice((2, 8, 12)) * BLOCK_BYTES,
                    job_timeout=JOB_TIMEOUT_S,
                    lookup_timeout=LOOKUP_TIMEOUT_S,
                    fill_on_promotion=rng.random() < 0.5,
                    breaker_failures=rng.choice((1, 3, 5)),
                    breaker_cooldown=0.3,
                    **rng.choice(ADMISSIONS),
                )
            )
        self._limits = limits
        return TieringOffloadingManager(
            primary,
            self._watched,
            settings=limits,
            limits=ManagerLimits(
                promotion_blocks_max=rng.choice((None, 3, 8)),
                hold_s=HOLD_S,
                wait_max_s=REQUEST_WAIT_S,
                requests_max=100,
            ),
            clock=self.world.clock,
        )

    def _tier(self, spec: TierSpec, region: PrimaryRegion, rng: Random) -> SimulatedTier | SimulatedToolkitTier:
        records_max = rng.choice((12, 40, 1000))
        if rng.random() < 0.5:
            return SimulatedToolkitTier(
                self.world, spec, region.kv_view, records_max=records_max, lookup_timeout_s=LOOKUP_TIMEOUT_S
            )
        can_reset = rng.random() < 0.9
        return SimulatedTier(self.world, spec, region.kv_view, records_max=records_max, can_reset=can_reset)

    # What actions are made of.

    def _chat(self) -> list[OffloadKey]:
        number = self.world.rng.randrange(CHATS)
        shared = make_keys(3, "system prompt") if number < 2 else []
        return shared + make_keys(CHAT_BLOCKS - len(shared), f"chat {number}", group_idx=number % 2)

    def _strangers(self, count: int) -> list[OffloadKey]:
        self._fillers += 1
        return make_keys(count, f"filler {self._fillers}")

    def _any_request(self) -> str:
        return self.world.rng.choice(sorted(self.model.requests))

    def _end_step(self, seconds: float) -> None:
        self.manager.on_schedule_end()
        self.world.advance(seconds)
        self.manager.poll()
        self._polled_at_s = self.world.clock()

    def _found(self, req_id: str) -> list[OffloadKey] | None:
        """Return the prefix of a request that is found; None if it has to wait, which is bounded."""
        request, keys = self.model.requests[req_id]
        wait, now_s = self._waits[req_id], self.world.clock()
        wait.seconds += max(0.0, min(now_s - wait.since_s, PAUSE_S_MAX))
        wait.since_s = math.inf
        answers = self.manager.lookup_many(keys, request)
        if None in answers:
            assert wait.seconds < REQUEST_WAIT_S, f"{req_id} is answered None after it has waited as long as it may"
            wait.since_s = now_s
        found: list[OffloadKey] = []
        for key, answer in zip(keys, answers, strict=True):
            if answer is None:
                return None
            self.model.check_answer(key, answer, request)
            if not answer:
                break
            found.append(key)
        return found

    def _look_at(self, req_id: str) -> bool:
        """Look up a request; return whether it was answered."""
        found = self._found(req_id)
        if found is None:
            return False
        if len(self.model.loads) >= TRANSFERS_MAX or len(self.model.stores) >= TRANSFERS_MAX:
            return True
        request, keys = self.model.requests[req_id]
        if found:
            self.model.begin_load(req_id, found)
        self.model.begin_store(request, keys[len(found) :])
        self._finish(req_id)
        return True

    def _settle(self) -> None:
        """Complete all work in simulated time, and check that nothing is held then."""
        while self.model.loads:
            self.model.complete_load(0)
        while self.model.stores:
            self.model.complete_store(0, success=True)
        for req_id in list(self.model.requests):
            self._finish(req_id)
        self._drain()
        self._end_step(2 * HOLD_S)  # blocks found without a request id are held until then
        self.model.settle()

    def _drain(self) -> None:
        end_s = self.world.clock() + RECOVERY_S_MAX
        self._end_step(0.0)
        while self.manager.jobs_in_flight:
            assert self.world.clock() < end_s, "jobs were not reported though every fault has ended"
            self._end_step(1.0)

    def _finish(self, req_id: str) -> None:
        self._waits.pop(req_id, None)
        self.model.finish(req_id)

    def _store_at_once(self, keys: list[OffloadKey]) -> None:
        before = len(self.model.stores)
        request = ReqContext("others")
        self.manager.on_new_request(request)
        self.model.begin_store(request, keys)
        if len(self.model.stores) > before:
            self.model.complete_store(before, success=True)
        self.manager.on_request_finished(request)

    # What must hold.

    def _check_limits(self) -> None:
        for watched, limits in zip(self._watched, self._limits, strict=True):
            assert watched.store_blocks_peak * BLOCK_BYTES <= (limits.store_budget or 0), "a store budget was exceeded"
            assert watched.load_blocks_peak * BLOCK_BYTES <= (limits.load_budget or 0), "a load budget was exceeded"

    def _check_expiry(self) -> None:
        """As of the last poll, exactly the unreported jobs beyond their deadline count as expired."""
        counters = self.manager.counters()
        for tier in self.tiers:
            late = sum(deadline_s <= self._polled_at_s for deadline_s in tier.deadlines_s.values())
            counted = counters[tier.tier_type]
            assert counted.get("expired_jobs_total", 0) - counted.get("late_jobs_total", 0) == late, (
                "a job outlived its deadline"
            )

    def _check_recovery(self) -> None:
        """Without faults, blocks are stored in every tier, and promoted when the primary tier has lost them."""
        self._end_step(RECOVERY_S_MAX)  # past every cooldown
        usable = [tier for tier in self.tiers if not tier.reset_refused]
        keys = make_keys(2, "after all")
        for _ in range(10):  # a half-open breaker takes one job at a time, and admission more than one offer
            self._store_at_once(keys)
            self._end_step(5.0)
            if all(key in tier.storage.records for tier in usable for key in keys):
                break
            self._drain()
            forget_memory(self.manager)  # else a policy may keep them, and they are not offered again
        for tier in usable:
            assert all(key in tier.storage.records for key in keys), f"{tier.tier_type} is not stored to again"
        kept = [{key: tier.storage.records[key] for key in keys} for tier in usable]
        for tier, records in zip(usable, kept, strict=True):
            self._drain()  # what one tier gives may fill those above it
            forget_memory(self.manager)
            for other in self.tiers:
                for key in keys:
                    other.storage.records.pop(key, None)
            tier.storage.records.update(records)  # a small one may have had to evict them
            loaded_before = self.manager.counters()[tier.tier_type].get("loaded_blocks_total", 0)
            req_id = self.model.start(keys)
            while (found := self._found(req_id)) is None:
                self._end_step(0.1)
            assert found == keys, f"blocks that {tier.tier_type} has are not found in it"
            loaded = self.manager.counters()[tier.tier_type].get("loaded_blocks_total", 0) - loaded_before
            assert loaded == len(keys), f"{loaded} of {len(keys)} blocks came from {tier.tier_type}"
            self.model.begin_load(req_id, found)
            self.model.complete_load(len(self.model.loads) - 1)
            self.model.finish(req_id)
