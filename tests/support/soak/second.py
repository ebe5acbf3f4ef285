"""The second process of a soak, as the first one sees it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.soak.grounds import Grounds
from tests.support.soak.holdings import Holdings, growth_problems, rise_problems
from tests.support.soak.report import SoakReport

_NEIGHBOUR_LIMIT_S = 300.0
"""Longer than all that it waits for at its end, one after the other."""
_NEIGHBOUR = "tests.support.soak.neighbour"


class Neighbour:
    """The second process.

    Args:
        grounds: What it uses.
        number: Which nvme directory is its own.
        seed: Decides its chats.
    """

    def __init__(self, grounds: Grounds, number: int, seed: int) -> None:
        self._number = number
        command = [sys.executable, "-m", _NEIGHBOUR, json.dumps(grounds.config(number)), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_it_runs(self) -> None:
        """Return when its stack is open."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "running\n":
            raise RuntimeError("the second process of the soak did not start")

    def finish(self, report: SoakReport) -> None:
        """Have it end, and count in what it verified."""
        try:
            output, _ = self._process.communicate("", timeout=_NEIGHBOUR_LIMIT_S)
            told = json.loads(output)
            report.verified_blocks += told["verified"]
            samples = [Holdings(*sample) for sample in told["samples"]]
            report.samples[self._number] = samples
            report.problems += [f"the second process: {problem}" for problem in told["problems"]]
            report.problems += growth_problems(samples, "second") + rise_problems(samples, "second")
            if told["corrupt"]:
                report.problems.append(f"the second process loaded {told['corrupt']} corrupt blocks")
        except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
            report.problems.append(f"the second process did not end well: {type(error).__name__}")

    def kill(self) -> None:
        """End it by force if it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
