"""An SGLang engine with Tiered KV, end to end: it answers, ends, and a second one finds its pages.

    python examples/sglang/run.py

Everything it makes goes to ./sglang-example: a small Llama of random weights, and the tier's directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORK = Path("sglang-example")
CONFIG = Path(__file__).with_name("hicache.json")
PROMPT_TOKENS = 1500


def main() -> int:
    answers = []
    for name in ("first engine", "second engine"):
        program = [sys.executable, __file__, "--answer"]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        answers.append(answer)
        print(
            f"{name}: {answer['found']} of {answer['asked']} prompt tokens found in the storage, "
            f"{answer['seconds']:.2f} s for all answers"
        )
    is_same = answers[0]["tokens"] == answers[1]["tokens"]
    print("the answers are the same" if is_same else "THE ANSWERS DIFFER")
    return 0 if is_same and answers[1]["found"] > answers[0]["found"] else 1


def answer() -> None:
    """Start an engine, let it answer three prompts that begin alike, and print what came of it."""
    import torch

    settings: dict[str, Any] = {"device": "cuda"}
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        settings = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    import sglang

    engine = sglang.Engine(
        model_path=str(make_model()),
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        page_size=64,
        mem_fraction_static=0.2,
        max_total_tokens=16384,
        random_seed=0,
        log_level="error",
        enable_hierarchical_cache=True,
        hicache_ratio=2,
        hicache_mem_layout="page_first",
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=CONFIG.read_text(),
        **settings,
    )
    shared = [number * 7 % 500 for number in range(PROMPT_TOKENS)]
    prompts = [[*shared, *range(start, start + 60)] for start in (0, 100, 200)]
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    began_s = time.perf_counter()
    outputs = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    result = {
        "tokens": [output["output_ids"] for output in outputs],
        "asked": sum(map(len, prompts)),
        "found": sum((output["meta_info"]["cached_tokens_details"] or {}).get("storage", 0) for output in outputs),
        "seconds": time.perf_counter() - began_s,
    }
    time.sleep(1.0)  # SGLang stores pages behind the answers
    engine.shutdown()
    print(json.dumps(result))


def make_model() -> Path:
    """Save a small Llama of seeded random weights, unless it is there, and return its directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = WORK / "model"
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        size = LlamaConfig(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            initializer_range=0.2,
            dtype="bfloat16",
        )
        LlamaForCausalLM(size).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer()
    else:
        sys.exit(main())
