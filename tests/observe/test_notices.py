"""What changes is a notice, and what was written in vain is counted."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tests.support.stacks import Register, stack_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.testing.four_methods import FourMethodTier
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import JobMetadata, JobResult

BLOCK_BYTES = 4096


class FailingTier(FourMethodTier):
    """Fails stores for `reason`, or raises where there is none."""

    is_nonblocking = True
    reason: ClassVar[str] = ""

    def submit_store(self, job_metadata: JobMetadata) -> None:
        if not self.reason:
            raise RuntimeError("the password is tulip")
        self._finished.append(JobResult(job_metadata.job_id, False, reason=self.reason))


@pytest.fixture
def failing(register: Register) -> type[FailingTier]:
    class Mine(FailingTier):
        pass

    register("failing", Mine)
    return Mine


def put(stack: Stack, count: int, label: str = "block") -> None:
    stack.put(make_keys(count, label), np.zeros((count, BLOCK_BYTES), np.uint8))
    stack.flush()


def notices_of(stack: Stack) -> dict[object, object]:
    """Return what is noted, the oldest first, and how often it happened."""
    return {notice["what"]: notice["count"] for notice in stack.manager.notices.snapshot()}


def test_a_breaker_that_opens_is_a_notice(failing: type[FailingTier]) -> None:
    failing.reason = "timeout"
    with open_stack(stack_of({"type": "failing", "breaker_failures": 1, "breaker_cooldown": "1h"})) as stack:
        put(stack, 4)
        assert notices_of(stack) == {"breaker open": 1}


def test_damaged_blocks_are_one_notice(failing: type[FailingTier]) -> None:
    failing.reason = "checksum"
    with open_stack(stack_of({"type": "failing"})) as stack:
        put(stack, 16)
        assert notices_of(stack) == {"damaged blocks": 16}


def test_the_first_exception_is_a_notice_without_its_text(failing: type[FailingTier]) -> None:
    with open_stack(stack_of({"type": "failing", "breaker_failures": 1000})) as stack:
        put(stack, 16)
        assert notices_of(stack) == {"first exception, in submit_store": 1}


def test_a_tier_that_cannot_reset_is_a_notice(failing: type[FailingTier]) -> None:
    with open_stack(stack_of({"type": "failing"})) as stack:
        stack.manager.reset_cache()
        stack.manager.reset_cache()
        assert notices_of(stack) == {"disabled: it cannot reset": 1, "cache reset": 2}
        assert stack.manager.disabled_tiers() == {"failing"}


@pytest.mark.parametrize("tier_type", ["memory", "nvme"])
def test_what_is_evicted_unread_was_written_in_vain(tier_type: str, tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "kv")} if tier_type == "nvme" else {}
    with open_stack(stack_of({"type": tier_type, "capacity": "1MiB", **place})) as stack:
        put(stack, 600)
        own = stack.counters()[tier_type]["tier"]
        assert own["evicted_blocks_total"] > 0
        assert own["wasted_bytes_total"] // own["evicted_blocks_total"] in range(BLOCK_BYTES, BLOCK_BYTES + 256)


@pytest.mark.parametrize("tier_type", ["memory", "nvme"])
def test_what_was_read_was_not_written_in_vain(tier_type: str, tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "kv")} if tier_type == "nvme" else {}
    with open_stack(stack_of({"type": tier_type, "capacity": "1MiB", **place})) as stack:
        for number in range(30):
            label, blocks = f"batch-{number}", np.zeros((32, BLOCK_BYTES), np.uint8)
            put(stack, 32, label)
            assert stack.get(make_keys(32, label), blocks, timeout=20.0) == 32  # 16 and more of them from the tier
        own = stack.counters()[tier_type]["tier"]
        evicted_bytes = own["evicted_blocks_total"] * BLOCK_BYTES
        assert evicted_bytes > 0
        assert own["wasted_bytes_total"] <= 0.9 * evicted_bytes, "half of them, and what was moved on, was not read"
