"""A vLLM engine on the CPU with Tiered KV, end to end: it answers, ends, and a second one finds its blocks.

    python examples/vllm/run.py our_stack.json        the whole stack as vLLM's spec
    python examples/vllm/run.py our_tiers.json        a tier of ours below vLLM's own tiering

Everything it makes goes to ./vllm-example: a small Llama of random weights, and the tier's directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORK = Path("vllm-example")
PROMPT_TOKENS = 1500
ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its output can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    config = sys.argv[1]
    answers = []
    for name in ("first engine", "second engine"):
        program = [sys.executable, __file__, config, "--answer"]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        answers.append(answer)
        print(
            f"{name}: {answer['found']} of {answer['asked']} prompt tokens found in the cache, "
            f"{answer['seconds']:.2f} s for all answers"
        )
    is_same = answers[0]["tokens"] == answers[1]["tokens"]
    print("the answers are the same" if is_same else "THE ANSWERS DIFFER")
    return 0 if is_same and answers[1]["found"] > answers[0]["found"] else 1


def answer(config: dict[str, Any]) -> None:
    """Start an engine, let it answer three prompts that begin alike, and print what came of it."""
    os.environ |= ENGINE_VARIABLES
    from vllm import LLM, SamplingParams

    model = make_model()
    engine = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=4096,
        block_size=32,
        dtype="float32",
        kv_transfer_config=config,
    )
    shared = [number * 7 % 500 for number in range(PROMPT_TOKENS)]
    prompts = [[*shared, *range(start, start + 60)] for start in (0, 100, 200)]
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    began_s = time.perf_counter()
    outputs = [engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0] for prompt in prompts]
    seconds = time.perf_counter() - began_s
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "asked": sum(map(len, prompts)),
        "found": sum(output.num_cached_tokens for output in outputs),
        "seconds": seconds,
    }
    engine.llm_engine.engine_core.shutdown()  # what is on its way to the tier arrives
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
            dtype="float32",
        )
        LlamaForCausalLM(size).save_pretrained(directory)
    return directory


def read_config(name: str) -> dict[str, Any]:
    """Return a configuration beside this file, with the path of its stack's file made absolute."""
    here = Path(__file__).resolve().parent
    config: dict[str, Any] = json.loads((here / name).read_text())
    extra = config["kv_connector_extra_config"]
    if "stack" in extra:
        extra["stack"] = str(here / extra["stack"])
    return config


if __name__ == "__main__":
    if "--answer" in sys.argv:
        answer(read_config(sys.argv[1]))
    else:
        sys.exit(main())
