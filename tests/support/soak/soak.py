"""One soak, from the start of its servers to its report."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path

from tests.support.races import problems_at_rest
from tests.support.soak.gauges import Gauges
from tests.support.soak.grounds import S3_CAPACITY_BYTES, TIERS, Grounds
from tests.support.soak.holdings import Holdings, growth_problems, left_problems, rise_problems
from tests.support.soak.probe import Probe
from tests.support.soak.report import SoakReport, SoakSettings
from tests.support.soak.run_queue import RunQueue
from tests.support.soak.second import Neighbour
from tests.support.soak.troubles import Troubles
from tests.support.soak.workload import CHATS_SETTINGS, SAMPLE_S, STEP_S, chats
from tiered_kv.counters import count_of
from tiered_kv.stack import Stack, open_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally

RECOVERY_LIMIT_S = 120.0
"""How long after the last fault every tier must have come to be hit again, and the quarantine be empty."""
_LONGER_MAX_S = 300.0
"""How much longer than it was asked for a soak may take until there were the faults that it was asked for."""
_PROBE_S = 0.1
_IDLE_PROBES = 300


def run(
    settings: SoakSettings,
    directory: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> SoakReport:
    """Run one soak; the calling thread is its scheduler's.

    Args:
        settings: How.
        directory: An empty directory for everything.
        should_stop: Asked before every step; the soak ends in good order once it answers True.
        on_progress: Told a line when something begins.

    Raises:
        RuntimeError: A server does not start.
    """
    report = SoakReport()
    with Grounds(directory) as grounds:
        before = Holdings.now(grounds.foreign_descriptors)
        with ExitStack() as undo:
            neighbours = [Neighbour(grounds, number, settings.seed) for number in range(1, settings.processes)]
            for neighbour in neighbours:
                undo.callback(neighbour.kill)
                neighbour.wait_until_it_runs()
            with open_stack(grounds.config(0)) as stack:
                # As engines do once they are loaded: a full collection over what was imported holds the interpreter,
                # and with it the scheduler, for 0.1 s.
                gc.collect()
                gc.freeze()
                undo.callback(gc.unfreeze)
                _Soak(settings, grounds, stack, report, should_stop, on_progress).run()
            for neighbour in neighbours:
                neighbour.finish(report)
        report.problems += left_problems(before, lambda: Holdings.now(grounds.foreign_descriptors))
    return report


class _Phase(Enum):
    """What the soak is at."""

    WARMING = "warming up"
    FAULTS = "faults"
    ENDING = "the last fault"
    RECOVERY = "recovery"


class _Soak:
    """The phases of a soak, on the scheduler's thread: idle, warming up, faults, recovery."""

    def __init__(
        self,
        settings: SoakSettings,
        grounds: Grounds,
        stack: Stack,
        report: SoakReport,
        should_stop: Callable[[], bool],
        on_progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._grounds = grounds
        self._stack = stack
        self._report = report
        self._asked_to_stop = should_stop
        self._on_progress = on_progress
        self._gauges = Gauges(grounds, stack.manager, settings.processes)
        self._probe = Probe(stack)
        self._troubles = Troubles(
            grounds, settings.seed, fault_s=settings.fault_s, quiet_s=settings.quiet_s, on_quiet=self._look_at_bucket
        )
        self._stopper = threading.Thread(target=self._troubles.stop, name="soak-stopper")
        self._run_queue = RunQueue()
        self._queued_s = 0.0
        self._phase = _Phase.WARMING
        self._hits_then: Mapping[str, int] = {}
        self._begun_s = self._sampled_s = self._probed_s = self._recovery_begun_s = 0.0
        self._is_over = False

    def run(self) -> None:
        """Do all of it, and fill the report."""
        report, manager = self._report, self._stack.manager
        for _ in range(_IDLE_PROBES):
            seconds, cpu_s = self._probe.step()
            report.idle_probe.add(seconds)
            report.pace.idle_cpu.add(cpu_s)
            time.sleep(STEP_S)  # as between those under load
        self._begun_s = time.monotonic()
        self._queued_s = self._run_queue.waited_s()
        self._begin(_Phase.WARMING)
        try:
            replayed = replay(
                manager,
                self._stack.kv_view,
                chats(self._settings.seed),
                CHATS_SETTINGS,
                should_stop=self._should_stop,
                on_progress=self._after_step,
            )
        finally:
            self._troubles.stop()
            if self._stopper.is_alive():
                self._stopper.join()
            self._probe.close()
            self._run_queue.close()
        report.seconds = time.monotonic() - self._begun_s
        for problem in problems_at_rest(manager):
            self._gauges.note(problem)
        self._gauges.sample()
        report.samples[0] = self._gauges.samples
        report.problems += growth_problems(self._gauges.samples, "first")
        report.problems += rise_problems(self._gauges.samples, "first")
        report.problems += report.pace.problems(report.seconds)
        report.requests, report.hits = replayed.requests, dict(replayed.hits)
        report.verified_blocks += replayed.verified_blocks
        for block in replayed.corrupt:
            self._gauges.note(f"block {block.hash_id} from {block.tier} is wrong from byte {block.offset} on")
        if self._troubles.error is not None:
            self._gauges.note(f"the faults ended with {self._troubles.error!r}")
        report.switched, report.struck = dict(self._troubles.switched), dict(self._troubles.struck)
        counted = manager.counters().values()
        report.corrupt_found = sum(count_of(counters, "tier", "corrupt_blocks_total") for counters in counted)
        limits = self._gauges.limits
        report.late_s_max, report.held_up_s_max = limits.late_s_max, limits.held_up_s_max
        report.problems += self._gauges.problems

    def _should_stop(self) -> bool:
        if self._asked_to_stop():
            self._report.interrupted = True
            return True
        return self._is_over

    def _after_step(self, tally: Tally) -> None:
        queued_s, self._queued_s = self._queued_s, self._run_queue.waited_s()
        for seconds in tally.step_s:
            self._report.steps.add(seconds)
            self._report.pace.add_step(seconds, self._queued_s - queued_s)
        del tally.step_s[:]  # they would be kept for ever
        now_s = time.monotonic()
        if now_s - self._probed_s >= _PROBE_S:
            self._probed_s = now_s
            seconds, cpu_s = self._probe.step()
            self._report.busy_probe.add(seconds)
            self._report.pace.busy_cpu.add(cpu_s)
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            self._gauges.sample()
            self._move_on(tally, now_s - self._begun_s)
        time.sleep(STEP_S)

    def _move_on(self, tally: Tally, after_s: float) -> None:
        """Go to the next phase when it is time."""
        match self._phase:
            case _Phase.WARMING:
                if after_s >= self._settings.warm_s:
                    self._begin(_Phase.FAULTS)
                    self._troubles.start()
            case _Phase.FAULTS:
                if self._has_had_faults(after_s) or self._troubles.error is not None:
                    self._begin(_Phase.ENDING)
                    # Not on this thread: the scheduler goes on while the last fault is switched off.
                    self._stopper.start()
            case _Phase.ENDING:
                if not self._stopper.is_alive():
                    self._begin(_Phase.RECOVERY)
                    self._hits_then, self._recovery_begun_s = dict(tally.hits), after_s
            case _Phase.RECOVERY:
                self._recover(tally, after_s)

    def _has_had_faults(self, after_s: float) -> bool:
        settings, troubles = self._settings, self._troubles
        if after_s < settings.seconds:
            return False
        is_enough = len(troubles.switched) >= settings.kinds_min and (not settings.kinds_min or troubles.struck)
        return bool(is_enough) or after_s >= settings.seconds + _LONGER_MAX_S

    def _begin(self, phase: _Phase) -> None:
        self._phase = phase
        self._on_progress(phase.value)

    def _recover(self, tally: Tally, after_s: float) -> None:
        """End the soak once every tier is hit again, and nothing is in quarantine."""
        quiet = [name for name in TIERS if tally.hits[name] == self._hits_then[name]]
        counters = self._stack.manager.counters()
        held = [name for name in TIERS if counters[name].get("quarantined_bytes")]
        self._is_over = not quiet and not held
        if not self._is_over and after_s - self._recovery_begun_s > RECOVERY_LIMIT_S:
            self._gauges.note(f"{RECOVERY_LIMIT_S} s after the faults: no hits in {quiet}, quarantine in {held}")
            self._is_over = True

    def _look_at_bucket(self) -> None:
        """Called by the faults' thread."""
        used_bytes = self._grounds.s3_used_bytes()
        if used_bytes > 2 * S3_CAPACITY_BYTES:  # a sweep is made every two seconds; until then it may be exceeded
            self._gauges.note(f"the bucket holds {used_bytes} of {S3_CAPACITY_BYTES} bytes")
