"""One soak, from the start of its servers to its report."""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.children import Child
from tests.support.disk_use import occupied_bytes
from tests.support.races import problems_at_rest
from tests.support.soak.grounds import (
    BLOCK_BYTES,
    CHATS_SETTINGS,
    FS_CAPACITY_BYTES,
    NVME_CAPACITY_BYTES,
    PRIMARY_BLOCKS,
    S3_CAPACITY_BYTES,
    SAMPLE_S,
    TIERS,
    Grounds,
    Troubles,
    chats,
)
from tests.support.soak.holdings import Holdings, growth_problems, left_problems
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally

RECOVERY_LIMIT_S = 120.0
"""How long after the last fault every tier must be hit again, and the quarantine be empty."""
HELD_P99_MAX_S = 0.2
"""On two processors with ten threads of others that are ready to run it was 19 to 116 ms: whoever holds the
interpreter waits for a processor too."""
LONG_STEP_S = 0.25
"""The longest took 0.18 s. Calls to a server that is frozen wait for their timeouts, of a second."""
LONG_STEPS_SHARE_MAX = 0.03
COUNTED_S_MAX = 1.0
"""What a long step counts at most: a machine that stands still makes one of them, a scheduler that waits many."""
_LONGER_MAX_S = 300.0
"""How much longer a soak may take to reach `kinds_min`."""
_STEP_S = 0.003
"""The time of a model step, in which the scheduler sleeps and servers and workers run."""
_CALM_STEP_S = 0.1
"""The same in the recovery, in which a server on a busy machine must answer in time."""
_SECOND_LIMIT_S = 300.0
"""Longer than the sum of all timeouts at the end of the second process."""
_SECOND_STEP_S = 0.02
"""The time of its model step: two processors are enough for both processes and the servers."""
_PROBLEMS_SHOWN = 20
_LOOKS = 3


@dataclass(frozen=True, slots=True)
class SoakSettings:
    seconds: float  # until the last fault is switched off; recovery and the end come on top
    seed: int = 0  # decides the chats, the order of faults, and where they strike
    warm_s: float = 10.0  # before the first fault
    fault_s: float = 3.0  # that each fault is on
    quiet_s: float = 1.5  # after it
    kinds_min: int = 0
    """Kinds of faults that are needed, one of which has struck. On a busy machine each takes longer, so the soak
    continues for up to five minutes more."""


@dataclass
class SoakReport:
    seconds: float = 0.0  # servers' start and end left out
    verified_blocks: int = 0  # loaded and compared, in both processes
    hits: dict[str, int] = field(default_factory=dict)  # the first process's, by tier
    switched: dict[str, int] = field(default_factory=dict)  # how often each fault was switched on
    struck: dict[str, int] = field(default_factory=dict)  # how often it hit something, if known
    held_s: array[float] = field(default_factory=lambda: array("d"))  # by steps, without time in the run queue
    samples: list[list[Holdings]] = field(default_factory=list)  # what each process held, every half second
    problems: list[str] = field(default_factory=list)  # what must not have happened, as sentences

    def lines(self) -> list[str]:
        return [
            f"{self.seconds:.0f} s: {self.note()}; hits {self.hits}",
            f"{len(self.switched)} kinds of faults: {self.switched}; they struck: {self.struck}",
            *(f"a process, first and last: {each[0]}, {each[-1]}" for each in self.samples if each),
            *(f"PROBLEM: {problem}" for problem in self.problems),
            f"{len(self.problems)} problems",
        ]

    def note(self) -> str:
        """Return a summary for a table."""
        p99_s, longest_s = np.percentile(self.held_s, (99, 100)) if self.held_s else (0.0, 0.0)
        return (
            f"{self.verified_blocks} blocks verified, {sum(self.switched.values())} faults switched, "
            f"steps without the run queue p99 {1e3 * p99_s:.1f} ms, max {1e3 * longest_s:.0f} ms"
        )


def run(settings: SoakSettings, directory: Path) -> SoakReport:
    """Run one soak in an empty directory, with the calling thread as the scheduler."""
    report = SoakReport()
    with Grounds(directory) as grounds:
        before = Holdings.now(grounds.foreign_descriptors)
        with ExitStack() as undo:
            other = undo.enter_context(Child(second, json.dumps(grounds.config(1)), str(settings.seed)))
            assert other.line() == "running", "the second process of the soak did not start"
            with open_engine_stack(grounds.config(0)) as stack:
                # As engines do once they are loaded: a full collection over what was imported holds the interpreter,
                # and with it the scheduler, for 0.1 s.
                gc.collect()
                gc.freeze()
                undo.callback(gc.unfreeze)
                _Soak(settings, grounds, stack, report, on_recovery=lambda: other.tell("end")).run()
            verified, samples, problems = _end_of(other)
        report.verified_blocks += verified
        report.samples.append(samples)
        report.problems += [*problems, *left_problems(before, lambda: Holdings.now(grounds.foreign_descriptors))]
    return report


def pace_problems(held_s: Sequence[float], seconds: float) -> list[str]:
    """Return whether the scheduler waits for something, from the times of its steps and of the soak."""
    found = []
    times_s = np.asarray(held_s)
    if len(times_s) and (p99_s := np.percentile(times_s, 99)) > HELD_P99_MAX_S:
        found.append(f"one step in a hundred is held for {p99_s:.3f} s or longer, {HELD_P99_MAX_S} s allowed")
    long_s = float(np.minimum(times_s[times_s > LONG_STEP_S], COUNTED_S_MAX).sum())
    if long_s > LONG_STEPS_SHARE_MAX * seconds:
        found.append(
            f"{long_s:.1f} s of {seconds:.0f} s passed in steps that were held for more than {LONG_STEP_S} s, "
            f"{LONG_STEPS_SHARE_MAX:.0%} allowed: the scheduler waits for something"
        )
    return found


def run_queue_s() -> float:
    """Return how long the calling thread has been ready while others had the processors.

    The second number of schedstat, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst); 0 if the kernel
    does not have it.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as schedstat:
            return int(schedstat.read().split()[1]) / 1e9
    except OSError:
        return 0.0


class _Soak:
    """The phases of a soak, on the scheduler's thread: warming up, faults, the end of the last fault, recovery."""

    def __init__(
        self,
        settings: SoakSettings,
        grounds: Grounds,
        stack: EngineStack,
        report: SoakReport,
        on_recovery: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._on_recovery = on_recovery
        self._grounds = grounds
        self._stack = stack
        self._report = report
        self._troubles = Troubles(
            grounds, settings.seed, fault_s=settings.fault_s, quiet_s=settings.quiet_s, on_quiet=self._look_at_bucket
        )
        self._stopper = threading.Thread(target=self._troubles.stop, name="soak-stopper")
        self._samples: list[Holdings] = []
        self._queued_s = run_queue_s()
        self._phase = self._warm
        self._hits_then: Mapping[str, int] = {}
        self._begun_s = time.monotonic()
        self._recovery_begun_s = 0.0
        self._is_over = False

    def run(self) -> None:
        report, manager, troubles = self._report, self._stack.manager, self._troubles
        try:
            replayed = replay(
                manager,
                self._stack.kv_view,
                chats(self._settings.seed),
                CHATS_SETTINGS,
                should_stop=lambda: self._is_over,
                on_progress=self._after_step,
            )
        finally:
            troubles.stop()
            if self._stopper.is_alive():
                self._stopper.join()
        report.seconds = time.monotonic() - self._begun_s
        report.problems += problems_at_rest(manager)
        self._sample()
        report.samples.append(self._samples)
        report.problems += growth_problems(self._samples) + pace_problems(report.held_s, report.seconds)
        report.hits = dict(replayed.hits)
        report.verified_blocks += replayed.verified_blocks
        for block in replayed.corrupt:
            self._note(f"block {block.hash_id} from {block.tier} is wrong from byte {block.offset} on")
        if troubles.error is not None:
            self._note(f"the faults ended with {troubles.error!r}")
        report.switched, report.struck = dict(troubles.switched), dict(troubles.struck)

    def _after_step(self, tally: Tally) -> None:
        queued_s, self._queued_s = self._queued_s, run_queue_s()
        self._report.held_s.extend(max(0.0, seconds - (self._queued_s - queued_s)) for seconds in tally.step_s)
        del tally.step_s[:]  # they would be kept for ever
        now_s = time.monotonic()
        if not self._samples or now_s - self._samples[-1].at_s >= SAMPLE_S:
            self._sample()
            self._phase(tally, now_s - self._begun_s)
        time.sleep(_CALM_STEP_S if self._recovery_begun_s else _STEP_S)

    # The phases: each is called at every sample, and begins the next when it is time.

    def _warm(self, tally: Tally, after_s: float) -> None:
        if after_s >= self._settings.warm_s:
            self._troubles.start()
            self._phase = self._fail

    def _fail(self, tally: Tally, after_s: float) -> None:
        settings, troubles = self._settings, self._troubles
        is_enough = len(troubles.switched) >= settings.kinds_min and (not settings.kinds_min or troubles.struck)
        is_late = after_s >= settings.seconds + _LONGER_MAX_S
        if (after_s >= settings.seconds and (is_enough or is_late)) or troubles.error is not None:
            self._stopper.start()  # not on this thread: the scheduler runs while the last fault is switched off
            self._phase = self._end_fault

    def _end_fault(self, tally: Tally, after_s: float) -> None:
        if not self._stopper.is_alive():
            # The other process ends, so that on a busy machine the servers have time to answer this one.
            self._on_recovery()
            self._hits_then, self._recovery_begun_s = dict(tally.hits), after_s
            self._phase = self._recover

    def _recover(self, tally: Tally, after_s: float) -> None:
        """End the soak once every tier is hit again, and nothing is in quarantine."""
        quiet = [name for name in TIERS if tally.hits[name] == self._hits_then[name]]
        counters = self._stack.counters()
        held = [name for name in TIERS if counters[name].get("quarantined_bytes")]
        self._is_over = not quiet and not held
        if not self._is_over and after_s - self._recovery_begun_s > RECOVERY_LIMIT_S:
            counts = {name: counters[name] for name in (*quiet, *held)}
            self._note(f"{RECOVERY_LIMIT_S} s after the faults: no hits in {quiet}, quarantine in {held}: {counts}")
            self._is_over = True

    # Samples.

    def _sample(self) -> None:
        grounds = self._grounds
        self._samples.append(Holdings.now(grounds.foreign_descriptors))
        for process in range(2):
            self._look_at(grounds.nvme_directory(process), NVME_CAPACITY_BYTES)
        self._look_at(grounds.fs_directory, FS_CAPACITY_BYTES)
        for name, counters in self._stack.counters().items():
            jobs, held = counters.get("jobs_in_flight", 0), counters.get("quarantined_bytes", 0)
            if jobs > PRIMARY_BLOCKS or held > PRIMARY_BLOCKS * BLOCK_BYTES:  # a job pins one block at least
                self._note(f"{name} has {jobs} jobs in flight and {held} bytes in quarantine")

    def _look_at(self, path: Path, capacity_bytes: int) -> None:
        """Note a directory that exceeds its capacity at each look: one look may count files that replace each other."""
        used_bytes = [occupied_bytes(path)]
        while min(used_bytes) > capacity_bytes and len(used_bytes) < _LOOKS:
            used_bytes.append(occupied_bytes(path))
        if min(used_bytes) > capacity_bytes:
            self._note(f"{os.path.basename(path)} occupies {min(used_bytes)} of {capacity_bytes} bytes")

    def _look_at_bucket(self) -> None:
        used_bytes = self._grounds.s3_used_bytes()
        if used_bytes > 2 * S3_CAPACITY_BYTES:  # a sweep is made every two seconds; until then it may be exceeded
            self._note(f"the bucket holds {used_bytes} of {S3_CAPACITY_BYTES} bytes")

    def _note(self, problem: str) -> None:
        if len(self._report.problems) < _PROBLEMS_SHOWN:
            self._report.problems.append(problem)  # by any thread: one operation of the interpreter


# The second process.


def _end_of(process: Child) -> tuple[int, list[Holdings], list[str]]:
    """End the process; return its verified blocks, its samples, and its problems."""
    try:
        result: dict[str, Any] = json.loads(process.finish(_SECOND_LIMIT_S) or "")  # Any: JSON
    except (subprocess.TimeoutExpired, AssertionError, ValueError) as error:
        return 0, [], [f"the second process did not end well: {type(error).__name__}"]
    samples = [Holdings(*sample) for sample in result["samples"]]
    problems = [*result["problems"], *growth_problems(samples)]
    return result["verified"], samples, [f"the second process: {problem}" for problem in problems]


def second() -> None:
    """Replay the same chats on the stack in `sys.argv`, until there is input, and print a report as JSON."""
    logging.disable(logging.WARNING)  # what fails is counted
    config, seed = json.loads(sys.argv[1]), int(sys.argv[2])
    samples: list[Holdings] = []
    before = Holdings.now()

    def after_step(tally: Tally) -> None:
        del tally.step_s[:]  # they would be kept for ever
        if not samples or time.monotonic() - samples[-1].at_s >= SAMPLE_S:
            samples.append(Holdings.now())
        time.sleep(_SECOND_STEP_S)

    with open_engine_stack(config) as stack:
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
    result = {"verified": report.verified_blocks, "problems": problems, "samples": list(map(astuple, samples))}
    print(json.dumps(result), flush=True)
