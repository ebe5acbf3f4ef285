"""The tiering manager over tiers whose jobs the test ends, with a clock that the test moves."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import pytest

from tiered_kv.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import ManualClock
from tiered_kv.tiering.account import EventSink
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.requests import ManagerLimits

BLOCK_BYTES = 64
JOB_TIMEOUT_S = TierSettings(type="tier").job_timeout
LOOKUP_TIMEOUT_S = TierSettings(type="tier").lookup_timeout
LARGE_BUDGETS: Mapping[str, object] = {"store_budget": 1 << 20, "load_budget": 1 << 20}


class ManualTier(SecondaryTierManager):
    """Holds its jobs until the test ends them."""

    is_nonblocking = True
    raises = ""
    can_reset = True
    reports_stored = False
    policy = OffloadPolicy.BLOCK_LEVEL
    lookup_failures = 0

    def __init__(self, view: memoryview, name: str) -> None:
        super().__init__(None, view, name)
        self.present: dict[OffloadKey, bool | None] = {}
        self.asked: list[OffloadKey] = []
        self.jobs: list[JobMetadata] = []
        self.results: list[JobResult] = []
        self.events: list[object] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        self._maybe_raise("lookup")
        self.asked.append(key)
        return self.present.get(key, False)

    def on_schedule_end(self) -> None:
        """Do nothing, unless a test replaces this."""

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._maybe_raise("submit_store")
        self.jobs.append(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._maybe_raise("submit_load")
        self.jobs.append(job_metadata)

    def get_finished(self) -> Iterable[JobResult]:
        self._maybe_raise("get_finished")
        results, self.results = self.results, []
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext(self.policy)

    def reset_cache(self) -> bool:
        self.present.clear()
        return self.can_reset

    def take_events(self) -> Iterable[OffloadingEvent]:
        taken, self.events = self.events, []
        return taken  # type: ignore[return-value]  # also invalid events

    def has(self, *numbers: int, answer: bool | None = True) -> None:
        """Have the tier answer for these blocks, and for no others."""
        self.present = dict.fromkeys(keys(*numbers), answer)

    def end(
        self,
        success: bool = True,
        only: Sequence[OffloadKey] | None = None,
        reason: str = "",
        ended_s: float | None = None,
    ) -> JobMetadata:
        """End the oldest job; with `only`, in part, and at `ended_s` if that was before."""
        job = self.jobs.pop(0)
        succeeded = list(job.keys) if success else list(only or ())
        if not job.is_promotion:
            self.present.update(dict.fromkeys(succeeded, True))
        self.results.append(JobResult(job.job_id, success, only, reason, ended_s))
        return job

    def _maybe_raise(self, method: str) -> None:
        if self.raises == method:
            raise RuntimeError(method)


class Bench:
    """A manager over manual tiers.

    Args:
        tiers: The settings of each tier.
        num_blocks: Blocks of the primary tier.
        limits: As the manager's.
        policy: The tiers' policy for each request.
        eviction: The primary tier's policy, by its name.
        reports_stored: As the tiers' property.
        compute_block_s: As the manager's.
        event_sink: As the manager's.
        of_type: Makes each tier.
    """

    def __init__(
        self,
        *tiers: Mapping[str, object],
        num_blocks: int = 8,
        limits: ManagerLimits | None = None,
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        eviction: str = "lru",
        reports_stored: bool = False,
        compute_block_s: float = math.inf,
        event_sink: EventSink | None = None,
        of_type: Callable[[memoryview, str], Any] = ManualTier,
    ) -> None:
        self.num_blocks = num_blocks
        self.limits = limits or ManagerLimits(promotion_blocks_max=6)
        self.clock = ManualClock()
        self.clock.advance(-self.clock() % 1.0)  # from a whole second on, sums of half seconds are exact
        self.region = PrimaryRegion(num_blocks, BLOCK_BYTES)
        self.primary = PrimaryRows(CPUBackend(self.region), eviction, enable_events=True)
        settings = [TierSettings.model_validate({"type": f"tier{at}", **each}) for at, each in enumerate(tiers)]
        self.tiers: list[ManualTier] = [of_type(self.region.kv_view, each.type) for each in settings]
        for tier in self.tiers:
            tier.policy = policy
            tier.reports_stored = reports_stored
        self.manager = TieringOffloadingManager(
            self.primary,
            self.tiers,
            settings=settings,
            limits=self.limits,
            compute_block_s=compute_block_s,
            event_sink=event_sink,
            clock=self.clock,
        )

    @property
    def tier(self) -> ManualTier:
        return self.tiers[0]

    @property
    def jobs(self) -> list[list[OffloadKey]]:
        """The keys of each job that a tier holds."""
        return [list(job.keys) for tier in self.tiers for job in tier.jobs]

    @property
    def free(self) -> int:
        return self.primary.backend.get_num_free_blocks()

    def counter(self, *path: str, tier: str = "tier0") -> int:
        return count_of(self.manager.counters()[tier], *path)

    def request(self, req_id: str) -> ReqContext:
        context = ReqContext(req_id)
        self.manager.on_new_request(context)
        return context

    def has_room_for(self, *numbers: int) -> bool:
        """Return whether a request gets rows for new blocks, which it takes."""
        return self.manager.prepare_store(keys(*numbers), self.request("another")) is not None

    def store(self, wanted: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(wanted, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)

    def load(self, wanted: list[OffloadKey], context: ReqContext) -> None:
        self.manager.prepare_load(wanted, context)
        self.manager.complete_load(wanted, context)

    def lookup(self, wanted: Iterable[OffloadKey], context: ReqContext) -> list[bool | None]:
        return [self.manager.lookup(key, context) for key in wanted]

    def calls_of_a_hit(self, key: OffloadKey) -> int:
        """Return how many functions a lookup of a ready block calls."""
        calls, context = 0, ReqContext("reader")

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            found = self.manager.lookup(key, context)
        finally:
            sys.setprofile(None)
        assert found is True
        return calls

    def step(self) -> None:
        self.manager.on_schedule_end()

    def promote(self, *numbers: int, tier: int = 0) -> ReqContext:
        """Return a request that waits for blocks which a tier is loading."""
        self.tiers[tier].has(*numbers)
        context = self.request("a")
        self.lookup(keys(*numbers), context)
        self.step()
        return context

    def end(self, success: bool = True, only: Sequence[OffloadKey] | None = None, reason: str = "") -> None:
        """End the oldest job of the first tier that has one, and the step."""
        next(tier for tier in self.tiers if tier.jobs).end(success, only, reason)
        self.step()


def keys(*numbers: int) -> list[OffloadKey]:
    return [make_offload_key(b"hash-%d" % number, 0) for number in numbers]


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(*tiers: Mapping[str, object], **options: object) -> Bench:
        benches.append(Bench(*(tiers or (LARGE_BUDGETS,)), **options))  # type: ignore[arg-type]  # options are Bench's own
        return benches[-1]

    yield make
    for bench in benches:
        for tier in bench.tiers:
            tier.raises = ""
            while tier.jobs:
                tier.end(success=False)
        bench.manager.shutdown(timeout_s=0)


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """A manager over one tier with large budgets."""
    return make_bench()
