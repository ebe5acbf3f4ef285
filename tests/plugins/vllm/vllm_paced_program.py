"""Runs in an environment with vLLM: whether an engine with a stack is slower than without one.

    python vllm_paced_program.py DIRECTORY '{"mixes": ["chats"], "disks": [0.27, 1], "seeds": [1]}'

vLLM's scheduler, its offloading connector and our manager are real. The model, the bus and the disk only take time, and
this time is a number: nothing waits, so that the result depends on decisions alone, and is the same in each run. What
the scheduler's own Python costs is not in it. Prints one line of JSON for each run: times with the stack over those
without.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_real_time = time.monotonic


class Clock:
    """The time of the run. While a stack closes, it goes on as the real time does."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._real_from_s: float | None = None

    def __call__(self) -> float:
        return self.now_s + (0.0 if self._real_from_s is None else _real_time() - self._real_from_s)

    def run(self) -> None:
        self._real_from_s = _real_time()

    def stop(self) -> None:
        self.now_s, self._real_from_s = self(), None


CLOCK = Clock()
time.monotonic = time.perf_counter = CLOCK  # before the modules that keep a reference are imported

from vllm_program_parts import (  # type: ignore[import-not-found]  # noqa: E402 - found beside this program
    OUR_SPEC,
    canonical,
    described_model,
    stand_in_for_a_device,
    vllm_config_of,
)

from tests.support.paced_loads import MIXES, VOCABULARY, Mix, Prompt  # noqa: E402

stand_in_for_a_device()

import torch  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from tiered_kv.metrics.counters import count_of  # noqa: E402
from tiered_kv_vllm.engine import configured  # noqa: E402

TOKENS = 16
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
BLOCK_BYTES = SPEC.page_size_bytes
FIXED_S, TOKEN_S, PAIR_S = 0.0033, 23e-6, 0.8e-9
"""A step takes so much, and so much for each token, and for each pair of a token and one before it: an H200 with an
8B model."""
STEP_S_MIN, SCHEDULE_S, IDLE_S = 0.008, 0.0015, 0.001
"""The launches of a step, its scheduling, and a step without tokens."""
BUS_BLOCKS_PER_S = 26_000
"""55 GB/s of blocks of 2 MiB."""
CPU_TOKENS = 64 << 10


class Engine:
    """An engine with a stack, or without one if `disk` is None: the disk's rate over that at which KV is computed."""

    def __init__(self, directory: Path, disk: float | None, *, gpu_blocks: int = 3000, places: int = 256) -> None:
        config = vllm_config_of(
            described_model(directory),
            {} if disk is None else {**OUR_SPEC, "stack": stack_of(disk)},
            load_format="dummy",
            block_size=TOKENS,
            max_model_len=36 << 10,
            max_num_batched_tokens=8192,
            max_num_seqs=places,
            enable_prefix_caching=True,
        )
        config.cache_config.num_gpu_blocks = gpu_blocks
        cache = KVCacheConfig(gpu_blocks, [], [KVCacheGroupSpec(["layer.0"], SPEC)])
        self._worker = None
        if disk is None:
            config.kv_transfer_config = None
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=TOKENS, hash_block_size=TOKENS, log_stats=True
        )
        if disk is not None:
            with configured(config, cache):
                spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
            layer = torch.zeros((gpu_blocks, BLOCK_BYTES), dtype=torch.int8)
            self._worker = spec.get_worker(canonical([[layer]], BLOCK_BYTES))  # without which nothing is promoted
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(TOKENS, hash_function)
        self._transfers: list[tuple[float, int, str | None]] = []
        """When each ends, its job, and the request that loads."""

    def loaded_blocks(self) -> int:
        counters = self.scheduler.connector.connector_scheduler.manager.counters()
        return int(count_of(counters, "disk", "loaded_blocks_total"))

    def add(self, prompt: Prompt) -> None:
        sampling = SamplingParams(max_tokens=prompt.answer, temperature=0, ignore_eos=True)
        self.scheduler.add_request(Request(prompt.name, prompt.tokens, sampling, None, block_hasher=self._hasher))

    def step(self) -> Iterator[tuple[str, bool]]:
        """Yield each request that got a token, and whether it was its last."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        before |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        if self._worker is not None:
            self._begin(output.kv_connector_metadata)
        step_s = FIXED_S
        for name, tokens in output.num_scheduled_tokens.items():
            step_s += tokens * (TOKEN_S + PAIR_S * (before[name] + tokens / 2))
        CLOCK.now_s += SCHEDULE_S + max(STEP_S_MIN, step_s) if names else IDLE_S
        requests = [self.scheduler.requests[name] for name in names]
        sampled = [[1] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=None if self._worker is None else self._ended(),
        )
        for batch in self.scheduler.update_from_output(output, result).values():
            for each in batch.outputs:
                if each.new_token_ids:
                    yield each.request_id, each.finish_reason is not None

    def _begin(self, metadata: Any) -> None:
        transfers = [(job, each.req_id, each.src_spec) for job, each in metadata.load_jobs.items()]
        transfers += [(job, None, each.dst_spec) for job, each in metadata.store_jobs.items()]
        for job, name, rows in transfers:
            self._transfers.append((CLOCK.now_s + len(rows.block_ids) / BUS_BLOCKS_PER_S, job, name))

    def _ended(self) -> KVConnectorOutput:
        ended = [each for each in self._transfers if each[0] <= CLOCK.now_s]
        self._transfers = [each for each in self._transfers if each[0] > CLOCK.now_s]
        worker = OffloadingWorkerMetadata()
        for _, job, _ in ended:
            worker.mark_completed(job)
        loaded = {name for _, _, name in ended if name is not None}
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=worker if ended else None)

    def close(self) -> None:
        CLOCK.run()
        if self._worker is not None:
            self._worker.shutdown()
        self.scheduler.shutdown()
        CLOCK.stop()


def stack_of(disk: float) -> dict[str, Any]:
    """Return the default stack over a CPU tier and a disk."""
    cpu_bytes = CPU_TOKENS // TOKENS * BLOCK_BYTES
    rate = disk * BLOCK_BYTES / TOKENS / (TOKEN_S + PAIR_S * 2048)
    tier = {"type": "tests.support.paced_loads:PacedTier", "name": "disk", "bytes_per_s": rate}
    tier |= {"store_budget": cpu_bytes // 2, "load_budget": cpu_bytes // 2}
    return {"primary": {"capacity": cpu_bytes}, "secondary": [tier]}


@dataclass
class Run:
    """Seconds of all requests together, and of each to its first token."""

    total_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    loaded_blocks: int = 0


def run(directory: Path, mix: Mix, seed: int, disk: float | None) -> Run:
    engine, found = Engine(directory, disk, **mix.engine), Run()
    try:
        began_s = CLOCK()
        for turn in mix.requests(random.Random(seed)):
            waiting = turn.prompts[::-1]
            sent: dict[str, float] = {}
            live: set[str] = set()
            while waiting or live:
                while waiting and len(live) < turn.in_flight:
                    prompt = waiting.pop()
                    engine.add(prompt)
                    sent[prompt.name] = CLOCK()
                    live.add(prompt.name)
                for name, is_last in engine.step():
                    if name in sent:
                        found.first_token_s.append(CLOCK() - sent.pop(name))
                    if is_last:
                        live.discard(name)
        found.total_s = CLOCK() - began_s
        found.loaded_blocks = 0 if disk is None else engine.loaded_blocks()
    finally:
        engine.close()
    return found


def main(directory: Path, options: dict[str, Any]) -> None:
    for name in options["mixes"]:
        for seed in options["seeds"]:
            alone = run(directory, MIXES[name], seed, None)
            for disk in options["disks"]:
                ours = run(directory, MIXES[name], seed, disk)
                line = {
                    "mix": name,
                    "seed": seed,
                    "disk": disk,
                    "total": ours.total_s / alone.total_s,
                    "first_token": statistics.mean(ours.first_token_s) / statistics.mean(alone.first_token_s),
                    "loaded_blocks": ours.loaded_blocks,
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    assert VOCABULARY < 512, "that of the model"
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
