"""Runs in an environment with vLLM for the CPU: whole engines of small random models, told line by line what to do.

    python vllm_engine_program.py DIRECTORY

A line of its input names one of `COMMANDS` ("do") and its arguments, and a line of JSON answers it. `open` closes the
engine before. Nothing is downloaded: models are made in DIRECTORY.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.tiny_llama import DEPENDENT_WEIGHTS, TINY_LLAMA, llama_sizes, save_llama

os.environ.update(
    HF_HUB_OFFLINE="1",
    LMCACHE_DISABLE_BANNER="1",
    LMCACHE_LOG_LEVEL="WARNING",
    LMCACHE_TRACK_USAGE="false",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # of a function, to a worker
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    # Threads that are bound to cores wait for each other for ever where other processes have these cores too.
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)

BLOCK_TOKENS = 32
WAIT_S = 60.0
SETTLE_S = 0.6
"""A third of the time that a prompt's blocks have to reach a tier of an engine in another process."""
SAVED: dict[str, dict[str, Any]] = {
    "chat": {
        **llama_sizes(vocab=512, hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2),
        "initializer_range": DEPENDENT_WEIGHTS,
    },
    "middle": llama_sizes(vocab=1024, hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=4),
    "large": llama_sizes(vocab=1024, hidden=1024, intermediate=2816, layers=8, heads=16, kv_heads=4),
}
"""Llamas whose weights are saved."""
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
"""Models of dummy weights: what `config.json` has beside that of a small Llama, and vLLM's options."""


def make_model(path: Path, kind: str) -> dict[str, Any]:
    """Make a model unless it is there; return vLLM's options for it."""
    if kind in SAVED:
        save_llama(path, **SAVED[kind], dtype="float32")
        return {}
    config, options = KINDS[kind]
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**TINY_LLAMA, **config}))
    if options.get("speculative_config", {}).get("method") == "eagle":
        (path / "draft").mkdir(exist_ok=True)
        (path / "draft" / "config.json").write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 1}))
        options["speculative_config"]["model"] = str(path / "draft")
    draw_weights()
    return {"load_format": "dummy", **options}


def draw_weights() -> None:
    """Let vLLM's dummy weights be such that every token depends on all of its context."""
    from vllm.model_executor.model_loader import dummy_loader as loader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight as draw

    seeds = itertools.count(1)  # of each engine anew

    def larger(weight: Any) -> None:
        low, high = (-0.3, 0.3) if weight.ndim > 1 else (0.5, 1.0)
        draw(weight, low=low, high=high, seed=next(seeds))

    loader.initialize_single_dummy_weight = larger


def hide_what_no_library_has() -> None:
    """Let vLLM, as it starts, look at llvmlite, which LMCache imports: that has an answer for every name.

    vLLM asks each object of each module for its `__dict__`, and takes what it gets for a dictionary.
    """
    from llvmlite.binding import ffi  # type: ignore[import-not-found]  # only where LMCache is

    library = type(ffi.lib)
    answer = library.__getattr__

    def answer_for_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = answer_for_functions


def open_engine(
    directory: Path,
    *,
    kind: str = "chat",
    kv_transfer_config: dict[str, Any] | None = None,
    threads: int = 1,
    is_apart: bool = False,
    **options: Any,
) -> Any:
    """Open an engine: in a process of its own, as in a server, or in this one, to look into it."""
    os.environ.update(OMP_NUM_THREADS=str(threads), VLLM_ENABLE_V1_MULTIPROCESSING=str(int(is_apart)))
    if kv_transfer_config is not None:
        options["kv_transfer_config"] = kv_transfer_config
        if kv_transfer_config["kv_connector"].startswith("LMCache"):
            hide_what_no_library_has()
    from vllm import LLM

    # In float32: in smaller types the result depends on how a prompt is cut into batches, with or without offloading.
    settings = {"max_model_len": 4096, "block_size": BLOCK_TOKENS, "dtype": "float32", "seed": 0}
    settings |= {**make_model(directory / kind, kind), **options}
    return LLM(str(directory / kind), skip_tokenizer_init=True, enforce_eager=True, **settings)


def manager_of(engine: Any) -> Any:
    """Return the connector's manager; None of an engine in another process, without a connector, or with LMCache's."""
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    connector: Any = None if core is None else core.scheduler.connector
    return connector.connector_scheduler.manager if hasattr(connector, "connector_scheduler") else None


def stack_of(engine: Any) -> Any:
    """Return the engine's own stack, if it has one."""
    stack = getattr(manager_of(engine), "_stack", None)
    return stack if hasattr(stack, "manager") else None


def generate(engine: Any, prompts: list[list[int]], tokens: int, said: dict[str, Any] | None = None) -> list[Any]:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"tiered_kv": said}} if said else None
    sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
    outputs: list[Any] = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return outputs


def step(engine: Any) -> None:
    generate(engine, [[2] * 8], 2)  # of no whole block


def settle(engine: Any) -> None:
    """Let what was computed reach the tiers: vLLM's worker stores in the step after the one that computed."""
    manager, stack = manager_of(engine), stack_of(engine)
    if hasattr(getattr(manager, "_manager", None), "link"):
        settle_at_host(engine, manager._manager)
        return
    for _ in range(3):
        step(engine)
        if stack is not None:
            stack.manager.drain_jobs(10.0)
        elif not hasattr(engine.llm_engine.engine_core, "engine_core"):
            time.sleep(SETTLE_S)


def settle_at_host(engine: Any, manager: Any) -> None:
    """Let the workers copy all that is stored, and the server know."""
    from tiered_kv.server.protocol import PING

    step(engine)
    if not manager.is_attached:
        return
    step_until(engine, lambda: not manager._requests.transfers or not manager.is_attached)
    if not manager.is_attached:
        return
    link = manager.link
    link.channel.add(PING, 1)
    link.pong = 0
    step_until(engine, lambda: link.pong == 1 or manager.link is not link)


def step_until(engine: Any, is_over: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_over():
        assert time.monotonic() < end_s, "it takes too long"
        step(engine)
        time.sleep(0.01)


# The commands.


def serve(
    engine: Any, *, prompts: list[list[int]], tokens: int = 1, said: dict[str, Any] | None = None, settles: bool = True
) -> dict[str, Any]:
    """Answer prompts together, with hints, and drop the engine's own prefix cache."""
    began_s = time.perf_counter()
    outputs = generate(engine, prompts, tokens, said)
    seconds = time.perf_counter() - began_s
    drop(engine)
    if settles:
        settle(engine)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "found": [output.num_cached_tokens or 0 for output in outputs],
        "seconds": seconds,
    }


def drop(engine: Any, *, resets_connector: bool = False) -> None:
    has_cache = engine.llm_engine.vllm_config.cache_config.enable_prefix_caching
    assert engine.reset_prefix_cache(reset_connector=resets_connector) or not has_cache


def counters(engine: Any) -> dict[str, Any]:
    """Return what our tiers have counted, in our stack, in a host's, or below vLLM's tiering."""
    manager = manager_of(engine)
    counting = [manager] if hasattr(manager, "counters") else getattr(manager, "secondary_tiers", [])
    return {name: values for each in counting if hasattr(each, "counters") for name, values in each.counters().items()}


def attached(engine: Any, *, wanted: bool) -> None:
    """Step until the engine is attached to its host's cache, or is not."""
    manager = manager_of(engine)._manager
    step_until(engine, lambda: manager.is_attached is wanted)


def namespaces(engine: Any) -> dict[str, Any]:
    """Return the namespace of the scheduler's process, and of each worker's."""
    (info,) = manager_of(engine).config_info()
    return {"scheduler": info["tiered_kv_namespace"], "workers": engine.collective_rpc(namespace_of_worker)}


def namespace_of_worker(_: Any) -> str:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    digest: bytes = get_kv_transfer_group().connector_worker.spec._shared.config.identity.digest
    return digest.hex()


def blocks(engine: Any) -> dict[str, Any]:
    """Return the keys of the primary tier."""
    return {"keys": [key.hex() for key in stack_of(engine).primary.blocks]}


def look_up(engine: Any, *, keys: list[str]) -> dict[str, Any]:
    """Look keys up for a request of its own, and in the first tier alone."""
    from tiered_kv.base import OffloadKey, ReqContext

    stack, probe = stack_of(engine), ReqContext("probe")
    asked = [OffloadKey(bytes.fromhex(key)) for key in keys]
    found = [stack.manager.lookup(key, probe) for key in asked]
    in_tier = [stack.secondary_tiers[0].lookup(key, probe) for key in asked]
    stack.manager.on_request_finished(probe)
    stack.manager.drain_jobs(10.0)
    return {"found": found, "in_tier": in_tier}


def change_weights(engine: Any) -> None:
    """Change what the model computes and leave everything else: no name of it tells."""
    engine.apply_model(roll_embeddings)


def roll_embeddings(model: Any) -> None:
    import torch

    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.copy_(parameter.roll(1, 0))


def reset(engine: Any, *, prompt: list[int], resets_running: bool) -> dict[str, Any]:
    """Reset, with other weights, amid a request, and let another one run beside it.

    With `resets_running` vLLM computes the running request anew, else the GPU keeps its blocks until the next reset.
    """
    from vllm import SamplingParams

    core, stack = engine.llm_engine, stack_of(engine)
    sampling = SamplingParams(max_tokens=100, temperature=0, detokenize=False, ignore_eos=True)
    core.add_request("running", {"prompt_token_ids": prompt}, sampling)
    for _ in range(8):
        core.step()
    stack.manager.drain_jobs(10.0)
    stored = len(stack.primary.blocks)
    change_weights(engine)
    is_reset = engine.reset_prefix_cache(reset_running_requests=resets_running, reset_connector=True)
    core.add_request("beside", {"prompt_token_ids": prompt}, sampling)  # the GPU may still have its blocks
    while core.has_unfinished_requests():
        core.step()
    return {"stored": stored, "is_reset": is_reset}


COMMANDS: dict[str, Callable[..., dict[str, Any] | None]] = {
    each.__name__: each
    for each in (serve, drop, counters, attached, namespaces, blocks, look_up, change_weights, reset)
}


def main() -> None:
    directory, engine = Path(sys.argv[1]), None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if (do := message.pop("do")) == "open":
                close(engine)
                engine, answer = open_engine(directory, **message), None
            else:
                answer = COMMANDS[do](engine, **message)
            print(json.dumps(answer or {}), flush=True)
    finally:
        close(engine)


def close(engine: Any) -> None:
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
