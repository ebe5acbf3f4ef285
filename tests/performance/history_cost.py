"""What the history of blocks costs: the manager's keys per second, and a step's time, as one JSON object.

    python tests/performance/history_cost.py DIRECTORY --rounds 9

Each round measures as `manager_rates.py` and `step_latency.py` do, with the history and without it, the other one first
in every second round. Rates are of CPU time of the scheduler's thread, so that other programs do not count. The
history's thread takes 2 % of a processor more at most. A ratio is the rate with the history over the one without it in
the same round, and likewise a step's 99th percentile: the median, the least and the greatest.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict

from tests.performance import manager_rates, step_latency
from tests.performance.bench import command_line, spread

ENTRIES = 1 << 20


def main() -> None:
    arguments = command_line(__doc__, "directory", rounds=9, blocks=20_000, steps=300).parse_args()
    samples: dict[int, dict[str, list[float]]] = {0: defaultdict(list), ENTRIES: defaultdict(list)}
    for number in range(arguments.rounds):
        for entries in (0, ENTRIES) if number % 2 else (ENTRIES, 0):
            with manager_rates.opened("lru", arguments.blocks, entries) as manager:
                for name, rate in manager_rates.rates(manager, arguments.blocks, time.thread_time).items():
                    samples[entries][name].append(rate)
            sizes = (64 << 10, arguments.steps, 1, entries)
            steps = step_latency.measure(arguments.directory, "memory", *sizes)
            for kind in ("idle_step_us", "busy_step_us"):
                for percentile in ("p50", "p99"):
                    samples[entries][f"{kind}_{percentile}"].append(steps[kind][percentile])
    result: dict[str, object] = {}
    for name, without in samples[0].items():
        with_history = samples[ENTRIES][name]
        result[f"{name}_with"] = spread(with_history)
        result[f"{name}_without"] = spread(without)
        result[f"{name}_ratio"] = spread([mine / other for mine, other in zip(with_history, without, strict=True)])
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
