"""Whether a scheduler's steps keep their time while storage hangs: judged so that a busy machine does not decide it."""

from __future__ import annotations

from tests.support.soak.latencies import Latencies

PROBE_RATIO_MAX = 4.0
"""What a step of 512 lookups may take of the processor under load, over what it takes idle. performance.md has the
same ratio for the 99th percentile by the clock, which on a machine that others use too tells of them: it was 7.6 in a
soak in which this ratio was 1.10. Threads that share a core and its caches have brought it to 2.3."""
HELD_P99_MAX_S = 0.1
"""Five times what it was on two processors with fifteen threads of others that were ready to run, 19 ms."""
LONG_STEP_S = 0.25
"""The longest took 0.18 s. Calls to a server that is frozen wait for their timeouts, of a second."""
LONG_STEPS_SHARE_MAX = 0.03
COUNTED_S_MAX = 1.0
"""What a single long step counts at most: a machine that stands still for seconds makes one, a scheduler that waits for
storage many."""


class Pace:
    """Times of steps, sorted by what a scheduler can help. One thread at a time.

    Attributes:
        idle_cpu, busy_cpu: Processor time of a step of lookups, before there was any load and under it.
        held: Times of the replay's steps, without what the thread stood in the run queue.
        long_s: The sum of those of them that were longer than `LONG_STEP_S`, each at most `COUNTED_S_MAX`.
    """

    def __init__(self) -> None:
        self.idle_cpu = Latencies()
        self.busy_cpu = Latencies()
        self.held = Latencies()
        self.long_s = 0.0

    def add_step(self, seconds: float, queued_s: float) -> None:
        """Count a step of the replay.

        Args:
            seconds: How long it took.
            queued_s: For how long its thread stood in the run queue meanwhile, or a little longer.
        """
        held_s = max(0.0, seconds - queued_s)
        self.held.add(held_s)
        if held_s > LONG_STEP_S:
            self.long_s += min(held_s, COUNTED_S_MAX)

    @property
    def ratio(self) -> float:
        """The median of `busy_cpu` over that of `idle_cpu`; 0 where one of them is empty."""
        idle_us = self.idle_cpu.percentile_us(50)
        return self.busy_cpu.percentile_us(50) / idle_us if idle_us else 0.0

    def problems(self, seconds: float) -> list[str]:
        """Return what is wrong, as sentences, in a soak of so many seconds."""
        found = []
        if self.ratio > PROBE_RATIO_MAX:
            found.append(
                f"a step of lookups takes {self.ratio:.1f} times the processor time under load that it takes idle, "
                f"{PROBE_RATIO_MAX:.0f} times allowed"
            )
        p99_s = self.held.percentile_us(99) / 1e6
        if p99_s > HELD_P99_MAX_S:
            found.append(f"one step in a hundred is held for {p99_s:.3f} s or longer, {HELD_P99_MAX_S} s allowed")
        if self.long_s > LONG_STEPS_SHARE_MAX * seconds:
            found.append(
                f"{self.long_s:.1f} s of {seconds:.0f} s passed in steps that were held for more than {LONG_STEP_S} s, "
                f"{LONG_STEPS_SHARE_MAX:.0%} allowed: the scheduler waits for something"
            )
        return found
