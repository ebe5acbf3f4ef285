"""Runs in an environment with vLLM for the CPU: a whole engine, a small model of random weights, nothing downloaded.

    python vllm_engine_program.py MODEL_DIRECTORY '{"mode": "chat", "kv_transfer_config": {...}, ...}'

`chat` plays conversations of several turns that share system prompts, and drops the engine's own prefix cache after
each batch of requests, or has none (`prefix_caching`). `serve` measures how long prompts that it is told of take to
their first token. `hints` serves prompts with what their requests say of them. `namespaces` says those of the engine's
processes. `audit` serves prompts one by one, with other weights from one of them on if told so, and looks up the keys
that it is given before and after. `reset` resets with other weights while a request runs, and says what requests after
it get. Prints lines of JSON, the last one the result; after {"pause": true} it waits for a line on its standard input.
A test reads and writes them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.tiny_llama import DEPENDENT_WEIGHTS, llama_sizes, save_llama

os.environ.update(
    HF_HUB_OFFLINE="1",
    LMCACHE_DISABLE_BANNER="1",
    LMCACHE_LOG_LEVEL="WARNING",
    LMCACHE_TRACK_USAGE="false",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

BLOCK_TOKENS = 32
SETTLE_S = 0.6
"""A third of the time that a prompt's blocks have to reach a tier; nothing is measured meanwhile."""
CHAT_MODEL = {
    **llama_sizes(vocab=512, hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2),
    "initializer_range": DEPENDENT_WEIGHTS,
}
MIDDLE_MODEL = llama_sizes(vocab=1024, hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=4)
LARGE_MODEL = llama_sizes(vocab=1024, hidden=1024, intermediate=2816, layers=8, heads=16, kv_heads=4)


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


def open_engine(directory: Path, kv_transfer_config: dict[str, Any] | None, **options: Any) -> Any:
    if kv_transfer_config and kv_transfer_config["kv_connector"].startswith("LMCache"):
        hide_what_no_library_has()
    from vllm import LLM

    options |= {"kv_transfer_config": kv_transfer_config} if kv_transfer_config else {}
    # In float32: in smaller types the result depends on how a prompt is cut into batches, with or without offloading.
    settings = {"max_model_len": 4096, "block_size": BLOCK_TOKENS, "dtype": "float32", "seed": 0, **options}
    return LLM(str(directory), skip_tokenizer_init=True, enforce_eager=True, **settings)


def manager_of(engine: Any) -> Any:
    connector = engine.llm_engine.engine_core.engine_core.scheduler.connector
    return connector.connector_scheduler.manager if hasattr(connector, "connector_scheduler") else None


def counters_of(engine: Any) -> dict[str, dict[str, Any]]:
    """Return what our tiers have counted, in our stack or below vLLM's tiering."""
    manager = manager_of(engine)
    if manager is None:
        return {}
    if hasattr(manager, "counters"):
        return dict(manager.counters())
    return {
        name: values
        for tier in manager.secondary_tiers
        if hasattr(tier, "counters")
        for name, values in tier.counters().items()
    }


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def generate(engine: Any, prompts: list[list[int]], max_tokens: int, said: dict[str, Any] | None = None) -> list[Any]:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"tiered_kv": said}} if said else None
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=extra)
    outputs: list[Any] = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return outputs


def chat(engine: Any, options: dict[str, Any]) -> None:
    """Play `conversations` of `turns`; `pause_after_turn` names the turn after which to wait for a line."""
    random_numbers = random.Random(options.get("seed", 0))
    systems = [[random_numbers.randrange(512) for _ in range(160)] for _ in range(4)]
    histories = [list(systems[number % len(systems)]) for number in range(options["conversations"])]
    tokens: list[list[list[int]]] = [[] for _ in histories]
    cached_tokens = 0
    for turn in range(options["turns"]):
        order = list(range(len(histories)))
        random_numbers.shuffle(order)
        for history in histories:
            history += [random_numbers.randrange(512) for _ in range(random_numbers.randrange(20, 90))]
        for first in range(0, len(order), 6):
            batch = order[first : first + 6]
            for number, output in zip(batch, generate(engine, [histories[number] for number in batch], 6), strict=True):
                answer = list(output.outputs[0].token_ids)
                tokens[number].append(answer)
                histories[number] += answer
                cached_tokens += output.num_cached_tokens or 0
            assert engine.reset_prefix_cache() or not options.get("prefix_caching", True)
        if turn == options.get("pause_after_turn"):
            say({"pause": True, "counters": counters_of(engine)})
            sys.stdin.readline()
    say({"tokens": tokens, "cached_tokens": cached_tokens, "counters": counters_of(engine)})


def timed(engine: Any, prompt: list[int]) -> dict[str, float]:
    """Return the first token of a prompt, how long it took, and how many of its tokens were found."""
    began_s = time.perf_counter()
    (output,) = generate(engine, [prompt], 1)
    seconds = time.perf_counter() - began_s
    assert engine.reset_prefix_cache()
    # vLLM's worker stores in the step after the one that computed; a prompt of less than a block gives it steps, in
    # which what is in flight arrives.
    for _ in range(3):
        generate(engine, [[2] * 8], 1)
        time.sleep(SETTLE_S)
    return {"token": output.outputs[0].token_ids[0], "seconds": seconds, "found": output.num_cached_tokens}


def serve(engine: Any, _: dict[str, Any]) -> None:
    """Serve what each line of the input tells, such as {"prompt": [SEED, TOKENS]}.

    Says how long the first token of a prompt took, and how many of its tokens were found.
    """
    generate(engine, [[1] * 40], 1)  # whatever an engine does once
    say({"ready": True})
    for line in sys.stdin:
        seed, size = json.loads(line)["prompt"]
        numbers = random.Random(seed)
        say(timed(engine, [numbers.randrange(1024) for _ in range(size)]))


def hints(engine: Any, options: dict[str, Any]) -> None:
    """Serve a prompt for each of `requests`, its number and what is said of it; say how many tokens were found."""
    random_numbers = random.Random(0)
    prompts = [[random_numbers.randrange(512) for _ in range(200)] for _ in range(3)]
    found = []
    for number, said in options["requests"]:
        (output,) = generate(engine, [prompts[number]], 1, said)
        found.append(output.num_cached_tokens or 0)
        assert engine.reset_prefix_cache()
        for _ in range(3):  # steps, in which blocks are stored; shorter than a block
            generate(engine, [[2] * 8], 1)
            manager_of(engine)._stack.manager.drain_jobs(10.0)
    say({"found": found, "counters": counters_of(engine)})


def namespaces(engine: Any, _: dict[str, Any]) -> None:
    """Say the namespace of the scheduler's process, and of each worker's."""
    (info,) = manager_of(engine).config_info()
    say({"scheduler": info["tiered_kv_namespace"], "workers": engine.collective_rpc(namespace_of_worker)})


def namespace_of_worker(_: Any) -> tuple[int, str]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    spec = get_kv_transfer_group().connector_worker.spec
    return os.getpid(), spec._shared.config.identity.digest.hex()


def audit(engine: Any, options: dict[str, Any]) -> None:
    """Serve `prompts` one by one, `rounds` times; look `keys` up before, after, and then in the first tier alone."""
    from tiered_kv.base import OffloadKey, ReqContext

    random_numbers = random.Random(0)
    prompts = [[random_numbers.randrange(512) for _ in range(200)] for _ in range(options["prompts"])]
    stack, known = manager_of(engine)._stack, set()
    keys: list[list[str]] = []
    asked, probe = [OffloadKey(bytes.fromhex(key)) for key in options["keys"]], ReqContext("probe")
    before = [stack.manager.lookup(key, probe) for key in asked]
    stack.manager.on_request_finished(probe)
    stack.manager.drain_jobs(10.0)
    for number, prompt in enumerate(prompts * options["rounds"]):
        if number == options["other_weights_from"]:
            engine.apply_model(change_weights)
        generate(engine, [prompt], 1)
        assert engine.reset_prefix_cache()
        for _ in range(3):  # steps, in which blocks are stored, loaded and judged; shorter than a block
            generate(engine, [[2] * 8], 1)
            stack.manager.drain_jobs(10.0)
        keys.append([key.hex() for key in stack.primary.blocks if key not in known])
        known.update(stack.primary.blocks)
    after = [stack.manager.lookup(key, probe) for key in asked]
    in_tier = [stack.secondary_tiers[0].lookup(key, probe) for key in asked]
    say({"keys": keys, "counters": counters_of(engine), "before": before, "after": after, "in_tier": in_tier})


def reset(engine: Any, options: dict[str, Any]) -> None:
    """Reset, with other weights, amid a request; then serve its prompt again and again, without the engine's own cache.

    With `resets_running` vLLM computes the running request anew, else the GPU keeps its blocks until the second reset.
    Says for each later answer its token and how many tokens were found.
    """
    from vllm import SamplingParams

    random_numbers = random.Random(0)
    prompt = [random_numbers.randrange(512) for _ in range(200)]
    core, stack = engine.llm_engine, manager_of(engine)._stack
    sampling = SamplingParams(max_tokens=100, temperature=0, detokenize=False, ignore_eos=True)
    core.add_request("running", {"prompt_token_ids": prompt}, sampling)
    for _ in range(8):
        core.step()
    stack.manager.drain_jobs(10.0)
    stored = len(stack.primary.blocks)
    engine.apply_model(change_weights)
    is_reset = engine.reset_prefix_cache(reset_running_requests=options["resets_running"], reset_connector=True)
    core.add_request("beside", {"prompt_token_ids": prompt}, sampling)  # the GPU may still have its blocks
    answers = []
    while core.has_unfinished_requests():
        core.step()
    for resets_connector in (False, False, True, False, False):
        assert engine.reset_prefix_cache(reset_connector=resets_connector)
        (output,) = generate(engine, [prompt], 1)
        answers.append([output.outputs[0].token_ids[0], output.num_cached_tokens or 0])
        for _ in range(3):  # steps, in which blocks are stored
            generate(engine, [[2] * 8], 1)
            stack.manager.drain_jobs(10.0)
    say({"stored": stored, "is_reset": is_reset, "answers": answers})


def change_weights(model: Any) -> None:
    """Change what the model computes and leave everything else: no name of it tells."""
    import torch

    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.copy_(parameter.roll(1, 0))


MODES = {
    "audit": audit,
    "chat": chat,
    "hints": hints,
    "namespaces": namespaces,
    "reset": reset,
    "serve": serve,
}


def main() -> None:
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    # Threads that are bound to cores wait for each other for ever where other processes have these cores too.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(options["threads"]))
    # To measure, the engine is in a process of its own, as in a server. To look into it, it is in this one.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options["mode"] == "serve" else "0"
    model = MIDDLE_MODEL if options.get("model") == "middle" else LARGE_MODEL
    save_llama(directory, **(model if options["mode"] == "serve" else CHAT_MODEL), dtype="float32")
    more: dict[str, Any] = options.get("engine", {})
    if options["mode"] == "namespaces":
        more = {"distributed_executor_backend": "mp"}  # a worker in a process of its own
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of a function, to the worker
    if not options.get("prefix_caching", True):
        more["enable_prefix_caching"] = False
    engine = open_engine(directory, options.get("kv_transfer_config"), **more)
    try:
        MODES[options["mode"]](engine, options)
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
