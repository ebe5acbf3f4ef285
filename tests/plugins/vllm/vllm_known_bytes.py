"""A whole vLLM but for its model: its engine core, scheduler and connectors. Workers fill caches with known bytes.

What a worker writes for a token depends on all tokens up to it, the layer, and the head. Before a worker computes, it
compares what the model would read with that, so that a block that was loaded wrong is found by its first use.
"""

from __future__ import annotations

import copy
import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from vllm_program_parts import OUR_SPEC, stand_in_for_a_device, vllm_config_of  # type: ignore[import-not-found]

stand_in_for_a_device()

import torch  # noqa: E402 - after the stand-in
from vllm import SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout, KVCacheSpec, MambaSpec  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

GPU_BLOCKS = 64
STEPS_MAX = 20_000
VOCABULARY = 512


@dataclass
class Sequence_:
    """A request in a worker."""

    tokens: list[int]
    blocks: list[list[int]]
    """By KV cache group."""
    replayed_from: int = 0
    """Layers that keep no blocks for others have the tokens from here on."""
    digests: list[bytes] = field(default_factory=list)
    """Of the tokens up to each."""

    def digest(self, position: int) -> bytes:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else b""
            token = self.tokens[len(self.digests)]
            self.digests.append(hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=16).digest())
        return self.digests[position]


@dataclass(frozen=True)
class Layer:
    """One layer in one worker."""

    name: str
    group: int
    spec: Any
    cache: torch.Tensor
    heads: Sequence[int]
    """The numbers that its heads have in the whole model."""

    def content(self, digest: bytes, head: int) -> torch.Tensor:
        size = self.cache[0, 0, 0].numel()
        seed = digest + self.name.encode() + head.to_bytes(2, "little")
        return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(size)), dtype=torch.uint8)


class Worker:
    """One rank's caches and connector."""

    def __init__(self, config: Any, rank: int, kv_cache: Any) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        tp = config.parallel_config.tensor_parallel_size
        caches = allocate_kv_cache(kv_cache, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout())
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache)
        self.connector.register_kv_caches(caches)
        self.copier = self.connector.connector_worker.worker
        self.stored_bytes = 0
        store = self.copier._handlers.store
        finished = store.get_finished

        def counted() -> list[Any]:
            results: list[Any] = finished()
            self.stored_bytes += sum(each.transfer_size for each in results)
            return results

        store.get_finished = counted
        self.layers = []
        for number, group in enumerate(kv_cache.kv_cache_groups):
            for name in group.layer_names:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                bytes_of = caches[name].view(torch.uint8)
                heads_of_all = config.model_config.get_total_num_kv_heads()
                shards = tp if isinstance(spec, MambaSpec) else min(tp, spec.max_tp_shards or heads_of_all)
                first = rank * shards // tp * bytes_of.shape[1]
                heads = range(first, first + bytes_of.shape[1])
                self.layers.append(Layer(name, number, spec, bytes_of, heads))

    def copy_blocks(self, copies: Sequence[Any]) -> None:
        for layer in self.layers:
            for each in copies:
                layer.cache[each.dst_block_id] = layer.cache[each.src_block_id].clone()

    def compare(self, sequence: Sequence_, computed: int) -> int:
        """Return how many blocks that the next token reads hold other bytes than were computed for it."""
        wrong = 0
        for layer in self.layers:
            size, blocks = layer.spec.block_size, sequence.blocks[layer.group]
            if isinstance(layer.spec, MambaSpec):
                at = (computed - 1) // size
                wrong += bool(computed) and not self._holds(layer, blocks[at], 0, sequence.digest(computed - 1))
                continue
            window = getattr(layer.spec, "sliding_window", None)
            chunk = getattr(layer.spec, "attention_chunk_size", None)
            first = computed // chunk * chunk if chunk else max(0, computed - (window or computed + 1) + 1)
            first = first if layer.spec.prefix_cacheable else max(first, sequence.replayed_from)
            bad = {
                at // size
                for at in range(first, computed)
                if not self._holds(layer, blocks[at // size], at % size, sequence.digest(at))
            }
            wrong += len(bad)
        return wrong

    def write(self, sequence: Sequence_, computed: int, new: int, rejected: int) -> None:
        """Write what `new` tokens keep, of which the last are drafts that were rejected."""
        for layer in self.layers:
            size, blocks = layer.spec.block_size, sequence.blocks[layer.group]
            if isinstance(layer.spec, MambaSpec):
                last = computed + new - rejected
                ends = {*range(computed // size * size + size, last, size), last}
                for end in ends:
                    self._fill(layer, blocks[(end - 1) // size], 0, sequence.digest(end - 1))
                continue
            for at in range(computed, computed + new):
                digest = sequence.digest(at) if at < computed + new - rejected else b"rejected"
                self._fill(layer, blocks[at // size], at % size, digest)

    @staticmethod
    def _holds(layer: Layer, block: int, slot: int, digest: bytes) -> bool:
        return all(
            torch.equal(layer.cache[block, at, slot], layer.content(digest, head))
            for at, head in enumerate(layer.heads)
        )

    @staticmethod
    def _fill(layer: Layer, block: int, slot: int, digest: bytes) -> None:
        if block:  # not the null block
            for at, head in enumerate(layer.heads):
                layer.cache[block, at, slot] = layer.content(digest, head)

    def run(self, output: Any, compute: Any) -> KVConnectorOutput:
        """Do what vLLM's runner does with a connector around a step."""
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.start_load_kv(None)
        compute(self)
        self.connector.wait_for_save()
        sent, received = self.connector.get_finished(output.finished_req_ids)
        meta = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=sent or None, finished_recving=received or None, kv_connector_worker_meta=meta
        )


class KnownBytesExecutor(Executor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The workers of an engine, in its process. Its class attributes are the model."""

    specs: ClassVar[Sequence[Mapping[str, KVCacheSpec]]]
    """By rank and layer."""
    layout: ClassVar[str] = KVCacheLayout.LBHNC.name

    def _init_executor(self) -> None:
        self.wrong = 0
        self.found: dict[str, int] = {}
        """Tokens of each request that were there before its first step."""
        self.workers: list[Worker] = []
        self.sequences: dict[str, Sequence_] = {}

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [dict(each) for each in self.specs]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[self.layout]] * len(self.specs)

    def set_kv_cache_layout(self, layout_name: str, *_: object) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def determine_available_memory(self) -> list[int]:
        return [1 << 30] * len(self.specs)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        self.workers = [Worker(self.vllm_config, rank, each) for rank, each in enumerate(kv_cache_configs)]

    def compile_or_warm_up_model(self) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return []

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(method)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        self.workers = []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = self._step(scheduler_output)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future if non_block else output

    def _step(self, output: Any) -> ModelRunnerOutput:
        computed = self._take_requests(output)
        counts = output.num_scheduled_tokens

        def compute(worker: Worker) -> None:
            worker.copy_blocks(getattr(output, "kv_cache_block_copies", None) or ())
            for name, new in counts.items():
                self.wrong += worker.compare(self.sequences[name], computed[name])
                worker.write(self.sequences[name], computed[name], new, rejected.get(name, 0))

        told = []
        sampled = self._sample(output, computed)
        drafts = output.scheduled_spec_decode_tokens
        rejected = {
            name: len(drafts[name]) + 1 - len(new) for name, new in zip(counts, sampled, strict=True) if name in drafts
        }
        for worker in self.workers:
            told.append(worker.run(output, compute))
        result = ModelRunnerOutput(list(counts), {name: at for at, name in enumerate(counts)}, sampled)
        outputs = [copy.copy(result) for _ in told]
        for each, connector_output in zip(outputs, told, strict=True):
            each.kv_connector_output = connector_output
        assert self.kv_output_aggregator is not None
        return self.kv_output_aggregator.aggregate(outputs, 0)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts of one token each, every other one wrong."""
        if self.speculative_config is None:
            return None
        tokens = [next_token(each) ^ len(each.tokens) % 2 for each in self.sequences.values()]
        return DraftTokenIds(list(self.sequences), [[each] for each in tokens])

    def _take_requests(self, output: Any) -> dict[str, int]:
        """Return how many tokens of each request have been computed before this step."""
        for name in output.finished_req_ids:
            self.sequences.pop(name, None)
        computed = {}
        for new in output.scheduled_new_reqs:
            blocks = [list(each) for each in new.block_ids]
            self.sequences[new.req_id] = Sequence_(list(new.prompt_token_ids), blocks, new.replay_start)
            computed[new.req_id] = self.found[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, tokens in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            sequence, computed[name] = self.sequences[name], tokens
            if name in cached.resumed_req_ids:
                sequence.blocks = [list(each) for each in blocks]
            elif blocks is not None:
                for mine, more in zip(sequence.blocks, blocks, strict=True):
                    mine.extend(more)
        return computed

    def _sample(self, output: Any, computed: Mapping[str, int]) -> list[list[int]]:
        """Return the next token of each request whose last token is in this step."""
        sampled: list[list[int]] = []
        for name, new in output.num_scheduled_tokens.items():
            sequence, drafts = self.sequences[name], output.scheduled_spec_decode_tokens.get(name, [])
            sampled.append([])
            if computed[name] + new - len(drafts) == len(sequence.tokens):
                for draft in [*drafts, None]:
                    sampled[-1].append(next_token(sequence))
                    sequence.tokens += sampled[-1][-1:]
                    if draft != sampled[-1][-1]:
                        break
        return sampled


def next_token(sequence: Sequence_) -> int:
    return int.from_bytes(sequence.digest(len(sequence.tokens) - 1)[:4], "little") % VOCABULARY


class Served(NamedTuple):
    """What an engine said of a prompt."""

    tokens: list[int]
    found: int
    """Prompt tokens that were not computed."""


class Engine:
    """An engine of `tp` ranks.

    Args:
        model: The directory of a model's configuration.
        specs: What the layers of each rank keep, by their names.
        stack: The stack, or None for an engine without.
        extra: More of `kv_connector_extra_config`.
        options: More of vLLM's arguments.
    """

    def __init__(
        self,
        model: Path,
        specs: Sequence[Mapping[str, KVCacheSpec]],
        stack: object,
        *,
        extra: Mapping[str, object] = {},
        layout: str = KVCacheLayout.LBHNC.name,
        **options: Any,
    ) -> None:
        settings = {
            "max_model_len": 512,
            "block_size": 16,
            "load_format": "dummy",
            "num_gpu_blocks_override": GPU_BLOCKS,
            "async_scheduling": False,
            "max_num_batched_tokens": 128,
            "tensor_parallel_size": len(specs),
            "distributed_executor_backend": "mp" if len(specs) > 1 else "uni",
            **options,
        }
        self.config = vllm_config_of(model, {**OUR_SPEC, **({"stack": stack} if stack else {}), **extra}, **settings)
        modes = {each.mamba_cache_mode for rank in specs for each in rank.values() if isinstance(each, MambaSpec)}
        for mode in modes:  # vLLM sets it for a hybrid model, which its stand-in is not
            self.config.cache_config.mamba_cache_mode = mode
        kind = type("Executor", (KnownBytesExecutor,), {"specs": specs, "layout": layout})
        self.core = EngineCore(self.config, kind, log_stats=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.shutdown()

    @property
    def manager(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler.manager

    @property
    def executor(self) -> Any:
        return self.core.model_executor

    def serve(self, prompt: Sequence[int], tokens: int = 4) -> Served:
        """Serve one prompt to its end, and let its blocks reach every tier."""
        name = self.add(prompt, tokens)
        answer: list[int] = []
        for _ in range(STEPS_MAX):
            answer += self.step().get(name, [])
            if not self.core.scheduler.has_requests() and not self.is_busy():
                break
            time.sleep(0.001)
        else:
            raise AssertionError("the request never ended")
        assert self.executor.wrong == 0, f"{self.executor.wrong} blocks held other bytes than were stored"
        return Served(answer, self.executor.found[name])

    def add(self, prompt: Sequence[int], tokens: int = 4) -> str:
        name = uuid.uuid4().hex
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        hasher = self.core.request_block_hasher
        self.core.add_request(Request(name, list(prompt), sampling, None, block_hasher=hasher))
        return name

    def step(self) -> dict[str, list[int]]:
        """Let the engine take a step; return the new tokens of each request."""
        outputs, _ = self.core.step_fn()
        found = [output for each in (outputs or {}).values() for output in each.outputs]
        return {output.request_id: output.new_token_ids for output in found}

    def is_busy(self) -> bool:
        if not hasattr(getattr(self.manager, "_stack", None), "manager"):  # vLLM's tiering, or a host's cache
            return bool(self.manager.has_pending_work())
        manager = self.manager._stack.manager
        manager.poll()
        return bool(manager.jobs_in_flight)

    def drop(self) -> None:
        """Empty the GPU's own prefix cache."""
        assert self.core.reset_prefix_cache()

    def counters(self) -> dict[str, dict[str, Any]]:
        counted: dict[str, dict[str, Any]] = self.manager.counters()
        return counted
