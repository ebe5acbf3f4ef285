"""The conformance suite fails for tiers that break the contract, and for the reason that it names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.faults import FailingTier, HeldJobsTier, PartialTier
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.gate import Gate
from tiered_kv.testing.lies import Lie, LyingTier
from tiered_kv.testing.rig import OpenTier, TierRig
from tiered_kv.tiering.base import JobMetadata, SecondaryTierManager
from tiered_kv.tiering.wrapper import WrapperTier


class OverwritingTier(FourMethodTier):
    def submit_store(self, job_metadata: JobMetadata) -> None:
        for key in job_metadata.keys:
            self.blocks.pop(key, None)
        super().submit_store(job_metadata)


class GrouplessTier(WrapperTier):
    """Takes the hash for the whole key."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        assert isinstance(self.inner, FourMethodTier)
        return any(stored[:-4] == key[:-4] for stored in self.inner.blocks)


class ForgetfulResetTier(FourMethodTier):
    """Says that it has forgotten everything, and has not."""

    def reset_cache(self) -> bool:
        return True


class PhantomTier(FourMethodTier):
    """Has a block, in its own eyes, before it is written."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "phantom")
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


def liar(lie: Lie) -> Callable[[memoryview], SecondaryTierManager]:
    return lambda view: LyingTier(FourMethodTier(None, view, "liar"), lie)


BYTES = "test_stored_blocks_load_as_the_same_bytes"
FAULTS: list[tuple[str, Callable[[memoryview], SecondaryTierManager], str, str]] = [
    ("has everything", liar(Lie.HAS_EVERYTHING), "test_an_absent_block_is_a_miss", "assert not"),
    ("stores nothing", liar(Lie.STORES_NOTHING), BYTES, "assert"),
    ("loads nothing", liar(Lie.LOADS_NOTHING), BYTES, "wrong bytes"),
    ("flips bytes", liar(Lie.FLIPS_BYTES), BYTES, "wrong bytes"),
    ("writes elsewhere", liar(Lie.WRITES_ELSEWHERE), BYTES, "nobody's job"),
    ("changes sources", liar(Lie.CHANGES_SOURCES), BYTES, "changed by their own store"),
    ("reports twice", liar(Lie.REPORTS_TWICE), BYTES, "reported twice"),
    ("reports nothing", liar(Lie.REPORTS_NOTHING), BYTES, "were not reported"),
    ("reports unknown jobs", liar(Lie.REPORTS_UNKNOWN_JOBS), BYTES, "nobody submitted"),
    ("names unasked keys", liar(Lie.NAMES_UNASKED_KEYS), BYTES, "not in its job"),
    (
        "fails",
        lambda view: FailingTier(FourMethodTier(None, view, "failing"), failing=True),
        BYTES,
        "assert",
    ),
    (
        "never begins",
        lambda view: HeldJobsTier(FourMethodTier(None, view, "held"), Gate(is_open=False)),
        BYTES,
        "were not reported",
    ),
    (
        "stores a part",
        lambda view: PartialTier(FourMethodTier(None, view, "partial"), lambda key: key[0] % 2 == 0),
        "test_many_jobs_in_flight_are_each_reported_once",
        "assert",
    ),
    (
        "overwrites",
        lambda view: OverwritingTier(None, view, "overwriting"),
        "test_a_present_block_is_not_overwritten",
        "wrong bytes",
    ),
    (
        "ignores groups",
        lambda view: GrouplessTier(FourMethodTier(None, view, "groupless")),
        "test_groups_of_one_hash_are_different_blocks",
        "assert not",
    ),
    (
        "resets nothing",
        lambda view: ForgetfulResetTier(None, view, "forgetful"),
        "test_a_reset_forgets_every_block_and_takes_new_ones",
        "assert",
    ),
    ("has phantoms", PhantomTier, "test_a_block_that_is_answered_true_during_its_store_can_be_loaded", "assert"),
]


@pytest.mark.parametrize(("make_tier", "check", "says"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_tier_that_breaks_the_contract_is_found(
    make_tier: Callable[[memoryview], SecondaryTierManager], check: str, says: str
) -> None:
    open_tier: OpenTier = lambda spec, view: make_tier(view)  # noqa: E731  a name with its type
    rig = TierRig(open_tier, num_blocks=512, block_bytes=512, wait_s=0.1)
    arguments = {"blocks": 33} if check == BYTES else {}
    with pytest.raises(AssertionError) as failure:
        getattr(TierConformance(), check)(rig, **arguments)
    assert says in str(failure.value)
    rig.close()
