"""The second process of a soak: as the first one sees it, and as a program that goes on until its input ends.

The program replays the same chats as the first, and prints its report as JSON.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from tests.support.races import problems_at_rest
from tests.support.soak.grounds import CHATS_SETTINGS, SAMPLE_S, chats
from tests.support.soak.holdings import Holdings, growth_problems, left_problems
from tiered_kv.stack import open_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally

_LIMIT_S = 300.0
"""Longer than all that it waits for at its end, one after the other."""
_STEP_S = 0.02
"""What a step of the model takes: enough that two processors do for both processes and the servers."""


class SecondProcess:
    """A process with a stack of its own on the same storage; it runs once the constructor returns."""

    def __init__(self, config: Mapping[str, object], seed: int) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(config), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "running\n":
            self.kill()
            raise RuntimeError("the second process of the soak did not start")

    def finish(self) -> tuple[int, list[Holdings], list[str]]:
        """Have it end; return how many blocks it verified, its samples, and what was wrong."""
        try:
            told: dict[str, Any] = json.loads(self._process.communicate("", timeout=_LIMIT_S)[0])  # Any: JSON
        except (subprocess.TimeoutExpired, ValueError) as error:
            return 0, [], [f"the second process did not end well: {type(error).__name__}"]
        samples = [Holdings(*sample) for sample in told["samples"]]
        problems = [*told["problems"], *growth_problems(samples)]
        return told["verified"], samples, [f"the second process: {problem}" for problem in problems]

    def kill(self) -> None:
        """End it by force if it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    logging.disable(logging.WARNING)  # what fails is counted
    config, seed = json.loads(sys.argv[1]), int(sys.argv[2])
    samples: list[Holdings] = []
    before = Holdings.now()

    def after_step(tally: Tally) -> None:
        del tally.step_s[:]  # they would be kept for ever
        if not samples or time.monotonic() - samples[-1].at_s >= SAMPLE_S:
            samples.append(Holdings.now())
        time.sleep(_STEP_S)

    with open_stack(config) as stack:
        print("running", flush=True)
        report = replay(
            stack.manager,
            stack.kv_view,
            chats(seed),
            CHATS_SETTINGS,
            should_stop=lambda: bool(select.select([sys.stdin], [], [], 0)[0]),
            on_progress=after_step,
        )
        problems = problems_at_rest(stack.manager)
    problems += left_problems(before, Holdings.now)
    if report.corrupt_blocks:
        problems.append(f"{report.corrupt_blocks} blocks came with wrong bytes")
    told = {"verified": report.verified_blocks, "problems": problems, "samples": list(map(astuple, samples))}
    print(json.dumps(told), flush=True)
