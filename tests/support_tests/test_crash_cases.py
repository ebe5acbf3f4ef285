"""Cases of crashes count only if their fault happened, and the look at what they left notices what must not be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_cases import FS, CaseOutcome, settle
from tests.support.crash_scenario import CrashScenario, Progress
from tests.support.crash_server import Case
from tests.support.figures import Figures


def outcomes(hits: Sequence[bool], problems: Sequence[str] = ()) -> list[CaseOutcome]:
    return [CaseOutcome(Case(FS), was_hit, 1, 1, problems) for was_hit in hits]


def test_only_cases_whose_fault_happened_count() -> None:
    figures = Figures()
    assert len(settle("crash/fs", outcomes([True, True, False]), figures)) == 2
    assert "| `crash/fs` | phantoms | 2 | 2 | system calls killed at; 1 not reached |" in figures.lines()


def test_a_proof_fails_that_broke_a_promise_or_reached_a_third_of_its_points() -> None:
    with pytest.raises(AssertionError, match="1 of 1 cases"):
        settle("crash/fs", outcomes([True], ["wrong bytes"]), Figures())
    with pytest.raises(AssertionError, match="only 2 of 6"):
        settle("crash/fs", outcomes([True] * 2 + [False] * 4), Figures())


@pytest.mark.slow
def test_a_block_that_is_answered_and_does_not_load_is_a_phantom(tmp_path: Path) -> None:
    entry = {"type": "fs", "path": str(tmp_path / "kv"), "capacity": 4 << 20}
    scenario = CrashScenario(entry, tenant="look", jobs=4)
    progress = Progress()
    scenario.write(progress)
    epoch = max((tmp_path / "kv").glob("*/*/"), key=lambda each: len(list(each.glob("*/*"))))  # not that of before
    stored = set(epoch.glob("*/*"))  # what the look stores afterwards is not looked at again
    found = scenario.verify(progress.as_dict(), keeps=True)
    assert found.problems == []
    assert found.loaded == found.answered == len(scenario.keys)
    block = next(block for block in epoch.glob("*/*") if block in stored)
    block.write_bytes(block.read_bytes()[:-1])
    found = scenario.verify(progress.as_dict(), keeps=False)
    assert found.answered == found.loaded + 1
    assert any("answered and are damaged" in problem for problem in found.problems), found.problems
