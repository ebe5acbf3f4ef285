"""What prefetch orders save and cost: first tokens of a paced engine with and without them, as one JSON object.

    python tests/performance/prefetched.py --prompts 64

An engine computes a block of 16 tokens in 0.5 ms, and serves prompts of 128 blocks, one after another, in steps of
`--step-ms`. All prompts are on a disk that brings blocks at 0.4 of the rate at which the engine computes them. Of three
variants each has a manager of its own:

- `without`: no orders
- `ahead`: a router orders a prompt's blocks 300 ms before the prompt arrives
- `useless`: it orders at ten times the rate blocks that no request wants

Each variant runs with an engine that loads whatever is there, and (`computing_`) with one that computes a prompt if
that is sooner. Of each: the mean milliseconds to the first token, the ratio to `without`, and what became of the
ordered blocks. Disk and engine run in simulated time: the figures have no noise, and no cost of Python.
`processor_us` is what a step takes of a processor without orders, and while `useless` ones load.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.performance.bench import command_line
from tests.support import paced_loads
from tests.support.paced_loads import PacedTier
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.config.settings import TierSettings
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.testing.control import ManualClock
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.tiering.order import PrefetchOrder

COMPUTE_S, DISK = 0.0005, 0.4
BLOCK_BYTES, PROMPT_BLOCKS, PROMPTS, ROWS = 4096, 128, 64, 2048
EVERY_S, AHEAD_S, USELESS = 0.45, 0.3, 10
VARIANTS = ("without", "ahead", "useless")


def keys_of(prompt: int) -> list[OffloadKey]:
    return [
        make_offload_key(prompt.to_bytes(16, "big") + block.to_bytes(8, "big"), 0) for block in range(PROMPT_BLOCKS)
    ]


class Engine:
    """An engine of one request at a time, its manager, and the router's orders, each at its time."""

    def __init__(self, manager: TieringOffloadingManager, clock: ManualClock, step_s: float) -> None:
        self.manager, self.clock, self.step_s = manager, clock, step_s
        self.orders: deque[tuple[float, int]] = deque()
        self.steps, self.processor_s = 0, 0.0

    def pause(self, until_s: float) -> None:
        """End a step, and let it last."""
        while self.orders and self.orders[0][0] <= self.clock():
            at_s, prompt = self.orders.popleft()
            self.manager.orders.give(PrefetchOrder(f"{at_s} {prompt}", keys_of(prompt), at_s + 5.0))
        began_s = time.thread_time()
        self.manager.on_schedule_end()
        self.processor_s += time.thread_time() - began_s
        self.steps += 1
        self.clock.advance(max(1e-6, min(self.step_s, until_s - self.clock())))

    def first_token(self, at_s: float, prompt: int) -> float:
        """Serve a prompt that arrives at a time; return the seconds to its first token."""
        manager, context, keys = self.manager, ReqContext(f"request-{prompt}"), keys_of(prompt)
        while self.clock() < at_s:
            self.pause(at_s)
        manager.on_new_request(context)
        manager.expect(len(keys), context)
        while None in (answers := manager.lookup_many(keys, context)):
            self.pause(self.clock() + self.step_s)
        loaded = answers.index(False) if False in answers else len(answers)
        if loaded:
            manager.prepare_load(keys[:loaded], context)
            manager.complete_load(keys[:loaded], context)
        computed_s = self.clock() + (len(keys) - loaded) * COMPUTE_S
        while self.clock() < computed_s:
            self.pause(computed_s)
        seconds = self.clock() - at_s
        output = manager.prepare_store(keys[loaded:], context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        return seconds


@contextmanager
def engine_of(step_s: float, *, computes: bool) -> Iterator[Engine]:
    """Give an engine whose disk has the blocks of twice the prompts: the second half is never asked for."""
    clock, region = ManualClock(), PrimaryRegion(ROWS, BLOCK_BYTES)
    with mock.patch.object(paced_loads, "time", mock.Mock(monotonic=clock)):
        tier = PacedTier(None, region.kv_view, "disk", bytes_per_s=DISK * BLOCK_BYTES / COMPUTE_S)
        for prompt in range(2 * PROMPTS):
            tier._keys.update(keys_of(prompt))
        manager = TieringOffloadingManager(
            PrimaryRows(CPUBackend(region)),
            [tier],
            settings=[TierSettings(type="disk", job_timeout=600.0)],
            compute_block_s=COMPUTE_S if computes else float("inf"),
            clock=clock,
        )
        try:
            yield Engine(manager, clock, step_s)
        finally:
            manager.shutdown(timeout_s=0.0)


def run(variant: str, prompts: int, step_s: float, *, computes: bool) -> tuple[float, dict[str, int], float]:
    with engine_of(step_s, computes=computes) as engine:
        for prompt in range(PROMPTS - 8, PROMPTS):  # the tier's pace is learned
            engine.first_token(engine.clock() + EVERY_S, prompt)
        begin_s = engine.clock() + 2 * AHEAD_S
        arrivals = [(begin_s + number * EVERY_S, number) for number in range(prompts)]
        if variant == "ahead":
            engine.orders.extend((at_s - AHEAD_S, prompt) for at_s, prompt in arrivals)
        elif variant == "useless":
            count = prompts * USELESS
            begin_s += 0.4 * EVERY_S / USELESS  # else some end just when a prompt arrives
            engine.orders.extend((begin_s + at * EVERY_S / USELESS, PROMPTS + at % PROMPTS) for at in range(count))
        engine.steps, engine.processor_s = 0, 0.0
        waits = [engine.first_token(*arrival) for arrival in arrivals]
        outcomes, processor_s = dict(engine.manager.orders.budget.outcomes), engine.processor_s / engine.steps
        return statistics.mean(waits), outcomes, processor_s


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--step-ms", type=float, default=8.0)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for name, computes in (("", False), ("computing_", True)):
        found: dict[str, float] = {}
        for variant in VARIANTS:
            mean_s, outcomes, processor_s = run(
                variant, min(arguments.prompts, PROMPTS - 8), arguments.step_ms / 1e3, computes=computes
            )
            found[variant] = mean_s
            result[f"{name}{variant}_ms"] = round(1e3 * mean_s, 2)
            result[f"{name}{variant}_over_without"] = round(mean_s / found["without"], 4)
            result[f"{name}{variant}_outcomes"] = outcomes
            result[f"{name}{variant}_processor_us"] = round(1e6 * processor_s, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
