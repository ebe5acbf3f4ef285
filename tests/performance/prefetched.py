"""What prefetch orders save and cost: first tokens of a paced engine with and without them, as one JSON object.

    python tests/performance/prefetched.py --rounds 3

An engine computes a block of 16 tokens in 0.5 ms, and serves prompts of 128 blocks, one after another. All of them are
on a disk that brings blocks at 0.4 of the rate at which the engine computes them. Three variants take turns, each on a
stack of its own:

- `without`: no orders
- `ahead`: a router asks for a prompt's blocks over HTTP, 300 ms before the prompt arrives
- `useless`: it asks at ten times the rate for blocks that no request wants

Each variant runs with an engine that loads whatever is there, and (`computing_`) with one that computes a prompt if
that is sooner. Of each: the median over the rounds of the mean seconds to the first token, and its ratio to `without`
with the least and greatest ratio in any round.
"""

from __future__ import annotations

import http.client
import json
import math
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.performance.bench import command_line
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.stack.open import EngineStack, open_engine_stack
from tiered_kv.tiering.manager import TieringOffloadingManager

COMPUTE_S, DISK, STEP_S = 0.0005, 0.4, 0.002
BLOCK_BYTES, PROMPT_BLOCKS, PROMPTS, ROWS = 4096, 128, 64, 2048
EVERY_S, AHEAD_S, USELESS = 0.45, 0.3, 10
VARIANTS = ("without", "ahead", "useless")


def keys_of(prompt: int) -> list[OffloadKey]:
    return [
        make_offload_key(prompt.to_bytes(16, "big") + block.to_bytes(8, "big"), 0) for block in range(PROMPT_BLOCKS)
    ]


@contextmanager
def opened(*, computes: bool) -> Iterator[EngineStack]:
    """Give a stack whose disk has the blocks of twice the prompts: the second half is never asked for."""
    disk = {
        "type": "tests.support.paced_loads:PacedTier",
        "name": "disk",
        "bytes_per_s": DISK * BLOCK_BYTES / COMPUTE_S,
        "store_budget": "2MiB",
        "load_budget": "2MiB",
    }
    stack = {
        "version": 1,
        "block": {"bytes": BLOCK_BYTES, "tokens": 16},
        "namespace": {"model": "prefetched", "dtype": "uint8", "layout": "measured"},
        "primary": {"capacity": ROWS * BLOCK_BYTES},
        "metrics": {"listen": "127.0.0.1:0"},
        "prefill": {"tokens_per_s": int(16 / COMPUTE_S)} if computes else "off",
        "secondary": [disk],
    }
    engine = open_engine_stack(stack)
    try:
        tier: Any = engine.secondary_tiers[0]
        for prompt in range(2 * PROMPTS):
            tier._keys.update(keys_of(prompt))
        yield engine
    finally:
        engine.close()


class Router(threading.Thread):
    """Asks for the blocks of prompts, each at its time."""

    def __init__(self, port: int, orders: Sequence[tuple[float, int]]) -> None:
        super().__init__()
        self._port, self._orders = port, orders
        self.answers: list[int] = []

    def run(self) -> None:
        for at_s, prompt in self._orders:
            time.sleep(max(0.0, at_s - time.monotonic()))
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10.0)
            asked = {"block_hashes": [key[:-4].hex() for key in keys_of(prompt)], "until": 5}
            connection.request("POST", "/prefetch", json.dumps(asked), {"Content-Type": "application/json"})
            self.answers.append(connection.getresponse().status)
            connection.close()


def served(manager: TieringOffloadingManager, arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Serve each prompt when it arrives; return the seconds to each first token."""
    waits = []
    for at_s, prompt in arrivals:
        while time.monotonic() < at_s:
            pause(manager, at_s)
        context, keys = ReqContext(f"request-{prompt}"), keys_of(prompt)
        manager.on_new_request(context)
        manager.expect(len(keys), context)
        while None in (answers := manager.lookup_many(keys, context)):
            pause(manager, math.inf)
        loaded = answers.index(False) if False in answers else len(answers)
        if loaded:
            manager.prepare_load(keys[:loaded], context)
            manager.complete_load(keys[:loaded], context)
        computed_s = time.monotonic() + (len(keys) - loaded) * COMPUTE_S
        while time.monotonic() < computed_s:
            pause(manager, computed_s)
        waits.append(time.monotonic() - at_s)
        output = manager.prepare_store(keys[loaded:], context)
        if output is not None:
            manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
    return waits


def pause(manager: TieringOffloadingManager, until_s: float) -> None:
    """End a step of the engine, and let it last."""
    manager.on_schedule_end()
    time.sleep(max(0.0, min(STEP_S, until_s - time.monotonic())))


def run(variant: str, prompts: int, *, computes: bool) -> tuple[float, dict[str, int]]:
    with opened(computes=computes) as stack:
        assert stack.server is not None
        warm = [(time.monotonic(), prompt) for prompt in range(PROMPTS - 4, PROMPTS)]  # the tier's pace is learned
        served(stack.manager, warm)
        begin_s = time.monotonic() + 2 * AHEAD_S
        arrivals = [(begin_s + number * EVERY_S, number) for number in range(prompts)]
        orders: list[tuple[float, int]] = []
        if variant == "ahead":
            orders = [(at_s - AHEAD_S, prompt) for at_s, prompt in arrivals]
        elif variant == "useless":
            count = prompts * USELESS
            orders = [(begin_s + at * EVERY_S / USELESS, PROMPTS + at % PROMPTS) for at in range(count)]
        router = Router(stack.server.port, orders)
        router.start()
        waits = served(stack.manager, arrivals)
        router.join()
        assert not orders or set(router.answers) == {202}, router.answers
        return statistics.mean(waits), dict(stack.manager.orders.outcomes)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for name, computes in (("", False), ("computing_", True)):
        found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(arguments.rounds):
            for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                seconds, outcomes = run(variant, arguments.prompts, computes=computes)
                found[variant].append(seconds)
                result[f"{name}{variant}_outcomes"] = outcomes
        for variant in VARIANTS:
            result[f"{name}{variant}_s"] = round(statistics.median(found[variant]), 4)
            ratios = [one / base for one, base in zip(found[variant], found["without"], strict=True)]
            spread = [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))]
            result[f"{name}{variant}_over_without"] = spread
    print(json.dumps(result))


if __name__ == "__main__":
    main()
