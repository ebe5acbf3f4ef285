"""The conformance suite fails for tiers that break the contract, with the message that names the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier, Lie, LyingTier
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.rig import OpenTier, TierRig
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier


class SmallTier(FourMethodTier):
    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "small")


class OverwritingTier(SmallTier):
    def submit_store(self, job_metadata: JobMetadata) -> None:
        for key in job_metadata.keys:
            self.blocks.pop(key, None)
        super().submit_store(job_metadata)


class GrouplessTier(WrapperTier):
    """Ignores the group of a key."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        assert isinstance(self.inner, FourMethodTier)
        return any(stored[:-4] == key[:-4] for stored in self.inner.blocks)


class ForgetfulResetTier(SmallTier):
    """Reports a reset that it does not perform."""

    def reset_cache(self) -> bool:
        return True


class StarvingTier(SmallTier):
    """Does one job at each poll, and a store only if no load waits."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(view)
        self._waiting: list[JobMetadata] = []

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._waiting.append(job_metadata)

    submit_load = submit_store

    def get_finished(self) -> Iterable[JobResult]:
        if self._waiting:
            job = next((job for job in self._waiting if job.is_promotion), self._waiting[0])
            self._waiting.remove(job)
            (super().submit_load if job.is_promotion else super().submit_store)(job)
        return super().get_finished()


class PhantomTier(SmallTier):
    """Answers True for a block before it is written."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(view)
        self._promised: list[JobMetadata] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self.blocks or any(key in job.keys for job in self._promised)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._promised.append(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        super().submit_load(job_metadata)
        for job in self._promised:
            super().submit_store(job)
        self._promised.clear()


MakeTier = Callable[[memoryview], SecondaryTierManager]


def liar(lie: Lie) -> MakeTier:
    return lambda view: LyingTier(FourMethodTier(None, view, "liar"), lie)


def wrapped(wrap: Callable[[SecondaryTierManager], SecondaryTierManager]) -> MakeTier:
    return lambda view: wrap(FourMethodTier(None, view, "wrapped"))


BYTES = "test_stored_blocks_load_as_the_same_bytes"
UNREPORTED = "were not reported"
JOBS = "test_many_jobs_in_flight_are_each_reported_once"
STARVING = "test_jobs_of_one_kind_that_never_end_do_not_starve_the_other"
ARGUMENTS: dict[str, dict[str, Any]] = {BYTES: {"blocks": 33}, STARVING: {"endless": "loads"}}  # Any: any parameter
FAULTS: dict[str, tuple[MakeTier, str, str]] = {
    "has everything": (liar(Lie.HAS_EVERYTHING), "test_an_absent_block_is_a_miss", "assert not"),
    "stores nothing": (liar(Lie.STORES_NOTHING), BYTES, "assert"),
    "loads nothing": (liar(Lie.LOADS_NOTHING), BYTES, "wrong bytes"),
    "flips bytes": (liar(Lie.FLIPS_BYTES), BYTES, "wrong bytes"),
    "writes elsewhere": (liar(Lie.WRITES_ELSEWHERE), BYTES, "outside a job"),
    "changes sources": (liar(Lie.CHANGES_SOURCES), BYTES, "changed by their own store"),
    "reports twice": (liar(Lie.REPORTS_TWICE), BYTES, "reported twice"),
    "reports nothing": (liar(Lie.REPORTS_NOTHING), BYTES, UNREPORTED),
    "reports unknown jobs": (liar(Lie.REPORTS_UNKNOWN_JOBS), BYTES, "never submitted"),
    "names unasked keys": (liar(Lie.NAMES_UNASKED_KEYS), BYTES, "not in its job"),
    "fails": (wrapped(lambda tier: FailingTier(tier, failing=True)), BYTES, "assert"),
    "never begins": (wrapped(lambda tier: HeldJobsTier(tier, Gate(is_open=False))), BYTES, UNREPORTED),
    "stores a part": (
        wrapped(lambda tier: FailingTier(tier, failing=True, fails=lambda key: key[0] % 2 == 1)),
        JOBS,
        "assert",
    ),
    "overwrites": (OverwritingTier, "test_a_present_block_is_not_overwritten", "wrong bytes"),
    "ignores groups": (wrapped(GrouplessTier), "test_groups_of_one_hash_are_different_blocks", "assert not"),
    "resets nothing": (ForgetfulResetTier, "test_a_reset_forgets_every_block_and_takes_new_ones", "assert"),
    "starves stores": (StarvingTier, STARVING, "behind loads that are always in flight"),
    "has phantoms": (PhantomTier, "test_a_block_that_is_answered_true_during_its_store_can_be_loaded", "assert"),
}


class HastyConformance(TierConformance):
    """The suite, in less time: a tier that starves stores does so for as long as the suite waits."""

    wait_s = 1.0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tier_that_breaks_the_contract_is_found(fault: str) -> None:
    make_tier, check, says = FAULTS[fault]
    wait_s = 0.1 if says == UNREPORTED else 60.0  # other jobs end, however busy the machine
    rig = TierRig(lambda spec, view: make_tier(view), num_blocks=512, block_bytes=512, wait_s=wait_s)
    arguments = ARGUMENTS.get(check, {})
    with pytest.raises(AssertionError) as failure:
        getattr(HastyConformance(), check)(rig, **arguments)
    assert says in str(failure.value)
    rig.close()


class TestFourMethodTier(TierConformance):
    """The smallest tier keeps the contract."""

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        return lambda spec, view: FourMethodTier(spec, view, "four-methods")
