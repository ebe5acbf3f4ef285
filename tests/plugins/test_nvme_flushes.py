"""What must be on the device before something else is written, is flushed before it.

No store waits for a device, so each flush that there is has a reason, and a test that misses it:

- of a segment's header, before its batches, and of its batches, before its summary: here;
- of the marker, before anything is stored, and of a reset's epoch: `tests/trust/test_planted_defects.py`, by a loss of
  power;
- of an epoch that was made because there was none: losing it costs blocks only, and nothing promises those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FlushOrder
from tiered_kv.testing.rig import make_keys

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench

BATCHES = 60
"""Of 40 blocks: more than twice what the bench's capacity holds, so that segments are used again."""


@pytest.mark.parametrize("want_direct", [True, False])
def test_batches_come_after_their_header_and_before_their_summary(bench: StoreBench, want_direct: bool) -> None:
    disk = FlushOrder()
    store = bench.open(disk, want_direct=want_direct)
    for number in range(BATCHES):
        assert bench.put(store, make_keys(40, f"batch {number}")).successful_keys is None
    bench.wait_until_ready(store)
    assert store.stats()["reclaimed_segments_total"]
    bench.wait_until(lambda: disk.summaries)  # while there is room to be made, the reclaimer seals nothing
    segments = int(store.stats()["segments"])
    assert store.close()
    assert disk.problems == []
    assert disk.headers > segments, "no segment was used again"
    assert disk.batches >= BATCHES


def test_a_segment_that_is_full_when_the_store_is_closed_is_flushed_before_its_summary(bench: StoreBench) -> None:
    disk = FlushOrder()
    store = bench.open(disk)
    bench.wait_until_ready(store)
    assert store._reclaimer.stop(60.0)  # so that closing finds what is full
    assert bench.put(store, make_keys(20, "batch")).successful_keys is None
    assert (disk.batches, disk.summaries) == (1, 0)
    assert store.close()
    assert disk.summaries == 1
    assert disk.problems == []


def test_a_flush_that_fails_leaves_a_segment_without_a_summary(bench: StoreBench) -> None:
    class FailingFlush(FlushOrder):
        fails = False

        def datasync(self, fd: int) -> None:
            if self.fails:
                raise OSError(5, "injected")
            super().datasync(fd)

    disk = FailingFlush()
    store = bench.open(disk, room_timeout_s=0.05)
    bench.wait_until_ready(store)
    disk.fails = True
    for number in range(2):  # more than the free segment holds, and none is made now
        bench.put(store, make_keys(40, f"batch {number}"))
    bench.wait_until(lambda: store.stats()["io_errors_total"])
    assert store.close()
    assert disk.batches
    assert not disk.summaries
    assert disk.problems == []
