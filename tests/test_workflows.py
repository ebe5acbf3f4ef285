"""The workflows of the public repository run the tasks that there are, and write only what their names say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TASKS = set(re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


WRITES = {("release", "publish"): {"id-token": "write"}, ("site", "deploy"): {"contents": "write"}}
"""What a job may do beyond reading, by the names of its workflow and of itself."""


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_and_pins_its_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.get("permissions") == WRITES.get((workflow["name"], name))
        assert job["timeout-minutes"] < 360
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used
        # A tag can be moved: an action is a commit.
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_a_release_is_checked_and_tried_before_it_is_uploaded() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    order = ["merge-base --is-ancestor", "tests.support.release", "nox -s packages", "sha256sum"]
    at = [next(number for number, command in enumerate(commands) if word in command) for word in order]
    assert at == sorted(at)
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["environment"] == "pypi"
    assert not any("run" in step for step in jobs["publish"]["steps"]), "what may publish runs no code of the commit"


def tasks_of(path: Path) -> set[str]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    commands = re.findall(r"\bnox -s ([\w ]+)$", path.read_text(), re.MULTILINE)
    of_matrix = [task for job in jobs for task in job.get("strategy", {}).get("matrix", {}).get("task", [])]
    return {*of_matrix, *(task for command in commands for task in command.split())}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_tasks_that_there_are(path: Path) -> None:
    assert tasks_of(path) or path.stem == "site"
    assert tasks_of(path) <= TASKS


def test_all_tasks_of_tests_and_checks_run_on_a_push_or_each_week() -> None:
    without = {"install", "build_engines", "other_python", "figures"}
    """Others ask for the first two; the matrix of Pythons stands for the third; a table needs all proofs."""
    assert set().union(*map(tasks_of, WORKFLOWS)) == TASKS - without
