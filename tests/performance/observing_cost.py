"""What history and events cost the scheduler's thread for a key, in turns request by request: one JSON object.

    python tests/performance/observing_cost.py --rounds 300

Four managers in one process handle the same requests of 512 keys, one after the other: without both, with the history,
with events, with both. Each starts first as often as the others. The figures are CPU nanoseconds of the scheduler's
thread for a key: the 10th percentile and the median of the requests, and the rate over the one without both. So they
hold beside other programs too. What the threads of the history and the publisher take from a step, and from the
processor's cache, falls on all four: `history_cost.py` and `event_rates.py` show that, on a machine that is idle.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

from tests.performance.bench import InstantTier, block_key, command_line
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.config.stack_config import EventSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.observe.events import EventPublisher
from tiered_kv.observe.history import BlockHistory
from tiered_kv.tiering.manager import TieringOffloadingManager

BLOCKS = 8192
REQUEST_KEYS = 512
SIDES = {"none": (False, False), "history": (True, False), "events": (False, True), "both": (True, True)}

Act = Callable[[TieringOffloadingManager, list[OffloadKey], ReqContext], object]


def open_manager(with_history: bool, with_events: bool) -> TieringOffloadingManager:
    region = PrimaryRegion(BLOCKS, 4096)
    events = EventPublisher(EventSettings(publish="tcp://127.0.0.1:*"), {}) if with_events else None
    history = BlockHistory(1 << 20, ["cpu", "instant"], [None, None]) if with_history else None
    primary = CPUOffloadingManager(CPUBackend(region), enable_events=with_events)
    return TieringOffloadingManager(primary, [InstantTier(region.kv_view)], history=history, event_sink=events)


def store(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    output = manager.prepare_store(keys, context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context)


def look_up(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    lookup = manager.lookup
    for key in keys:
        lookup(key, context)


def load(manager: TieringOffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    look_up(manager, keys, context)
    manager.prepare_load(keys, context)
    manager.complete_load(keys, context)


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures by what a request does, and by side."""
    managers = {side: open_manager(*has) for side, has in SIDES.items()}
    acts: dict[str, Act] = {"store": store, "lookup_hit": look_up, "load": load, "lookup_miss": look_up}
    times: dict[str, dict[str, list[int]]] = {name: {side: [] for side in SIDES} for name in acts}
    numbers, warm = itertools.count(), BLOCKS // REQUEST_KEYS  # the primary tier is full by then
    try:
        for number in range(warm + rounds):
            keys = [block_key(next(numbers)) for _ in range(REQUEST_KEYS)]
            absent = [block_key((1 << 40) + next(numbers)) for _ in range(REQUEST_KEYS)]
            sides = [*SIDES][number % len(SIDES) :] + [*SIDES][: number % len(SIDES)]
            for name, act in acts.items():
                for side in sides:
                    manager, context = managers[side], ReqContext(f"{number}-{name}")
                    began_ns = time.thread_time_ns()
                    manager.on_new_request(context)
                    act(manager, absent if name == "lookup_miss" else keys, context)
                    manager.on_request_finished(context)
                    manager.on_schedule_end()
                    if number >= warm:
                        times[name][side].append(time.thread_time_ns() - began_ns)
            time.sleep(0.005)  # as while a model computes
    finally:
        for manager in managers.values():
            manager.shutdown()
    return {
        name: {side: figures(taken, of_sides["none"]) for side, taken in of_sides.items()}
        for name, of_sides in times.items()
    }


def figures(taken: list[int], without: list[int]) -> dict[str, float]:
    """Return percentiles in nanoseconds for a key, and the rates over those without."""
    found: dict[str, float] = {}
    for name, share in (("p10", 0.1), ("p50", 0.5)):
        mine, other = (sorted(each)[int(share * len(each))] for each in (taken, without))
        found |= {f"{name}_ns": round(mine / REQUEST_KEYS, 1), f"{name}_rate_ratio": round(other / mine, 3)}
    return found


def main() -> None:
    parser = command_line(__doc__, rounds=300)
    print(json.dumps(measure(parser.parse_args().rounds), indent=2))


if __name__ == "__main__":
    main()
