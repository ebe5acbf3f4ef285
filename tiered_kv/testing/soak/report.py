"""What a soak is asked for, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_kv.testing.soak.gauges import Latencies
from tiered_kv.testing.soak.probe import PROBE_KEYS


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
    """

    seconds: float
    seed: int = 0
    processes: int = 2
    warm_s: float = 10.0
    fault_s: float = 3.0
    quiet_s: float = 1.5


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
        rss_bytes: Resident memory of the first process, the median of the middle third of the time and of the last.
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
    rss_bytes: tuple[int, int] = (0, 0)
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
            f"memory {self.rss_bytes[0] / 2**20:.0f} MiB in the middle third, "
            f"{self.rss_bytes[1] / 2**20:.0f} MiB in the last; "
            f"jobs at most {self.late_s_max:.1f} s over their deadline, "
            f"looks at most {self.held_up_s_max:.1f} s apart",
            *(f"PROBLEM: {problem}" for problem in self.problems or ()),
            f"{len(self.problems)} problems",
        ]

    def note(self) -> str:
        """Return it in a few words, for a table."""
        return (
            f"{self.verified_blocks} blocks verified, {sum(self.switched.values())} faults switched, "
            f"step p99 {self.steps.percentile_us(99):.0f} µs, max {self.steps.max_us:.0f} µs; 512 lookups p99 "
            f"{self.idle_probe.percentile_us(99):.0f} µs idle, {self.busy_probe.percentile_us(99):.0f} µs busy"
        )
