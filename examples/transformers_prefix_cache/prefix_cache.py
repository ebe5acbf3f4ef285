"""A long prompt is computed once, and every later process gets it from disk.

Run it twice. The first process computes a prompt of 4,096 tokens, saves it, and notes the logits of a question behind
it. The second one finds the prompt on disk, and compares.

    pip install '.[transformers]'
    python examples/transformers_prefix_cache/prefix_cache.py
    python examples/transformers_prefix_cache/prefix_cache.py

The model is a small Llama with seeded random weights, so that nothing is downloaded. Delete ./prefix-cache to begin
anew.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tiered_kv_transformers import PrefixCache

STACK = Path(__file__).with_name("stack.yaml")
DIRECTORY = Path(os.environ.get("PREFIX_CACHE", "./prefix-cache"))
NOTED_LOGITS = DIRECTORY / "logits.npy"

PROMPT_TOKENS = 4096
QUESTION_TOKENS = 16
VOCABULARY = 8192

# Transformers has called it `cache` since 5.24.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
RESTORED_SHARE_MIN = 0.9
TIME_SHARE_MAX = 0.2


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2 * PROMPT_TOKENS,
    )
    return LlamaForCausalLM(config).eval()


def answer(model: LlamaForCausalLM, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the logits of all tokens that the cache does not have; the last row's maximum is the next token."""
    return model(ids[:, cache.get_seq_length() :], **{CACHE: cache}, use_cache=True).logits


def compute(model: LlamaForCausalLM, prompt: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(prompt, **{CACHE: cache}, logits_to_keep=1)
    return cache


def first_process(model: LlamaForCausalLM, prefixes: PrefixCache, prompt: torch.Tensor, ids: torch.Tensor) -> bool:
    began_s = time.perf_counter()
    cache = compute(model, prompt)
    blocks = prefixes.save(prompt, cache)  # in the background; the model goes on with the cache
    logits = answer(model, ids, cache)
    print(f"time to first token, prompt computed: {time.perf_counter() - began_s:.3f} s")
    np.save(NOTED_LOGITS, logits.numpy())
    print(f"saved {blocks} blocks: {prefixes.flush(timeout=60)}; run it again")
    return True


def second_process(model: LlamaForCausalLM, prefixes: PrefixCache, prompt: torch.Tensor, ids: torch.Tensor) -> bool:
    began_s = time.perf_counter()
    cache, tokens = prefixes.restore(ids, timeout=10.0)
    restored_s = time.perf_counter() - began_s
    logits = answer(model, ids, cache)
    with_s = time.perf_counter() - began_s

    began_s = time.perf_counter()
    answer(model, ids, compute(model, prompt))
    without_s = time.perf_counter() - began_s

    block_tokens = prefixes.layout.block_tokens
    from_disk = prefixes.stack.counters()["nvme"].get("loaded_blocks_total", 0)
    expected = torch.from_numpy(np.load(NOTED_LOGITS))
    is_equal = torch.equal(logits[:, -QUESTION_TOKENS:], expected)
    print(f"restored {tokens} of {PROMPT_TOKENS} tokens in {restored_s:.3f} s, {from_disk} blocks from nvme")
    print(f"time to first token, prompt restored: {with_s:.3f} s")
    print(f"time to first token, prompt computed: {without_s:.3f} s, {without_s / with_s:.1f} times as long")
    print(f"logits equal those of the first process, bit for bit: {is_equal}")
    has_blocks = from_disk * block_tokens >= RESTORED_SHARE_MIN * PROMPT_TOKENS
    return is_equal and has_blocks and with_s <= TIME_SHARE_MAX * without_s


def main() -> int:
    model = make_model()
    ids = torch.randint(0, VOCABULARY, (1, PROMPT_TOKENS + QUESTION_TOKENS), generator=torch.Generator().manual_seed(1))
    prompt = ids[:, :PROMPT_TOKENS]
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    began_s = time.perf_counter()
    with PrefixCache.open(model, STACK) as prefixes, torch.no_grad():
        block = f"{prefixes.layout.block_bytes >> 10} KiB for {prefixes.layout.block_tokens} tokens"
        print(f"opened in {time.perf_counter() - began_s:.3f} s, blocks of {block}")
        answer(model, ids[:, :QUESTION_TOKENS], DynamicCache(config=model.config))  # torch's first call is slow
        process = second_process if NOTED_LOGITS.exists() else first_process
        is_good = process(model, prefixes, prompt, ids)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
