"""Runs in an environment with vLLM for the CPU: a whole engine that is told, line by line, what to do.

    python vllm_attached_program.py MODEL_DIRECTORY '{"kv_transfer_config": {...}, "engine": {...}}'

{"prompts": [[SEED, TOKENS], ...]} serves prompts without the engine's own prefix cache, and says their tokens, how
many tokens were found, and the manager's counters. {"attached": true} steps until the engine is attached to its host's
cache, or is not. Prints lines of JSON. A test reads and writes them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from vllm_engine_program import CHAT_MODEL, generate, manager_of, open_engine, say  # type: ignore[import-not-found]

from tests.support.tiny_llama import save_llama
from tiered_kv.server.protocol import PING

WAIT_S = 60.0
ANSWER_TOKENS = 6


def serve(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    told = []
    for seed, size in prompts:
        numbers = random.Random(seed)
        told.append([numbers.randrange(512) for _ in range(size)])
    outputs = generate(engine, told, ANSWER_TOKENS)
    assert engine.reset_prefix_cache()
    settle(engine)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "found": [output.num_cached_tokens or 0 for output in outputs],
        "counters": {} if (manager := host_manager(engine)) is None else manager.counters()["host"],
    }


def settle(engine: Any) -> None:
    """Let the workers copy all that is stored, and the server know."""
    step(engine)
    manager = host_manager(engine)
    if manager is None or not manager.is_attached:
        return
    step_until(engine, lambda: not manager._transfers or not manager.is_attached)
    if not manager.is_attached:
        return
    link = manager.link
    link.channel.add(PING, 1)
    link.pong = 0
    step_until(engine, lambda: link.pong == 1 or manager.link is not link)


def step(engine: Any) -> None:
    generate(engine, [[2] * 8], 2)  # of no whole block


def host_manager(engine: Any) -> Any:
    manager = manager_of(engine)
    return None if manager is None else manager._manager


def step_until(engine: Any, is_over: Any) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_over():
        assert time.monotonic() < end_s, "it takes too long"
        step(engine)
        time.sleep(0.01)


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ.update(
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # to look into the scheduler
        VLLM_HOST_IP="127.0.0.1",
    )
    save_llama(directory, **CHAT_MODEL, dtype="float32")
    engine = open_engine(directory, options.get("kv_transfer_config"), **options.get("engine", {}))
    try:
        say({"ready": True})
        for line in sys.stdin:
            message = json.loads(line)
            if "prompts" in message:
                say(serve(engine, message["prompts"]))
            else:
                step_until(engine, lambda wanted=message["attached"]: host_manager(engine).is_attached is wanted)
                say(message)
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
