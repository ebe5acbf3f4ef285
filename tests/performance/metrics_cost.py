"""What metrics cost the scheduler: keys per second and the time of a step, with and without: one JSON object.

    python tests/performance/metrics_cost.py --rounds 9

Without, nothing is measured and nobody reads. With, everything is as it is, and a thread reads and writes all metrics
every `--scrape-s`, more often than a Prometheus does. Both are measured by turns. A row has the median, the lowest and
the highest of the ratios within a round, with over without. The keys per second are those of
manager_rates.py, by the processor's time of the manager's thread, which other programs do not change. A step is one of
step_latency.py over a memory tier with nothing in flight.
"""

from __future__ import annotations

import gc
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import thread_time
from typing import Any
from unittest import mock

import tiered_kv
from tests.performance import manager_rates
from tests.performance.bench import command_line, spread
from tests.performance.step_latency import Steps, percentiles
from tiered_kv.observe.prometheus import StackCollector, exposition
from tiered_kv.observe.step_timer import StepTimer
from tiered_kv.tiering import search
from tiered_kv.tiering.observer import RestoredBlocks
from tiered_kv.tiering.tier_observer import TierMeasures

BLOCK_BYTES = 64 << 10
PRIMARY_BYTES = 256 << 20


@contextmanager
def unmeasured() -> Iterator[None]:
    """Leave all measuring out while the block runs."""

    def nothing(*_: object) -> None:
        return

    with ExitStack() as patches:
        for owner, name in ((StepTimer, "count_step"), (RestoredBlocks, "add"), (TierMeasures, "add_job")):
            patches.enter_context(mock.patch.object(owner, name, nothing))
        patches.enter_context(mock.patch.object(search, "SAMPLED_STEPS", 1 << 60))
        yield


@contextmanager
def scraped(counters: Callable[[], Any], every_s: float) -> Iterator[None]:
    """Read and write all metrics every so often while the block runs."""
    ended = threading.Event()
    collector = StackCollector(counters)

    def scrape() -> None:
        while not ended.wait(every_s):
            exposition(collector)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rates(blocks: int, every_s: float) -> tuple[dict[str, int], dict[str, int]]:
    """Return the manager's keys per second with metrics, and without."""
    with manager_rates.opened("lru", blocks) as manager, scraped(manager.counters, every_s):
        measured = manager_rates.rates(manager, blocks, thread_time)
    with unmeasured(), manager_rates.opened("lru", blocks) as manager:
        return measured, manager_rates.rates(manager, blocks, thread_time)


def measure(rounds: int, blocks: int, steps: int, every_s: float) -> dict[str, object]:
    rates_by_round = [rates(blocks, every_s) for _ in range(rounds)]
    config = {
        "namespace": {"model": "metrics-cost"},
        "block": {"bytes": BLOCK_BYTES, "tokens": 16},
        "primary": {"capacity": PRIMARY_BYTES},
        "secondary": [{"type": "memory", "capacity": "512MiB"}],
    }
    steps_by_round: list[tuple[dict[str, float], dict[str, float]]] = []
    with tiered_kv.open_stack(config) as stack:
        gc.collect()
        gc.freeze()
        scheduler = Steps(stack.manager, PRIMARY_BYTES // BLOCK_BYTES)
        scheduler.idle(steps)
        for _ in range(rounds):
            with scraped(stack.counters, every_s):
                measured = percentiles(scheduler.idle(steps))
            with unmeasured():
                steps_by_round.append((measured, percentiles(scheduler.idle(steps))))
    return {
        **{
            f"{name}_over_without": spread([mine[name] / other[name] for mine, other in rates_by_round])
            for name in rates_by_round[0][0]
        },
        **{
            f"step_{name}_over_without": spread([mine[name] / other[name] for mine, other in steps_by_round])
            for name in ("p50", "p99")
        },
        "step_us": {
            name: round(statistics.median(mine[name] for mine, _ in steps_by_round)) for name in ("p50", "p99")
        },
    }


def main() -> None:
    arguments = command_line(__doc__, rounds=9, blocks=20_000, steps=300, scrape_s=1.0).parse_args()
    print(json.dumps(measure(arguments.rounds, arguments.blocks, arguments.steps, arguments.scrape_s)))


if __name__ == "__main__":
    main()
