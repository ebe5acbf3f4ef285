"""The workflows of the public repository run the tasks that there are, and may write nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TASKS = set(re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_pins_its_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] < 360
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


def tasks_of(path: Path) -> set[str]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = re.findall(r"\bnox -s ([\w ]+)$", path.read_text(), re.MULTILINE)
    of_matrix = [task for job in jobs for task in job.get("strategy", {}).get("matrix", {}).get("task", [])]
    return {*of_matrix, *(task for command in commands for task in command.split())}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_tasks_that_there_are(path: Path) -> None:
    assert tasks_of(path)
    assert tasks_of(path) <= TASKS


def test_all_tasks_of_tests_and_checks_run_on_a_push_or_each_week() -> None:
    without = {"install", "build_engines", "other_python", "figures"}
    """Others ask for the first two; the matrix of Pythons stands for the third; a table needs all proofs."""
    assert set().union(*map(tasks_of, WORKFLOWS)) == TASKS - without
