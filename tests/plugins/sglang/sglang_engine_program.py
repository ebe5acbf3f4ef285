"""Runs in an environment with SGLang and tests/support/sglang_cpu on its path: a whole engine on the CPU.

    python sglang_engine_program.py MODEL_DIRECTORY '{"hicache_mem_layout": "page_first", ...}'

The model is a small Llama of random weights; nothing is downloaded. It reads commands from its standard input, one line
of JSON each, and answers each with a line of JSON. `generate` answers prompts, `flush` drops what the engine has
in memory, `end` ends; `clear`, `detach` and `attach` are SGLang's own for a storage backend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_llama import DEPENDENT_WEIGHTS, llama_sizes, save_llama

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

MODEL = {
    **llama_sizes(vocab=512, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4),
    "initializer_range": DEPENDENT_WEIGHTS,
}


def save_model(directory: Path) -> None:
    """Save a Llama with seeded random weights, unless it is there already."""
    save_llama(directory, **MODEL, dtype="bfloat16")


SAMPLING = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}


def generate(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Answer prompts one by one; "storage" is how many tokens of each came from the storage."""
    answers = [engine.generate(input_ids=prompt, sampling_params=SAMPLING) for prompt in prompts]
    details = [answer["meta_info"].get("cached_tokens_details") or {} for answer in answers]
    return {
        "tokens": [answer["output_ids"] for answer in answers],
        "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
        "storage": [detail.get("storage", 0) for detail in details],
    }


def administrate(engine: Any, method: str, **arguments: object) -> dict[str, Any]:
    answer = engine.loop.run_until_complete(getattr(engine.tokenizer_manager, method)(**arguments))
    return {"success": answer.success, "message": getattr(answer, "message", "")}


def main() -> None:
    import sglang

    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    save_model(directory)
    engine = sglang.Engine(
        model_path=str(directory),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        page_size=64,
        mem_fraction_static=0.2,
        max_total_tokens=8192,
        context_length=8192,
        log_level="info",
        random_seed=0,
        **options,
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "generate":
                answer = generate(engine, command["prompts"])
            case "flush":
                answer = {"success": engine.flush_cache().success}
            case "clear" | "detach" | "attach" as verb:
                answer = administrate(engine, f"{verb}_hicache_storage", **command)
            case _:
                break
        print(json.dumps(answer), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
