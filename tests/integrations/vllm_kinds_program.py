"""Runs in an environment with vLLM for the CPU: a whole engine of a small random model of some kind, twice.

    python vllm_kinds_program.py DIRECTORY KIND KV_TRANSFER_CONFIG

Each engine serves two prompts, twice, and loses its own prefix cache in between. Prints the tokens, and how many tokens
of the prompts were found, of an engine alone and of two engines with our stack, one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from vllm_engine_program import (  # type: ignore[import-not-found]  # found beside this program when it runs
    BLOCK_TOKENS,
    counters_of,
    generate,
    manager_of,
    open_engine,
    say,
)

from tests.support.tiny_llama import TINY_LLAMA

WINDOW = {"head_dim": 32, "sliding_window": 2 * BLOCK_TOKENS}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "fp8": ({}, {"kv_cache_dtype": "fp8_e5m2"}),
    "windows": (
        {
            **WINDOW,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "query_pre_attn_scalar": 32,
        },
        {},
    ),
    "windows alone": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 2 * BLOCK_TOKENS},
        {},
    ),
    "sinks": (
        {
            **WINDOW,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
        {},
    ),
    "gdn": (
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention", "full_attention"],
            "dtype": "bfloat16",
            "head_dim": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        {"dtype": "bfloat16", "prefix_match_unit": BLOCK_TOKENS},
    ),
    "mtp": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_nextn_predict_layers": 1,
        },
        {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
    ),
    "eagle": ({}, {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}),
}
"""Of each kind what its `config.json` has beside that of a small Llama, and vLLM's options."""


def draw_weights() -> None:
    """Let vLLM's dummy weights be such that every token depends on all of its context."""
    from vllm.model_executor.model_loader import dummy_loader as loader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight as draw

    seeds = itertools.count(1)  # of each engine anew

    def larger(weight: Any) -> None:
        low, high = (-0.3, 0.3) if weight.ndim > 1 else (0.5, 1.0)
        draw(weight, low=low, high=high, seed=next(seeds))

    loader.initialize_single_dummy_weight = larger


def serve(model: Path, options: dict[str, Any], kv_transfer_config: dict[str, Any] | None, prompts: Any) -> None:
    draw_weights()
    engine = open_engine(model, kv_transfer_config, load_format="dummy", **options)
    try:
        tokens, found = [], []
        for _ in range(2):
            outputs = generate(engine, prompts, 8)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
            found.append([output.num_cached_tokens or 0 for output in outputs])
            assert engine.reset_prefix_cache()
            for _ in range(3):  # steps, in which blocks are stored; shorter than a block
                generate(engine, [[2] * 8], 1)
                if (manager := manager_of(engine)) is not None:
                    manager._stack.manager.drain_jobs(10.0)
        say({"tokens": tokens, "found": found, "counters": counters_of(engine)})
    finally:
        engine.llm_engine.engine_core.shutdown()


def main() -> None:
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    config, options = KINDS[kind]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY_LLAMA, **config}))
    draft = options.get("speculative_config")
    if draft and draft["method"] == "eagle":
        (directory / "draft").mkdir(exist_ok=True)
        (directory / "draft" / "config.json").write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 1}))
        draft["model"] = str(directory / "draft")
    random_numbers = random.Random(0)
    prompts = [[random_numbers.randrange(512) for _ in range(size)] for size in (300, 700)]
    ours = json.loads(sys.argv[3])
    for kv_transfer_config in (None, ours, ours):
        serve(directory, options, kv_transfer_config, prompts)


if __name__ == "__main__":
    main()
