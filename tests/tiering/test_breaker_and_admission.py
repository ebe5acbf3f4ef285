"""The two small judges: may this tier be used, and is this block worth storing."""

from __future__ import annotations

from tiered_kv.base import ReqContext, make_offload_key
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBlock
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.admission import Admission
from tiered_kv.tiering.base import JobMetadata, JobResult, TierSpec
from tiered_kv.tiering.breaker import Breaker, BreakerState
from tiered_kv.tiering.guarded import GuardedTier
from tiered_kv.toolkit.status import RecordStatus


def state_of(breaker: Breaker) -> str:
    return breaker.state.name.lower()


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(failures_max=3, cooldown_s=5)
    for _ in range(10):
        breaker.fail(0)
        breaker.fail(0)
        breaker.succeed()
    assert state_of(breaker) == "closed"
    for _ in range(3):
        breaker.fail(0)
    assert state_of(breaker) == "open"
    assert breaker.times_opened == 1


def test_an_open_breaker_half_opens_after_its_cooldown_and_reopens_on_the_first_failure() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(now_s=100)
    breaker.tick(104.9)
    assert state_of(breaker) == "open"
    breaker.tick(105)
    assert state_of(breaker) == "half_open"
    breaker.fail(106)
    breaker.tick(110)
    assert state_of(breaker) == "open"
    breaker.tick(111)
    breaker.succeed()
    assert state_of(breaker) == "closed"
    assert breaker.times_opened == 2


def test_failures_of_what_was_begun_before_it_opened_do_not_put_off_the_probe() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(100)
    for straggler_s in (101, 103, 104.9):
        breaker.fail(straggler_s)
    breaker.tick(105)
    assert state_of(breaker) == "half_open"
    assert breaker.times_opened == 1


def test_a_late_answer_lets_a_probe_through_at_once() -> None:
    breaker = Breaker(failures_max=1, cooldown_s=5)
    breaker.fail(0)
    breaker.answer()
    assert state_of(breaker) == "half_open"
    breaker.succeed()
    breaker.answer()
    assert state_of(breaker) == "closed"


def test_admission_counts_offers_and_starts_over_once_admitted() -> None:
    admission = Admission(admit_after=3)
    key = make_offload_key(b"k", 0)
    assert [admission.admit(key) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert not admission.is_open()
    assert Admission(1).is_open()


def test_admission_remembers_two_generations_and_no_more() -> None:
    admission = Admission(admit_after=2, tracked_keys_max=10)
    keys = [make_offload_key(b"%d" % i, 0) for i in range(40)]
    for key in keys[:15]:
        assert not admission.admit(key)
    assert admission.admit(keys[0]), "in the older generation"
    for key in keys[15:]:
        assert not admission.admit(key)
    assert not admission.admit(keys[1]), "forgotten"


def test_no_record_that_is_read_opens_the_breaker() -> None:
    """After a key was dropped a tier works as before: it misses, and takes stores. So it does beside damaged blocks."""
    for status in RecordStatus:
        if status is not RecordStatus.OK:
            assert state_after_failures(status.value) is BreakerState.CLOSED, status
    for reason in ("absent", "missing", "no_space", "reset", "unanswered"):
        assert state_after_failures(reason) is BreakerState.CLOSED, reason
    for reason in ("unavailable", "timeout", "exception", "failed"):
        assert state_after_failures(reason) is BreakerState.OPEN, reason


class LosingTier(FourMethodTier):
    """Every load fails for one reason."""

    is_nonblocking = True
    reason = ""

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, False, reason=self.reason))


def state_after_failures(reason: str) -> BreakerState:
    """Return what becomes of a tier's breaker when all blocks of a hundred loads fail for a reason."""
    tier = LosingTier(TierSpec("t", 16, bytes(16)), memoryview(bytearray(64)).cast("B", (4, 16)), "losing")
    tier.reason = reason
    guarded = GuardedTier(tier, TierSettings(type="tier"), 16, 16, lambda: 0.0)
    for _ in range(100):
        if guarded.refusal():
            break
        assert guarded.submit(make_keys(1), [CPUBlock(0)], ReqContext("r"), is_promotion=True)
        assert len(guarded.collect()) == 1
    return guarded.breaker.state
