"""What metrics, history and events cost the scheduler's thread, in turns in one process: one JSON object.

    python tests/performance/observing_cost.py --rounds 300
    python tests/performance/observing_cost.py --rounds 60 --steps 25

Several managers handle the same requests of 512 keys, one after the other. `plain` has metrics only, and is what the
others are compared with. `history`, `events` and `both` have those, too. `unmeasured` is without metrics. Their order
is drawn anew each time, since the threads of one still work while the next one runs.

The first command measures each thing that a request does, in turns of one request. The second measures whole steps, in
turns of 25: 512 keys are looked up, stored and loaded. A pause follows each step, as in an engine, where the model
computes then. A program of its own reads the events, and a thread reads the metrics of `scraped` all the time.

Other programs do not change the CPU time of the scheduler's thread: nanoseconds for a key, the median of the requests,
and the rate over that of `plain`. The other figures are by the clock, and need an idle machine: the 99th percentile of
a step in microseconds, the median of the turns' keys per second, and the quartiles of their ratios. What the threads of
history and publisher take from a step falls on all managers, if turns are of one request.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

from tests.performance.bench import Act, InstantTier, block_key, command_line, handle, load, ratios, store
from tiered_kv.base import OffloadingManager, OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.exporters.events import EventPublisher
from tiered_kv.exporters.metrics import StackCollector, exposition
from tiered_kv.history.recorder import BlockHistory
from tiered_kv.metrics.instruments import StepTimer
from tiered_kv.stack_config import EventSettings
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.tier_observer import TierMeasures

BLOCKS = 8192
REQUEST_KEYS = 512
PAUSE_S = 0.005
TURN_PAUSE_S = 0.1
"""Before a turn of steps, so that what the one before has queued is sent."""
SCRAPE_S = 0.05
"""Far more often than a Prometheus."""
SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
while True:
    socket.recv_multipart()
"""
SIDES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "history": ("history",),
    "events": ("events",),
    "both": ("history", "events"),
    "unmeasured": (),
}
NUMBERS = itertools.count()


def look_up(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    lookup = manager.lookup
    for key in keys:
        lookup(key, context)


PARTS: dict[str, list[Act]] = {
    "store": [store],
    "lookup_hit": [look_up],
    "load": [look_up, load],
    "lookup_miss": [look_up],
}


def open_manager(closing: ExitStack, *has: str, subscribe: bool) -> TieringOffloadingManager:
    region = PrimaryRegion(BLOCKS, 4096)
    events = EventPublisher(EventSettings(publish="tcp://127.0.0.1:*"), {}) if "events" in has else None
    history = BlockHistory(1 << 20, ["cpu", "instant"], [None, None]) if "history" in has else None
    primary = CPUOffloadingManager(CPUBackend(region), enable_events="events" in has)
    tiers = [InstantTier(region.kv_view)]
    manager = TieringOffloadingManager(primary, tiers, history=history, event_sink=events)
    closing.callback(manager.shutdown)
    if events is not None and subscribe:
        subscriber = closing.enter_context(subprocess.Popen([sys.executable, "-c", SUBSCRIBER, events.publish_address]))
        closing.callback(subscriber.kill)
        time.sleep(1.0)  # until it has connected
    return manager


@contextmanager
def unmeasured() -> Iterator[None]:
    """Leave all measuring out while the block runs."""

    def nothing(*_: object) -> None:
        return

    with mock.patch.object(StepTimer, "end_step", nothing), mock.patch.object(TierMeasures, "add_job", nothing):
        yield


@contextmanager
def scraped(manager: TieringOffloadingManager) -> Iterator[None]:
    """Read all metrics every `SCRAPE_S` while the block runs."""
    ended = threading.Event()
    collector = StackCollector(manager.counters)

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            exposition(collector)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Taken:
    """What one manager's requests took."""

    def __init__(self) -> None:
        self.cpu_ns: list[int] = []
        self.wall_ns: list[int] = []
        self.keys_per_s: list[float] = []

    def add(self, turn: Sequence[tuple[int, int]]) -> None:
        cpu_ns, wall_ns = zip(*turn, strict=True)
        self.cpu_ns += cpu_ns
        self.wall_ns += wall_ns
        self.keys_per_s.append(len(turn) * REQUEST_KEYS / sum(wall_ns) * 1e9)

    def figures(self, plain: Taken) -> dict[str, object]:
        """Return what is printed, with the ratios over the manager that has metrics only."""
        cpu_ns, plain_cpu_ns = (percentile(each.cpu_ns, 0.5) for each in (self, plain))
        p99_ns, plain_p99_ns = (percentile(each.wall_ns, 0.99) for each in (self, plain))
        compared = ratios(self.keys_per_s, plain.keys_per_s)
        return {
            "p50_ns": round(cpu_ns / REQUEST_KEYS, 1),
            "p50_rate_ratio": round(plain_cpu_ns / cpu_ns, 3),
            "p99_us": round(p99_ns / 1e3),
            "p99_ratio": round(p99_ns / plain_p99_ns, 3),
            "keys_per_s": round(statistics.median(self.keys_per_s)),
            "keys_per_s_ratio_quartiles": [round(percentile(compared, share), 3) for share in (0.25, 0.5, 0.75)],
        }


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def time_request(
    manager: TieringOffloadingManager, acts: Sequence[Act], keys: list[OffloadKey], pause_s: float
) -> tuple[int, int]:
    """Handle one request, pause, and return the nanoseconds: of the thread's CPU time, and by the clock."""
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    handle(manager, keys, acts)
    times = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    time.sleep(pause_s)
    return times


def measure(rounds: int, steps: int) -> dict[str, dict[str, Taken]]:
    """Return what requests took, by what they do and by manager.

    Args:
        rounds: How many turns each manager has.
        steps: Whole steps in a turn; 0 for the parts of a step, in turns of one request.
    """
    acts = {"step": [look_up, store, load]} if steps else PARTS
    sides = SIDES | {"scraped": ()} if steps else SIDES
    taken = {name: {side: Taken() for side in sides} for name in acts}
    requests = steps or 1
    warm = math.ceil(BLOCKS / REQUEST_KEYS / requests)  # turns: the primary tiers are full by then
    with ExitStack() as closing:
        managers = {side: open_manager(closing, *has, subscribe=steps > 0) for side, has in sides.items()}
        for number in range(warm + rounds):
            known, unknown = ([keys_of_a_request() for _ in range(requests)] for _ in range(2))
            order = random.Random(number).sample([*sides], len(sides))
            for name, its_acts in acts.items():
                for side in order:
                    if steps:
                        gc.collect()
                        time.sleep(TURN_PAUSE_S)
                    with around(side, managers[side]):
                        turn = unknown if name == "lookup_miss" else known
                        times = [time_request(managers[side], its_acts, keys, PAUSE_S if steps else 0) for keys in turn]
                    if number >= warm:
                        taken[name][side].add(times)
            time.sleep(PAUSE_S)
    return taken


def around(side: str, manager: TieringOffloadingManager) -> AbstractContextManager[None]:
    return unmeasured() if side == "unmeasured" else scraped(manager) if side == "scraped" else nullcontext()


def keys_of_a_request() -> list[OffloadKey]:
    return [block_key(next(NUMBERS)) for _ in range(REQUEST_KEYS)]


def main() -> None:
    arguments = command_line(__doc__, rounds=300, steps=0).parse_args()
    taken = measure(arguments.rounds, arguments.steps)
    answer = {
        name: {side: mine.figures(of_sides["plain"]) for side, mine in of_sides.items()}
        for name, of_sides in taken.items()
    }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
