"""Runs in an environment with vLLM for the CPU: an engine whose steps take the time that a GPU would, told what to do.

    python vllm_turns_program.py DIRECTORY

A line of its input names one of `COMMANDS` ("do") and its arguments, and a line of JSON answers it. The scheduler, the
connector, the tiers and their copies are real. The model computes nothing: a step uses its thread's processor for
`LAUNCH_S`, as one that launches a model's kernels, and sleeps for the rest, as one that waits for a GPU.

It imports no helper of the tests, so it also measures another build, whose tests may differ.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import numpy as np
import torch
from torch import nn
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor.uniproc_executor import UniProcExecutor

try:
    from tiered_kv.worker import cpu as copier
except ImportError:  # an older build
    from tiered_kv.worker import handlers as copier  # type: ignore[no-redef]

FIXED_S, TOKEN_S, PAIR_S = 0.0033, 23e-6, 0.8e-9
"""A step takes so much, and so much for each token, and for each pair of a token and one before it: an H200 with an
8B model."""
LAUNCH_S = 0.008
HEADS, HEAD_DIM = 2, 512
"""Of one layer in float32: 8 KiB of keys and values for a token, so a block of 16 tokens has 128 KiB."""
CHATS, PROMPT, SYSTEM, ANSWER, IN_FLIGHT = 24, 4608, 1024, 32, 6
GPU_BLOCKS, VOCABULARY = 3000, 1024
COPIES_MAX = 1024  # of one system call: IOV_MAX


class PacedForCausalLM(nn.Module):  # type: ignore[misc]  # torch is not there when types are checked
    """Generates tokens of no meaning, in a GPU's time."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.layer = Attention(HEADS, HEAD_DIM, 1.0, cache_config=vllm_config.cache_config, prefix=f"{prefix}.0.attn")
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)
        self._is_filled = False

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), 16)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        began_s = time.perf_counter()
        metadata = get_forward_context().attn_metadata
        if metadata is not None:
            if not self._is_filled:
                self.layer.kv_cache.uniform_()  # pages of zeros would cost nothing to read
                self._is_filled = True
            of_layer = metadata[self.layer.layer_name]
            starts, lengths = of_layer.query_start_loc.tolist(), of_layer.seq_lens.tolist()
            step_s = FIXED_S
            for first, last, length in zip(starts, starts[1:], lengths, strict=False):
                tokens = last - first
                step_s += tokens * (TOKEN_S + PAIR_S * (length - tokens / 2))
            launch(LAUNCH_S)
            time.sleep(max(0.0, began_s + step_s - time.perf_counter()))
        return torch.zeros(len(input_ids), 16)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden_states), VOCABULARY)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in self.named_parameters()}


def launch(busy_s: float) -> None:
    """Use the processor for a time, half of it in calls that release the interpreter's lock, as launches do."""
    kernel, until_s = torch.zeros(4096), time.thread_time() + busy_s
    while time.thread_time() < until_s:
        for _ in range(8):
            sum(range(200))
            kernel.add_(1.0)


def copy_as_a_gpu(plan: Any) -> float:
    """Copy between KV cache and primary tier without the interpreter's lock, as a GPU's copy engine does."""
    began_s = time.perf_counter()
    copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
    copy.restype = ctypes.c_ssize_t
    copy.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    to, source = (
        np.stack([side, plan.lengths], axis=1).astype(np.uint64) for side in (plan.destinations, plan.sources)
    )
    for first in range(0, len(to), COPIES_MAX):
        part, of = to[first : first + COPIES_MAX], source[first : first + COPIES_MAX]
        if copy(os.getpid(), part.ctypes.data, len(part), of.ctypes.data, len(of), 0) != int(part[:, 1].sum()):
            raise OSError(ctypes.get_errno(), "a copy within this process failed")
    return time.perf_counter() - began_s


# The engine is another process, which imports this module too.
ModelRegistry.register_model("PacedForCausalLM", PacedForCausalLM)
CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [MultipleOf(16)])  # as on a GPU
assert hasattr(copier, "copy_runs")
copier.copy_runs = copy_as_a_gpu


def open_engine(directory: Path, *, kv_transfer_config: dict[str, Any] | None = None) -> LLM:
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["PacedForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "head_dim": HEAD_DIM,
        "hidden_size": 16,
        "intermediate_size": 16,
        "max_position_embeddings": 16384,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
    }
    (model / "config.json").write_text(json.dumps(config))
    options = {} if kv_transfer_config is None else {"kv_transfer_config": kv_transfer_config}
    engine = LLM(
        str(model),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend=UniProcExecutor,  # by default, vLLM has a CPU's model in another process
        seed=0,
        max_model_len=8192,
        block_size=16,
        max_num_batched_tokens=8192,
        num_gpu_blocks_override=GPU_BLOCKS,
        **options,
    )
    engine.generate([{"prompt_token_ids": [1] * 2048}], sampling(4), use_tqdm=False)  # whatever it does once
    return engine


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)


def turn(engine: LLM, *, seed: int) -> dict[str, Any]:
    """Play the first turn of new chats, after a reset of all caches."""
    assert engine.reset_prefix_cache(reset_connector=True)
    core, chance = engine.llm_engine, random.Random(seed)
    systems = [chance.choices(range(VOCABULARY), k=SYSTEM) for _ in range(4)]
    prompts = [systems[chat % 4] + chance.choices(range(VOCABULARY), k=PROMPT - SYSTEM) for chat in range(CHATS)]
    waiting = list(enumerate(prompts))
    sent: dict[str, float] = {}
    waits: list[float] = []
    live, began_s = 0, time.perf_counter()
    while waiting or live:
        while waiting and live < IN_FLIGHT:
            number, prompt = waiting.pop()
            name = f"{seed}-{number}"
            sent[name] = time.perf_counter()
            core.add_request(name, {"prompt_token_ids": prompt}, sampling(ANSWER))
            live += 1
        for output in core.step():
            if output.request_id in sent:
                waits.append(time.perf_counter() - sent.pop(output.request_id))
            live -= output.finished
    return {"seconds": time.perf_counter() - began_s, "first_token_s": sum(waits) / len(waits)}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"turn": turn}


def main() -> None:
    directory, engine = Path(sys.argv[1]), None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if (do := message.pop("do")) == "open":
                engine, answer = open_engine(directory, **message), {}
            else:
                answer = COMMANDS[do](engine, **message)
            print(json.dumps(answer), flush=True)
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
