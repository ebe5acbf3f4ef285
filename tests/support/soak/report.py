"""What a soak is asked for, and what it came to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.soak.holdings import Holdings
from tests.support.soak.latencies import Latencies
from tests.support.soak.pace import LONG_STEP_S, Pace
from tests.support.soak.probe import PROBE_KEYS


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """How a soak goes.

    Args:
        seconds: How long, until the last fault is switched off; recovery and the end come on top.
        seed: Decides the chats, the order of faults, and where they strike.
        processes: 1, or 2 that share what can be shared.
        warm_s: How long before the first fault.
        fault_s: How long each fault is on.
        quiet_s: How long none is on after it.
        kinds_min: How many kinds of faults there have to be, one of which has struck; it goes on for up to five minutes
            more until that is so, since on a busy machine each takes longer.
    """

    seconds: float
    seed: int = 0
    processes: int = 2
    warm_s: float = 10.0
    fault_s: float = 3.0
    quiet_s: float = 1.5
    kinds_min: int = 0


@dataclass
class SoakReport:
    """What a soak came to.

    Args:
        seconds: How long it took, servers' start and end left out.
        requests: Requests that were replayed, by the first process.
        verified_blocks: Blocks that came back, and were compared, in all processes.
        hits: The first process's, by tier.
        switched: How often each fault was switched on.
        struck: How often it has hit something, as far as that can be told.
        corrupt_found: Blocks that tiers found to be corrupt, and did not give out.
        steps: Times of the scheduler's steps.
        idle_probe: Times of a step of 512 lookups that hit, before there was any load.
        busy_probe: The same under load.
        pace: What of these times is judged.
        samples: What each process held, by its number, every half second.
        late_s_max: The most by which a job was reported after its deadline.
        held_up_s_max: The longest time between two looks, half a second where the machine does not stall.
        interrupted: Whether it was stopped before its time.
        problems: What must not have happened, as sentences.
    """

    seconds: float = 0.0
    requests: int = 0
    verified_blocks: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    switched: dict[str, int] = field(default_factory=dict)
    struck: dict[str, int] = field(default_factory=dict)
    corrupt_found: int = 0
    steps: Latencies = field(default_factory=Latencies)
    idle_probe: Latencies = field(default_factory=Latencies)
    busy_probe: Latencies = field(default_factory=Latencies)
    pace: Pace = field(default_factory=Pace)
    samples: dict[int, list[Holdings]] = field(default_factory=dict)
    late_s_max: float = 0.0
    held_up_s_max: float = 0.0
    interrupted: bool = False
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return it for a person."""
        hits = ", ".join(f"{name} {count}" for name, count in self.hits.items())
        never = sorted(name for name in self.switched if not self.struck.get(name) and ": " in name)
        return [
            f"{self.seconds:.0f} s{', interrupted' if self.interrupted else ''}: {self.requests} requests, "
            f"{self.verified_blocks} blocks verified, hits {hits}",
            f"{sum(self.switched.values())} faults switched on, {len(self.switched)} kinds; "
            f"{self.corrupt_found} corrupt blocks found by tiers",
            f"without a strike that can be counted: {', '.join(never) or 'none'}",
            f"step of the replay: {self.steps}",
            f"step of {PROBE_KEYS} lookups, idle: {self.idle_probe}",
            f"step of {PROBE_KEYS} lookups, busy: {self.busy_probe}",
            f"the same, processor time: {self.pace.ratio:.2f} times that of idle; idle: {self.pace.idle_cpu}; "
            f"busy: {self.pace.busy_cpu}",
            f"step of the replay, without the time in the run queue: {self.pace.held}; "
            f"{self.pace.long_s:.1f} s in those that took longer than {LONG_STEP_S} s",
            *(f"process {number}: {_in_thirds(samples)}" for number, samples in sorted(self.samples.items())),
            f"jobs at most {self.late_s_max:.1f} s over their deadline, looks at most {self.held_up_s_max:.1f} s apart",
            *(f"PROBLEM: {problem}" for problem in self.problems or ()),
            f"{len(self.problems)} problems",
        ]

    def note(self) -> str:
        """Return it in a few words, for a table."""
        return (
            f"{self.verified_blocks} blocks verified, {sum(self.switched.values())} faults switched, "
            f"step p99 {self.steps.percentile_us(99):.0f} µs, max {self.steps.max_us:.0f} µs, "
            f"without the run queue p99 {self.pace.held.percentile_us(99):.0f} µs, max {self.pace.held.max_us:.0f} µs; "
            f"512 lookups p99 {self.idle_probe.percentile_us(99):.0f} µs idle, "
            f"{self.busy_probe.percentile_us(99):.0f} µs busy, processor time {self.pace.ratio:.2f} times idle's"
        )


def _in_thirds(samples: Sequence[Holdings]) -> str:
    """Return the medians of the first, the middle and the last third of the time."""
    third = len(samples) // 3
    if not third:
        return "no samples"
    parts = (samples[:third], samples[third : 2 * third], samples[2 * third :])
    rows = []
    for what, unit in (("rss_bytes", 1 << 20), ("threads", 1), ("descriptors", 1)):
        medians = (statistics.median(getattr(each, what) for each in part) / unit for part in parts)
        most = max(getattr(each, what) for each in samples) / unit
        rows.append(f"{' '.join(f'{median:.0f}' for median in medians)}, at most {most:.0f}")
    return f"memory {rows[0]} MiB; threads {rows[1]}; descriptors {rows[2]}, medians of thirds of the time"
