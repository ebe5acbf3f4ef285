"""What recording costs a scheduler's step: one JSON object.

    python tests/performance/record_cost.py DIRECTORY --rounds 60

Two managers over a tier that ends each job at once, one of them recording into DIRECTORY. Both handle the same requests
of 512 keys, in turns, one by one: a request is the calls of a scheduler's step, with a lookup of each key. Half of the
requests load their blocks, and half store them. A step's time is what its thread takes of a processor, as the median
over all rounds. The second of two turns finds the keys in the processor's cache: so a ratio is the mean of that of the
first turns and that of the second ones. `calls_us` is what the recorder's calls for a request take, without the rest.
After each round the recorder's thread empties its queue; `thread_us_per_key` is what that takes.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.performance.bench import InstantTier, block_key, command_line, handle, in_turn, load, store
from tests.performance.manager_rates import BLOCK_BYTES, REQUEST_KEYS, look_up
from tiered_kv.base import OffloadKey
from tiered_kv.config.files import RecordSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.hints import Hints
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.recording.manager import RecordingManager
from tiered_kv.tiering.recording.recorder import Recorder, open_trace

SIDES = ("off", "on")
ACTS = ("store", "load")
STEPS = 16
"""Requests that load, and requests that store, in a round of one side."""
ROWS = 4 * STEPS * REQUEST_KEYS


@contextmanager
def opened(recorder: Recorder | None) -> Iterator[TieringOffloadingManager]:
    region = PrimaryRegion(ROWS, BLOCK_BYTES)
    kind = TieringOffloadingManager if recorder is None else partial(RecordingManager, recorder, False)
    manager = kind(PrimaryRows(CPUBackend(region), "lru"), [InstantTier(region.kv_view)])
    try:
        yield manager
    finally:
        manager.shutdown()


def step_s(manager: TieringOffloadingManager, keys: list[OffloadKey], act: str) -> float:
    """Return the seconds that one request takes of a processor."""
    acts = {"store": (partial(look_up, False), store), "load": (partial(look_up, True), load)}[act]
    began_s = time.thread_time()
    handle(manager, keys, acts)
    return time.thread_time() - began_s


def ratio(on: list[float], off: list[float]) -> float:
    """Return how much longer a step takes; a side begins in every second request."""
    firsts, seconds = (on[0::2], off[1::2]), (on[1::2], off[0::2])
    return statistics.mean(statistics.median(ours) / statistics.median(theirs) for ours, theirs in (firsts, seconds))


def calls(recorder: Recorder, number: int, keys: list[OffloadKey]) -> float:
    """Return the seconds that the recorder's calls for a request take."""
    began_s = time.thread_time()
    recorder.begin(str(number), "", Hints(), began_s)
    recorder.use(str(number), keys)
    recorder.end(str(number))
    return time.thread_time() - began_s


def settle(recorder: Recorder) -> float:
    """Wait until the recorder has written all requests; return what its thread took of a processor."""
    began_s = time.process_time() - time.thread_time()
    while recorder.has_work:
        time.sleep(0.01)
    return time.process_time() - time.thread_time() - began_s


def main() -> None:
    arguments = command_line(__doc__, "directory", rounds=60).parse_args()
    taken: dict[tuple[str, str], list[float]] = {(act, side): [] for act in ACTS for side in SIDES}
    thread_s: list[float] = []
    calls_s: list[float] = []
    with ExitStack() as closing:
        recorder = Recorder(open_trace(RecordSettings(path=str(Path(arguments.directory) / "trace.jsonl")), 16))
        managers = {"off": closing.enter_context(opened(None)), "on": closing.enter_context(opened(recorder))}
        numbers = itertools.count()
        for _ in range(arguments.rounds):
            prompts = [[block_key(next(numbers)) for _ in range(REQUEST_KEYS)] for _ in range(STEPS)]
            gc.collect()
            gc.disable()
            for act in ACTS:
                for number, keys in enumerate(prompts):
                    for side in in_turn(number, SIDES):
                        taken[act, side].append(step_s(managers[side], keys, act))
            calls_s += [calls(recorder, number, keys) for number, keys in enumerate(prompts)]
            gc.enable()
            thread_s.append(settle(recorder))
        lost = recorder.lost_requests
    step_us = {f"{act}_{side}": round(1e6 * statistics.median(each), 1) for (act, side), each in taken.items()}
    answer = {
        "step_us": step_us,
        **{f"{act}_on_over_off": round(ratio(taken[act, "on"], taken[act, "off"]), 4) for act in ACTS},
        "calls_us": round(1e6 * statistics.median(calls_s), 2),
        "thread_us_per_key": round(1e6 * statistics.median(thread_s) / (3 * STEPS * REQUEST_KEYS), 3),
        "unrecorded_requests": lost,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
