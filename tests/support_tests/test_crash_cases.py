"""Cases of crashes count only if their fault happened.

That broken promises are found is seen in `tests/trust/test_planted_defects.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_cases import FS, CaseOutcome, CrashCases, settle
from tests.support.crash_server import Case
from tests.support.figures import Figures


def outcomes(hits: Sequence[bool], problems: Sequence[str] = ()) -> list[CaseOutcome]:
    return [CaseOutcome(Case(FS), was_hit, 1, 1, problems) for was_hit in hits]


def test_only_cases_whose_fault_happened_count() -> None:
    figures = Figures()
    assert len(settle("crash/fs", outcomes([True, True, False]), figures)) == 2
    assert "| `crash/fs` | phantoms | 2 | 2 | system calls killed at; faults not made: 1 |" in figures.lines()


def test_a_proof_fails_that_broke_a_promise_or_reached_a_third_of_its_points() -> None:
    with pytest.raises(AssertionError, match="1 of 1 cases"):
        settle("crash/fs", outcomes([True], ["wrong bytes"]), Figures())
    with pytest.raises(AssertionError, match="only 2 of 6"):
        settle("crash/fs", outcomes([True] * 2 + [False] * 4), Figures())


def fail() -> None:
    sys.exit(3)


@pytest.mark.slow
def test_every_server_is_ended_also_if_one_has_failed(tmp_path: Path) -> None:
    """Otherwise their pipes are left behind."""
    with pytest.raises(AssertionError, match="it ended with 3"), CrashCases(tmp_path / "crash", main=fail):
        pass
