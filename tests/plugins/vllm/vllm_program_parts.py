"""What the programs that run in vLLM's environments have in common."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from program_checks import damage, run_checks  # type: ignore[import-not-found]  # found beside the program
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from tests.support.tiny_llama import TINY_LLAMA

__all__ = ["damage", "run_checks"]

CHUNK_BYTES = 16 << 10
WAIT_S = 20.0
OUR_MODULE = "tiered_kv_vllm"
OUR_SPEC = {"spec_name": "TieredKVOffloadingSpec", "spec_module_path": OUR_MODULE}
OUR_TIER = {"type": "TieredKVTier", "module_path": OUR_MODULE}


DEEPSEEK: Mapping[str, object] = {
    **TINY_LLAMA,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 64,
}
"""A `config.json` of a model with latent attention."""


def config_with(extra: Mapping[str, object], model: str = "m", enable_events: bool = False) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=enable_events,
        extra_config=extra,
        engine_id=f"test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def keys_of(name: str, count: int) -> list[bytes]:
    return [make_offload_key(hashlib.sha256(f"{name}-{index}".encode()).digest(), 0) for index in range(count)]


def wait_for(attempt: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (answer := attempt()):
        assert time.monotonic() < end_s, "nothing came of it in time"
        time.sleep(0.0005)
    return answer


def all_stats(get_stats: Callable[[], Any]) -> Any:
    """Return what a manager or a tier reports to vLLM over several steps, together."""
    stats = wait_for(get_stats)
    while (part := get_stats()) is not None:
        stats = stats.aggregate(part)
    return stats


def refusal_of(attempt: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message with which an attempt is refused."""
    try:
        attempt()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def canonical(groups: Sequence[Sequence[Any]], page_bytes: int) -> CanonicalKVCaches:
    """Return the KV caches of a worker, by the layers of each group."""
    layers = [layer for group in groups for layer in group]
    numbers = itertools.count()
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(layer, page_bytes) for layer in layers],
        group_data_refs=[[CanonicalKVCacheRef(next(numbers), page_bytes) for _ in group] for group in groups],
    )


class Scheduler:
    """The part of vLLM's scheduler that calls a manager."""

    manager: Any

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def begin(self, keys: Sequence[bytes], **options: Any) -> ReqContext:
        context = ReqContext(req_id=f"request-{next(self.numbers)}", **options)
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, (position + 1) * 16)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.step()

    def prepare_store(self, keys: Sequence[bytes], context: ReqContext) -> Any:
        output = self.manager.prepare_store(list(keys), context)
        self.step()
        return output

    def lookup(self, keys: Sequence[bytes], context: ReqContext) -> int | None:
        """Return how many of `keys` can be loaded now, or None where vLLM would ask again in its next step."""
        hits, is_deferred = 0, False
        for key in keys:
            answer = self.manager.lookup(key, context)
            is_deferred |= answer in (LookupResult.HIT_PENDING, LookupResult.RETRY)
            if answer is LookupResult.MISS:
                break
            hits += answer is not LookupResult.RETRY
        return None if is_deferred else hits

    def find(self, keys: Sequence[bytes], context: ReqContext) -> int:
        """Ask until there is an answer, a step each time."""
        end_s = time.monotonic() + WAIT_S
        while (hits := self.lookup(keys, context)) is None:
            assert time.monotonic() < end_s, "the lookup was never answered"
            self.step()
            time.sleep(0.0005)
        return hits

    def is_busy(self) -> bool:
        return bool(self.manager.has_pending_work())

    def settle(self) -> None:
        """Step until no transfer is in flight."""
        end_s = time.monotonic() + WAIT_S
        while self.is_busy():
            assert time.monotonic() < end_s, "transfers do not end"
            self.step()
            time.sleep(0.0005)


def vllm_config_of(model: Path, connector_extra: Mapping[str, object], **options: Any) -> Any:
    """Return vLLM's whole configuration, made as `vllm serve` makes it from its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    transfer = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": OUR_MODULE,
        "kv_role": "kv_both",
        "engine_id": f"test-{uuid.uuid4().hex}",
        "kv_connector_extra_config": dict(connector_extra),
    }
    arguments = {"max_model_len": 2048, "block_size": 32, "dtype": "float32", **options}
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, kv_transfer_config=transfer, **arguments
    ).create_engine_config()


def stand_in_for_a_device() -> None:
    """Let a vLLM that was installed for no device take this machine for one of its CPUs; before vLLM is imported."""
    import vllm.platforms

    if not vllm.platforms.current_platform.is_unspecified():
        return
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    fields = {each.name: False for each in dataclasses.fields(registry._ModelInfo)}
    texts = {
        "architecture": "LlamaForCausalLM",
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supported_video_pruning_methods": (),
    }
    info = registry._ModelInfo(**{**fields, **texts, "is_text_generation_model": True, "supports_pp": True})
    registry._LazyRegisteredModel.inspect_model_cls = lambda _: info


def described_model(directory: Path) -> Path:
    """Return a directory with the configuration of a model, and no weights."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    return model


@contextmanager
def small_engine(directory: Path) -> Iterator[None]:
    """Let specs and tiers see the configuration of a small engine, as our connector does."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tiered_kv_vllm.engine import configured

    stand_in_for_a_device()
    config = vllm_config_of(described_model(directory), {}, load_format="dummy")
    with configured(config, KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[])):
        yield
