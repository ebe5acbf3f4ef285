"""Cases of crashes are counted once each, and only those whose fault happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crash_cases import Case, CaseOutcome, CrashCases, settle
from tests.support.crash_scenario import CrashScenario
from tests.support.figures import Figures
from tests.support.syscalls import Fault

SCENARIO = CrashScenario({"type": "nvme", "path": "kv"}, tenant="cases", jobs=1)


def case(number: int, tenant: str = "cases", what: str = "kill") -> Case:
    fault = Fault("main", "write", number, what)
    return Case(dataclasses.replace(SCENARIO, tenant=tenant), {"fault": fault})


def outcome(number: int, tenant: str = "cases", *, was_hit: bool = True, problems: Sequence[str] = ()) -> CaseOutcome:
    return CaseOutcome(case(number, tenant), was_hit, 1, 1, problems)


def test_the_same_call_in_two_runs_counts_once() -> None:
    figures = Figures()
    hit = settle("crash/nvme", [outcome(1), outcome(1, "cases-again-1"), outcome(2), outcome(3)], figures)
    assert [each.case.options["fault"] for each in hit] == [case(number).options["fault"] for number in (1, 2, 3)]
    assert figures._figures["crash/nvme"].tried == 3
    assert "1 not reached" in figures._figures["crash/nvme"].note


def test_of_two_at_the_same_call_the_one_that_broke_a_promise_counts() -> None:
    figures = Figures()
    with pytest.raises(AssertionError, match="1 of 1 cases"):
        settle("crash/nvme", [outcome(1, problems=["wrong bytes"]), outcome(1, "again")], figures)
    assert (figures._figures["crash/nvme"].tried, figures._figures["crash/nvme"].passed) == (1, 0)


def test_a_proof_fails_that_reached_a_third_of_its_points() -> None:
    missed = [outcome(number, was_hit=False) for number in range(3, 7)]
    with pytest.raises(AssertionError, match="only 2 of 6"):
        settle("crash/nvme", [outcome(1), outcome(2), *missed], Figures())
    with pytest.raises(AssertionError, match="only 1 of 4"):
        settle("crash/nvme", [outcome(1)] * 4, Figures())


class Reached(CrashCases):
    """Runs in which a thread makes 10 calls, and no process that makes them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, servers=1, program=("-c", "import sys; sys.stdin.read()"))
        self.tried: list[int] = []

    def _try_one(self, case: Case) -> CaseOutcome:
        fault = case.options["fault"]
        assert isinstance(fault, Fault)
        self.tried.append(fault.number)
        return CaseOutcome(case, fault.number <= 10, 1, 1, [])


def test_a_call_that_did_not_come_is_tried_at_an_earlier_one_that_no_other_case_has(tmp_path: Path) -> None:
    with Reached(tmp_path / "cases") as cases:
        found = cases.run([case(number) for number in (1, 9, 12, 13)])
    assert cases.tried == [1, 9, 12, 8, 13, 7]  # 9 is another's, of both
    assert len(settle("crash/nvme", found, Figures())) == 4


def test_a_call_that_did_not_come_is_tried_again_where_others_have_all_earlier_ones(tmp_path: Path) -> None:
    with Reached(tmp_path / "cases") as cases:
        found = cases.run([case(number) for number in range(1, 13)])
    assert sorted(cases.tried) == [*range(1, 11), 11, 11, 11, 12, 12, 12]
    assert len(settle("crash/nvme", found, Figures())) == 10
