"""Stacks, a tier that a test controls, and an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import stacks
from tests.support.stacks import PATIENT, block_hashes
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.hooks import TierType
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import Seconds
from tiered_kv.stack.open import Stack
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 4096
WAIT_S = 60.0
OTHERS = make_keys(64, "other")
"""Blocks that are stored to evict others."""


class ObedientSettings(TierSettings):
    """The entry of an obedient tier."""

    ttl: Seconds | None = None


class ObedientTier(SecondaryTierManager):
    """Remembers keys, moves no bytes, and fails as a test says."""

    is_nonblocking = True

    def __init__(self, spec: object, view: memoryview, tier_type: str, settings: ObedientSettings) -> None:
        super().__init__(spec, view, tier_type)
        self.present: set[OffloadKey] = set()
        self.answers_nothing = False
        self.store_error: Exception | None = None
        self.store_reason = ""
        self.load_reason = ""
        self.holds_jobs = False
        self.own_counters: Mapping[Any, Any] = {}
        self._results: list[JobResult] = []
        self._held: list[JobMetadata] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None if self.answers_nothing else key in self.present

    def submit_store(self, job_metadata: JobMetadata) -> None:
        if self.holds_jobs:
            self._held.append(job_metadata)
            return
        if self.store_error is not None:
            raise self.store_error
        if not self.store_reason:
            self.present.update(job_metadata.keys)
        self._results.append(JobResult(job_metadata.job_id, not self.store_reason, reason=self.store_reason))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        if self.holds_jobs:
            self._held.append(job_metadata)
        else:
            self._results.append(JobResult(job_metadata.job_id, not self.load_reason, reason=self.load_reason))

    def get_finished(self) -> Iterable[JobResult]:
        results, self._results = self._results, []
        return results

    def stats(self) -> Mapping[str, Any]:
        return self.own_counters

    def reset_cache(self) -> bool:
        self.present.clear()
        return True

    def let_go(self) -> None:
        """End the held jobs, without success."""
        self._results += [JobResult(job.job_id, False, reason="late") for job in self._held]
        self._held.clear()


OBEDIENT_TYPE = TierType("obedient", ObedientSettings, lambda: ObedientTier)


@pytest.fixture(autouse=True)
def obedient_plugin() -> Iterator[None]:
    """Register the obedient tier for every test of a folder or file that imports this."""
    with stacks.plugged(OBEDIENT_TYPE):
        yield


def stack_of(*secondary: Mapping[str, object], **settings: Any) -> dict[str, object]:
    """Return the configuration of a stack with long timeouts."""
    return stacks.stack_of(*({**PATIENT, **entry} for entry in secondary), **settings)


def obedient(stack: Stack, index: int = 0) -> ObedientTier:
    tier = stack.secondary_tiers[index]
    assert isinstance(tier, ObedientTier)
    return tier


def put(stack: Stack, keys: Sequence[OffloadKey]) -> None:
    """Store blocks in all tiers."""
    assert stack.put(block_hashes(keys), np.zeros((len(keys), BLOCK_BYTES), np.uint8), timeout=WAIT_S) == len(keys)
    assert stack.flush(WAIT_S)


def get(stack: Stack, keys: Sequence[OffloadKey], timeout: float = WAIT_S) -> int:
    """Load blocks; return how many were found."""
    return stack.get(block_hashes(keys), np.zeros((len(keys), BLOCK_BYTES), np.uint8), timeout=timeout)


def evict_all(stack: Stack) -> None:
    """Make the primary tier evict all earlier blocks."""
    put(stack, OTHERS[: stack.region.num_blocks])


def put_below(stack: Stack, keys: Sequence[OffloadKey]) -> None:
    """Store blocks, and make the primary tier evict them."""
    put(stack, keys)
    evict_all(stack)


class Engine:
    """Calls the manager as a scheduler does: key by key, in steps, until the first miss."""

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self.manager = manager

    def begin(self, req_id: str) -> ReqContext:
        context = ReqContext(req_id)
        self.manager.on_new_request(context)
        return context

    def look_up(self, keys: Sequence[OffloadKey], context: ReqContext) -> int:
        """Return how many blocks precede the first miss, once they are promoted."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = 0
            for key in keys:
                answer = self.manager.lookup(key, context)
                if not answer:
                    break
                found += 1
            if found == len(keys) or answer is False:
                return found
            self.manager.on_schedule_end()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def load(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end()

    def request(self, keys: Sequence[OffloadKey], req_id: str) -> int:
        """Look blocks up, load those before the first miss, and end; return how many those were."""
        context = self.begin(req_id)
        found = self.look_up(keys, context)
        if found:
            self.load(keys[:found], context)
        self.end(context)
        return found

    def write(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, context)

    def store(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        context = self.begin(req_id)
        self.write(keys, context)
        self.end(context)


def misses(stack: Stack, tier: str) -> Mapping[str, int]:
    counted: Any = stack.counters()[tier].get("misses_total", {})
    return dict(counted)


def blocks(stack: Stack, tier: str) -> tuple[int, int]:
    """Return a tier's hits and misses."""
    counted: Any = stack.counters()[tier].get("blocks_total", {})
    return counted.get("hit", 0), counted.get("miss", 0)
