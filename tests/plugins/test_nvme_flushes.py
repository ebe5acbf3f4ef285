"""The order of writes and flushes: a segment's header before its batches, and its batches before its summary.

`tests/trust/test_planted_defects.py` proves the flushes of the marker and of a reset, by a loss of power.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.disks import FlushOrder
from tiered_kv.testing.rig import make_keys

if TYPE_CHECKING:
    from tests.plugins.conftest import StoreBench


@pytest.mark.parametrize("want_direct", [True, False])
def test_batches_come_after_their_header_and_before_their_summary(bench: StoreBench, want_direct: bool) -> None:
    disk = FlushOrder()
    store = bench.open(disk, want_direct=want_direct)
    bench.fill(store)
    bench.wait_until_ready(store)
    assert store.stats()["reclaimed_segments_total"]
    bench.wait_until(lambda: disk.summaries)  # the reclaimer seals when no segment is missing
    segments = int(store.stats()["segments"])
    assert store.close()
    assert disk.problems == []
    assert disk.headers > segments, "no segment was used again"
    assert disk.batches >= bench.BATCHES


def test_a_segment_that_is_full_when_the_store_is_closed_is_flushed_before_its_summary(bench: StoreBench) -> None:
    disk = FlushOrder()
    store = bench.open_ready(disk)
    assert store._reclaimer.stop(60.0)  # otherwise it might seal the segment first
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
    store = bench.open_ready(disk, room_timeout_s=0.05)
    disk.fails = True
    for number in range(2):  # more than the free segment holds, and no other becomes free
        bench.put(store, bench.batch(number))
    bench.wait_until(lambda: store.stats()["io_errors_total"])
    assert store.close()
    assert disk.batches
    assert not disk.summaries
    assert disk.problems == []
