"""The look at what a crash left notices what must not be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from tests.support import crash_scenario
from tests.support.crash_progress import Progress
from tests.support.crash_scenario import CrashScenario, Found
from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv_nvme.reader import BlockReader


@pytest.fixture
def scenario(tmp_path: Path) -> CrashScenario:
    """A directory that has more than was stored, so that nothing is evicted."""
    entry = {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": 4 << 20, "segment": 256 << 10, "threads": 1}
    return CrashScenario(entry, tenant="look", jobs=4)


def looked_at(scenario: CrashScenario, progress: Progress) -> Found:
    return scenario.verify(progress.as_dict(), strict=True, keeps=True)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_block_that_is_answered_and_does_not_load_is_a_phantom_unless_the_tier_says_that_it_dropped_it(
    scenario: CrashScenario, says_so: bool
) -> None:
    progress = Progress()
    scenario.write(progress, strict=True)
    found = looked_at(scenario, progress)
    assert found.problems == []
    assert found.loaded == found.answered == len(scenario.keys)

    load = BlockReader.load
    lost: list[OffloadKey] = []

    def lose_one(reader: BlockReader, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        if not lost:
            lost.extend(keys)
            for key in keys:
                del reader.index.places[key]
            reader.counters.add("evicted_blocks_total", count=int(says_so))
        return load(reader, keys, blocks)

    with mock.patch.object(BlockReader, "load", lose_one), mock.patch.object(crash_scenario, "_COUNTED_S", 0.0):
        found = looked_at(scenario, progress)
    assert len(lost) == 1
    assert found.answered == found.loaded + 1
    assert any("answered and did not load" in problem for problem in found.problems) == (not says_so), found.problems
