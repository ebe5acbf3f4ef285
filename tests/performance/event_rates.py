"""What publishing events costs the scheduler's thread: keys per second and the step's p99, with events and without.

    python tests/performance/event_rates.py --rounds 9

Each step is a request of 512 keys that are looked up, stored and loaded. The primary tier is full, and the one tier
behind it finishes every job at once. The rounds are made in turns. A subscriber in a process of its own reads what
comes. With `--pause` a step is followed by a pause, as in an engine, where the model computes then.

Prints the medians of the rounds, the p99 of the steps of all rounds, and the ratios with over without, as one JSON
object. On a busy machine only the time that the scheduler's thread computes says much.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

from tests.performance.bench import InstantTier, block_key
from tiered_kv.base import ReqContext
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.observe.events import EventPublisher
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 4096
BLOCKS = 8192
REQUEST_KEYS = 512

SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""


def one_round(steps: int, pause_s: float, *, with_events: bool) -> tuple[list[float], float]:
    """Return the seconds of each step, and nanoseconds of the thread's own for a key."""
    region = PrimaryRegion(BLOCKS, BLOCK_BYTES)
    publisher = EventPublisher(EventSettings(publish="tcp://127.0.0.1:*"), {}) if with_events else None
    subscriber = None
    if publisher is not None:
        subscriber = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, publisher.publish_address])
        time.sleep(1.0)
    primary = CPUOffloadingManager(CPUBackend(region), enable_events=with_events)
    manager = TieringOffloadingManager(primary, [InstantTier(region.kv_view)], event_sink=publisher)
    numbers = itertools.count()
    times: list[float] = []
    thread_times: list[float] = []
    try:
        for step in range(steps + BLOCKS // REQUEST_KEYS):
            keys = [block_key(next(numbers)) for _ in range(REQUEST_KEYS)]
            context = ReqContext(str(step))
            began_s, thread_began_s = time.perf_counter(), time.thread_time()
            manager.on_new_request(context)
            for key in keys:
                manager.lookup(key, context)
            output = manager.prepare_store(keys, context)
            assert output is not None
            manager.complete_store(output.keys_to_store, context)
            manager.prepare_load(keys, context)
            manager.complete_load(keys, context)
            manager.on_request_finished(context)
            manager.on_schedule_end()
            times.append(time.perf_counter() - began_s)
            thread_times.append(time.thread_time() - thread_began_s)
            if pause_s:
                time.sleep(pause_s)
    finally:
        manager.shutdown()
        if subscriber is not None:
            subscriber.kill()
            subscriber.wait()
    warm = BLOCKS // REQUEST_KEYS  # the primary tier is full by then
    return times[warm:], sum(thread_times[warm:]) / (steps * REQUEST_KEYS) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    arguments = parser.parse_args()
    steps: dict[str, list[list[float]]] = {"without": [], "with": []}
    thread_ns: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(arguments.rounds):
        for side in sorted(steps, reverse=number % 2 == 0):
            times, spent_ns = one_round(arguments.steps, arguments.pause, with_events=side == "with")
            steps[side].append(times)
            thread_ns[side].append(spent_ns)
    answer: dict[str, float] = {}
    for side, rounds in steps.items():
        everything = sorted(itertools.chain(*rounds))
        answer[f"keys_per_s_{side}"] = statistics.median(len(each) * REQUEST_KEYS / sum(each) for each in rounds)
        answer[f"step_p99_us_{side}"] = everything[int(0.99 * len(everything))] * 1e6
        answer[f"thread_ns_per_key_{side}"] = statistics.median(thread_ns[side])
    for name in ("keys_per_s", "step_p99_us", "thread_ns_per_key"):
        answer[f"{name}_ratio"] = answer[f"{name}_with"] / answer[f"{name}_without"]
    print(json.dumps({name: round(figure, 3 if name.endswith("ratio") else None) for name, figure in answer.items()}))


if __name__ == "__main__":
    main()
