"""What publishing events costs the scheduler's thread: keys per second and the step's p99, with events and without.

    python tests/performance/event_rates.py --rounds 100

Each step is a request of 512 keys that are looked up, stored and loaded. The primary tiers are full, and the one tier
behind each finishes every job at once. Two managers live in this process, one with events and one without, and take
turns of 25 steps. So both see the same machine, which changes more from minute to minute than events cost. A
subscriber in a process of its own reads what comes. With `--pause` a step is followed by a pause, as in an engine,
where the model computes then. With `--history` the manager with events has the history of blocks, too.

Prints medians of the turns, the p99 of the steps of all turns, and the ratios with over without, as one JSON object.
The ratio of the rates is the median of those of each pair of turns, with its quartiles.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import subprocess
import sys
import time

from tests.performance.bench import InstantTier, block_key, command_line
from tiered_kv.base import ReqContext
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.observe.events import EventPublisher
from tiered_kv.observe.history import BlockHistory
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCK_BYTES = 4096
BLOCKS = 8192
REQUEST_KEYS = 512
TURN_PAUSE_S = 0.1
"""Between turns, so that what one has queued is sent before the next begins."""

SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""


class Side:
    """A manager, with events or without.

    Attributes:
        step_s: Seconds of each step.
        keys_per_s, thread_ns: Of each turn: its rate, and nanoseconds of the thread's own for a key.
    """

    def __init__(self, *, with_events: bool, with_history: bool) -> None:
        self.step_s: list[float] = []
        self.keys_per_s: list[float] = []
        self.thread_ns: list[float] = []
        self._subscriber: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        region = PrimaryRegion(BLOCKS, BLOCK_BYTES)
        publisher = None
        if with_events:
            publisher = EventPublisher(EventSettings(publish="tcp://127.0.0.1:*"), {})
            self._subscriber = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, publisher.publish_address])
            time.sleep(1.0)
        primary = CPUOffloadingManager(CPUBackend(region), enable_events=with_events)
        tiers = [InstantTier(region.kv_view)]
        history = BlockHistory(1 << 20, ["cpu", "instant"], [None, None]) if with_history else None
        self._manager = TieringOffloadingManager(primary, tiers, history=history, event_sink=publisher)
        for _ in range(BLOCKS // REQUEST_KEYS):
            self._step(0.0)

    def turn(self, steps: int, pause_s: float) -> None:
        gc.collect()
        taken = [self._step(pause_s) for _ in range(steps)]
        times, thread_times = [list(each) for each in zip(*taken, strict=True)]
        self.step_s += times
        self.keys_per_s.append(steps * REQUEST_KEYS / sum(times))
        self.thread_ns.append(sum(thread_times) / (steps * REQUEST_KEYS) * 1e9)
        time.sleep(TURN_PAUSE_S)

    def _step(self, pause_s: float) -> tuple[float, float]:
        manager = self._manager
        keys = [block_key(next(self._numbers)) for _ in range(REQUEST_KEYS)]
        context = ReqContext(str(next(self._numbers)))
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
        times = time.perf_counter() - began_s, time.thread_time() - thread_began_s
        if pause_s:
            time.sleep(pause_s)
        return times

    def close(self) -> None:
        self._manager.shutdown()
        if self._subscriber is not None:
            self._subscriber.kill()
            self._subscriber.wait()


def main() -> None:
    parser = command_line(__doc__, rounds=100, steps=25)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--history", action="store_true")
    arguments = parser.parse_args()
    sides = {
        "without": Side(with_events=False, with_history=False),
        "with": Side(with_events=True, with_history=arguments.history),
    }
    try:
        for number in range(arguments.rounds):
            for side in sorted(sides, reverse=number % 2 == 0):
                sides[side].turn(arguments.steps, arguments.pause)
    finally:
        for opened in sides.values():
            opened.close()
    answer: dict[str, float] = {}
    for name, each in sides.items():
        answer[f"keys_per_s_{name}"] = statistics.median(each.keys_per_s)
        answer[f"step_p99_us_{name}"] = sorted(each.step_s)[int(0.99 * len(each.step_s))] * 1e6
        answer[f"thread_ns_per_key_{name}"] = statistics.median(each.thread_ns)
    for name in ("step_p99_us", "thread_ns_per_key"):
        answer[f"{name}_ratio"] = answer[f"{name}_with"] / answer[f"{name}_without"]
    ratios = [a / b for a, b in zip(sides["with"].keys_per_s, sides["without"].keys_per_s, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    for name, figure in zip(("q1_ratio", "ratio", "q3_ratio"), quartiles, strict=True):
        answer[f"keys_per_s_{name}"] = figure
    print(json.dumps({name: round(figure, 3 if name.endswith("ratio") else None) for name, figure in answer.items()}))


if __name__ == "__main__":
    main()
