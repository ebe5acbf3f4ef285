"""What metrics, history and events cost the scheduler's thread, in turns in one process: one JSON object.

    python tests/performance/observing_cost.py --rounds 300
    python tests/performance/observing_cost.py --rounds 60 --steps 25

Several managers handle the same requests of 512 keys, one after the other. `plain` has metrics only, and is what the
others are compared with. `history`, `events` and `both` have those, too. `unmeasured` is without metrics. Their order
is drawn anew each time, since the threads of one still work while the next one runs.

The first command measures each thing that a request does, in turns of one request. The second measures whole steps, in
turns of 25: 512 keys are looked up, stored and loaded. A pause follows each step, as in an engine, where the model
computes then. A program of its own reads the events, and a thread reads the metrics of `scraped` all the time.

The CPU time of the scheduler's thread holds beside other programs too: nanoseconds for a key, as 10th percentile and
median of the requests, and the rate over that of `plain`. The others are by the clock, and need an idle machine: the
99th percentile of a step in microseconds, the median of the turns' keys per second, and the quartiles of their ratios.
What the threads of history and publisher take from a step falls on all managers, if turns are of one request.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest import mock

from tests.performance.bench import InstantTier, block_key, command_line
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.observe.events import EventPublisher
from tiered_kv.observe.history import BlockHistory
from tiered_kv.observe.prometheus import StackCollector, exposition
from tiered_kv.observe.step_timer import StepTimer
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

Act = Callable[[TieringOffloadingManager, list[OffloadKey], ReqContext], object]


def store(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)


def look_up(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    lookup = manager.lookup
    for key in keys:
        lookup(key, context)


def load(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)


def look_up_and_load(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    look_up(manager, keys, context)
    load(manager, keys, context)


def whole_step(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    look_up(manager, keys, context)
    store(manager, keys, context)
    load(manager, keys, context)


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

    with ExitStack() as patches:
        for owner, name in ((StepTimer, "count_step"), (TierMeasures, "add_job")):
            patches.enter_context(mock.patch.object(owner, name, nothing))
        yield


@contextmanager
def scraped(manager: TieringOffloadingManager) -> Iterator[None]:
    """Read and write all metrics every so often while the block runs."""
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
    """What one manager's requests took: of the thread's CPU time and by the clock, and the rate of each turn."""

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
        found: dict[str, object] = {}
        for name, share in (("p10", 0.1), ("p50", 0.5)):
            mine, other = (percentile(each.cpu_ns, share) for each in (self, plain))
            found |= {f"{name}_ns": round(mine / REQUEST_KEYS, 1), f"{name}_rate_ratio": round(other / mine, 3)}
        mine, other = (percentile(each.wall_ns, 0.99) for each in (self, plain))
        found |= {"p99_us": round(mine / 1e3), "p99_ratio": round(mine / other, 3)}
        ratios = [mine / other for mine, other in zip(self.keys_per_s, plain.keys_per_s, strict=True)]
        quartiles = [percentile(ratios, share) for share in (0.25, 0.5, 0.75)]
        found["keys_per_s"] = round(statistics.median(self.keys_per_s))
        return found | {"keys_per_s_ratio_quartiles": [round(ratio, 3) for ratio in quartiles]}


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def handle(manager: TieringOffloadingManager, act: Act, keys: list[OffloadKey], pause_s: float) -> tuple[int, int]:
    """Handle one request, pause, and return the nanoseconds: of the thread's CPU time, and by the clock."""
    context = ReqContext(str(next(NUMBERS)))
    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    manager.on_new_request(context)
    act(manager, keys, context)
    manager.on_request_finished(context)
    manager.on_schedule_end()
    times = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    time.sleep(pause_s)
    return times


def measure(rounds: int, steps: int) -> dict[str, dict[str, Taken]]:
    """Return what requests took, by what they do and by manager.

    Args:
        rounds: How many turns each manager has.
        steps: Whole steps in a turn; 0 for the parts of a step, in turns of one request.
    """
    parts: dict[str, Act] = {"store": store, "lookup_hit": look_up, "load": look_up_and_load, "lookup_miss": look_up}
    acts = {"step": whole_step} if steps else parts
    sides = SIDES | {"scraped": ()} if steps else SIDES
    taken = {name: {side: Taken() for side in sides} for name in acts}
    requests = steps or 1
    warm = math.ceil(BLOCKS / REQUEST_KEYS / requests)  # turns: the primary tiers are full by then
    with ExitStack() as closing:
        managers = {side: open_manager(closing, *has, subscribe=steps > 0) for side, has in sides.items()}
        for number in range(warm + rounds):
            known, unknown = ([keys_of_a_request() for _ in range(requests)] for _ in range(2))
            order = random.Random(number).sample([*sides], len(sides))
            for name, act in acts.items():
                for side in order:
                    if steps:
                        gc.collect()
                        time.sleep(TURN_PAUSE_S)
                    with around(side, managers[side]):
                        turn = unknown if name == "lookup_miss" else known
                        times = [handle(managers[side], act, keys, PAUSE_S if steps else 0) for keys in turn]
                    if number >= warm:
                        taken[name][side].add(times)
            time.sleep(PAUSE_S)
    return taken


def keys_of_a_request() -> list[OffloadKey]:
    return [block_key(next(NUMBERS)) for _ in range(REQUEST_KEYS)]


def around(side: str, manager: TieringOffloadingManager) -> AbstractContextManager[None]:
    """Return what is to be there during a turn of a side."""
    return unmeasured() if side == "unmeasured" else scraped(manager) if side == "scraped" else nullcontext()


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
