"""Runs in an environment with vLLM: prints the namespaces of engines that differ from a first one in one thing.

    python vllm_namespace_program.py DIRECTORY

Each engine is vLLM's whole configuration, made as `vllm serve` makes it, in our connector, as vLLM's scheduler makes
it; nothing is computed. Prints a line of JSON for each: its name, and its namespace by our stack's spec and by our tier
under vLLM's tiering, or the error with which it was refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode
from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    OUR_SPEC,
    OUR_TIER,
    stand_in_for_a_device,
    vllm_config_of,
)

from tests.support.tiny_llama import TINY_LLAMA
from tiered_kv.errors import ConfigError

stand_in_for_a_device()

from tiered_kv.integrations.vllm import TieredKVConnector  # noqa: E402 - which asks for the device

TOKENS = 32
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Engine:
    """What an engine is started with.

    Args:
        options: Engine arguments, over those of the first.
        namespace: What the user's configuration says.
        hf: Entries of the model's config.json, over those of the first.
        files: Changes the model's directory.
        patch: Entered while the engine starts: another machine, or another environment.
        change: Changes vLLM's configuration, for what this machine's would refuse.
        spec: How a layer keeps its states.
        layers: Names of the layers that have a cache.
        beside: The engine that it is compared with.
        connector: What vLLM was told to use.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    namespace: Mapping[str, Any] | None = None
    hf: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Callable[[Path], object] = lambda _: None
    patch: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    change: Callable[[Any], object] = lambda _: None
    spec: Any = SPEC
    layers: tuple[str, ...] = ("layers.0.attn", "layers.1.attn")
    beside: str = "first"
    connector: type = TieredKVConnector


def environment(**variables: str) -> Callable[[], contextlib.AbstractContextManager[object]]:
    return lambda: mock.patch.dict(os.environ, variables)


def setting(section: str, **values: object) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        target = getattr(config, section) if section else config
        for name, value in values.items():
            assert hasattr(target, name), (section, name)
            object.__setattr__(target, name, value)

    return change


def both(one: Callable[[Any], object], other: Callable[[Any], object]) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        one(config)
        other(config)

    return change


def other_runner(config: Any) -> None:
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if config.use_v2_model_runner else "1"


def edit_weights(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"edit")


def large_weights(path: Path) -> None:
    with (path / "large.safetensors").open("wb") as file:
        file.truncate(64 << 20)


def edit_large_weights(path: Path) -> None:
    large_weights(path)
    with (path / "large.safetensors").open("r+b") as file:
        file.seek(-(4 << 20), os.SEEK_END)
        file.write(bytes([1]) * (1 << 20))


def two_kinds_of_weights(path: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, path / "model.pt")


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def from_hub(commit: str | None) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.model_config.model = "org/model"
        config.model_config.hf_config._commit_hash = commit

    return change


def with_draft(**values: object) -> Callable[[Any], None]:
    """A speculative decoder with layers of its own; its configuration is the target's, with other values."""

    def change(config: Any) -> None:
        import copy

        draft = copy.copy(config.model_config)
        for name, value in values.items():
            setattr(draft, name, value)
        config.speculative_config = speculative(draft_model_config=draft, target_model_config=config.model_config)

    return change


def speculative(**values: object) -> Any:
    from vllm.config import SpeculativeConfig

    config = object.__new__(SpeculativeConfig)
    for each in dataclasses.fields(SpeculativeConfig):
        object.__setattr__(config, each.name, values.get(each.name))
    return config


def scales_in(path: Path, content: bytes) -> None:
    (path.parent / "scales.json").write_bytes(content)


def with_scales(directory: Path) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.model_config.multimodal_config = multimodal()
        path = str(directory / "scales.json")
        object.__setattr__(config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", path)

    return change


def lora(config: Any) -> None:
    from vllm.config import LoRAConfig

    config.lora_config = LoRAConfig()


def platform(name: str, capability: tuple[int, int]) -> Callable[[], contextlib.AbstractContextManager[object]]:
    stand_in = SimpleNamespace(
        device_name=name,
        device_type="cuda",
        is_cpu=lambda: False,
        get_device_capability=lambda: SimpleNamespace(major=capability[0], minor=capability[1]),
    )
    return lambda: mock.patch("tiered_kv.integrations.vllm.engine.current_platform", stand_in)


def cpu_without(flag: str) -> Callable[[], contextlib.AbstractContextManager[object]]:
    others = {**torch.cpu.get_capabilities(), flag: False}
    return lambda: mock.patch("torch.cpu.get_capabilities", return_value=others)


@contextlib.contextmanager
def library(directory: Path, name: str, version: str, plugin: str = "") -> Iterator[None]:
    found = directory / name / f"{name.replace('-', '_')}-{version}.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (found / "entry_points.txt").write_text(f"[{plugin}]\n{name} = module:function\n" if plugin else "")
    with mock.patch.object(sys, "path", [*sys.path, str(found.parent)]):
        yield


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LONG = rope(
    "longrope",
    short_factor=[1.0] * 16,
    long_factor=[2.0] * 16,
    original_max_position_embeddings=512,
)
ADAPTERS = {"extra": {"adapters": "1"}}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=4096)


def engines(directory: Path) -> dict[str, Engine]:
    """Return the engines by name: first those that others are compared with, then what differs, then what must not."""
    fp8 = dataclasses.replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    return {
        "first": Engine(),
        "first, longrope": Engine(hf=LONG),
        "first, remote code": Engine(options={"trust_remote_code": True}),
        "first, adapters": Engine(change=lora, namespace=ADAPTERS),
        "first, draft": Engine(change=with_draft()),
        "first, hub": Engine(change=from_hub("a" * 40)),
        "first, named file": Engine(files=lambda path: scales_in(path, b"1"), change=with_scales(directory)),
        "first, large": Engine(files=large_weights),
        "first, two kinds": Engine(files=two_kinds_of_weights),
        "first, dummy": Engine(options={"load_format": "dummy"}),
        "first, cuda": Engine(patch=platform("cuda", (9, 0))),
        # What shapes the bytes.
        "model": Engine(namespace={"model": "another"}),
        "rope scaling": Engine(hf=YARN),
        "rope theta": Engine(hf=rope("default") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        "hf_overrides": Engine(options={"hf_overrides": YARN}),
        "sliding window": Engine(hf={"sliding_window": 64}),
        "quantization": Engine(change=setting("model_config", quantization="awq")),
        "quantization of the checkpoint": Engine(
            change=lambda config: setattr(config.model_config.hf_config, "quantization_config", {"bits": 4})
        ),
        "quantized backend": Engine(options={"moe_backend": "marlin"}),
        "variables of quantization": Engine(patch=environment(VLLM_MARLIN_INPUT_DTYPE="int8")),
        "variables of experts": Engine(patch=environment(VLLM_MOE_ROUTING_SIMULATION_STRATEGY="uniform_random")),
        "DeepGEMM": Engine(patch=environment(VLLM_USE_DEEP_GEMM="0")),
        "disabled kernels": Engine(patch=environment(VLLM_DISABLED_KERNELS="MarlinLinearKernel")),
        "batch invariance": Engine(patch=environment(VLLM_BATCH_INVARIANT="1")),
        "variable of a later release": Engine(patch=environment(VLLM_OF_A_LATER_RELEASE="1")),
        "variables of libraries": Engine(patch=environment(NVIDIA_TF32_OVERRIDE="0")),
        "model dtype": Engine(options={"dtype": "bfloat16"}),
        "model implementation": Engine(change=setting("model_config", model_impl="transformers")),
        "remote code": Engine(options={"trust_remote_code": True}),
        "code revision": Engine(change=setting("model_config", code_revision="other")),
        "weights replaced": Engine(files=edit_weights),
        "large weights replaced": Engine(files=edit_large_weights, beside="first, large"),
        "scales in a file": Engine(files=lambda path: (path / "hf_quant_config.json").write_text("{}")),
        "code beside the weights": Engine(files=lambda path: (path / "modeling.py").write_text("x = 1")),
        "index of the weights": Engine(files=lambda path: (path / "model.safetensors.index.json").write_text("{}")),
        "load format": Engine(beside="first, two kinds", files=two_kinds_of_weights, options={"load_format": "pt"}),
        "worker": Engine(change=setting("parallel_config", worker_cls="module.Worker")),
        "processor": Engine(files=lambda path: (path / "preprocessor_config.json").write_text("{}")),
        "revision said": Engine(namespace={"revision": "other"}),
        "tenant": Engine(namespace={"tenant": "other"}),
        "commit": Engine(beside="first, hub", change=from_hub("b" * 40)),
        "dummy weights": Engine(beside="first, dummy", options={"load_format": "dummy", "seed": 7}),
        "kv cache dtype": Engine(change=setting("cache_config", cache_dtype="fp8_e5m2")),
        "skipped layers": Engine(change=setting("cache_config", kv_cache_dtype_skip_layers=["0"])),
        "kv cache spec": Engine(spec=fp8),
        "packing": Engine(spec=dataclasses.replace(SPEC, num_head_slots=1, state_content_bytes=512)),
        "block size": Engine(options={"block_size": 64}, spec=dataclasses.replace(SPEC, block_size=64)),
        "layers": Engine(layers=("layers.0.attn", "layers.2.attn")),
        "layout": Engine(change=setting("cache_config", kv_cache_layout="LBNHC")),
        "attention backend": Engine(options={"attention_backend": "TRITON_ATTN"}),
        "flash attention version": Engine(change=setting("attention_config", flash_attn_version=3)),
        "model runner": Engine(patch=environment(), change=other_runner),
        "variables of the backend": Engine(patch=environment(VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT="1")),
        "kernel libraries": Engine(patch=lambda: library(directory / "site", "amd-aiter", "9.9")),
        "library that changes weights": Engine(patch=lambda: library(directory / "site", "deep-gemm", "2.1")),
        "plugin": Engine(patch=lambda: library(directory / "site", "our-models", "1.0", "vllm.general_plugins")),
        "platform": Engine(beside="first, cuda", patch=platform("rocm", (9, 0))),
        "compute capability": Engine(beside="first, cuda", patch=platform("cuda", (10, 0))),
        "instruction set": Engine(patch=cpu_without("avx2")),
        "vllm version": Engine(patch=lambda: mock.patch("vllm.__version__", "0.32.99")),
        "tensor parallel": Engine(change=setting("parallel_config", tensor_parallel_size=2, world_size=2)),
        "context parallel": Engine(change=setting("parallel_config", prefill_context_parallel_size=2, world_size=2)),
        "exchange between experts": Engine(change=setting("parallel_config", all2all_backend="deepep_low_latency")),
        "interleaving": Engine(change=setting("parallel_config", cp_kv_cache_interleave_size=16)),
        "hash algorithm": Engine(options={"prefix_caching_hash_algo": "sha256_cbor"}),
        "hash seed": Engine(patch=environment(PYTHONHASHSEED="7")),
        "adapters": Engine(beside="first, adapters", change=lora, namespace={"extra": {"adapters": "2"}}),
        "lora dtype": Engine(
            beside="first, adapters",
            change=both(lora, setting("lora_config", lora_dtype="float16")),
            namespace=ADAPTERS,
        ),
        "draft model": Engine(beside="first, draft", change=with_draft(quantization="awq")),
        "draft decoding": Engine(
            beside="first, draft",
            change=both(with_draft(), setting("speculative_config", method="eagle")),
        ),
        "scales in a named file": Engine(
            beside="first, named file", files=lambda path: scales_in(path, b"2"), change=with_scales(directory)
        ),
        "multimodal processing": Engine(
            change=lambda config: setattr(config.model_config, "multimodal_config", multimodal(video_pruning_rate=0.5))
        ),
        "mamba backend": Engine(change=setting("mamba_config", enable_stochastic_rounding=True)),
        "additional configuration": Engine(change=setting("", additional_config={"x": 1})),
        "max_model_len with longrope": Engine(beside="first, longrope", hf=LONG, options={"max_model_len": 512}),
        "max_model_len with remote code": Engine(
            beside="first, remote code", options={"trust_remote_code": True, "max_model_len": 512}
        ),
        # What vLLM does not tell has to be said.
        "refused: adapters": Engine(change=lora),
        "refused: weights without a file": Engine(files=without_weights),
        "refused: a hub without a commit": Engine(change=from_hub(None)),
        "refused: weights from elsewhere": Engine(change=setting("load_config", load_format="tensorizer")),
        "refused: weights that are replaced": Engine(change=setting("", weight_transfer_config=SimpleNamespace())),
        "refused: another connector": Engine(connector=OffloadingConnector),
        "refused: a name that is taken": Engine(namespace={"extra": {"weights": "mine"}}),
        "weights without a file, said": Engine(files=without_weights, namespace={"revision": "other"}),
        # What must not matter.
        "same: memory": Engine(options={"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77}),
        "same: max_model_len": Engine(options={"max_model_len": 512}),
        "same: scheduling": Engine(options={"max_num_seqs": 3, "max_num_batched_tokens": 2048}),
        "same: eager": Engine(options={"enforce_eager": True}),
        "same: compilation": Engine(options={"compilation_config": {"mode": 0}}),
        "same: served name": Engine(options={"served_model_name": "another"}),
        "same: sampling": Engine(options={"max_logprobs": 5, "generation_config": "vllm", "seed": 3}),
        "same: port": Engine(patch=environment(VLLM_PORT="12345", VLLM_HOST_IP="127.0.0.1")),
        "same: ranks": Engine(patch=environment(VLLM_DP_RANK="1", VLLM_DP_RANK_LOCAL="1", LOCAL_RANK="1")),
        "same: Kubernetes": Engine(
            patch=environment(VLLM_SERVICE_HOST="10.0.0.7", VLLM_PORT_8000_TCP="tcp://10.0.0.7:8000", VLLM_API_KEY="k")
        ),
        "same: logging": Engine(patch=environment(VLLM_LOGGING_LEVEL="WARNING", CUDA_VISIBLE_DEVICES="1")),
        "same: caches": Engine(
            patch=environment(VLLM_CACHE_ROOT="/c", TRITON_CACHE_DIR="/c", VLLM_CPU_KVCACHE_SPACE="1")
        ),
        "same: other libraries": Engine(patch=lambda: library(directory / "site", "our-metrics", "1.0")),
        "same: tokenizer": Engine(files=lambda path: (path / "tokenizer.json").write_text("{}")),
        "same: a copy of the files": Engine(files=lambda path: os.utime(path / "model.safetensors", (1, 1))),
        "same: ngram": Engine(change=lambda config: setattr(config, "speculative_config", ngram(config))),
        "same: replicas": Engine(change=setting("parallel_config", data_parallel_size=2, data_parallel_index=1)),
        "same: adapters in memory": Engine(
            beside="first, adapters",
            change=both(lora, setting("lora_config", max_cpu_loras=9)),
            namespace=ADAPTERS,
        ),
    }


def ngram(config: Any) -> Any:
    return speculative(method="ngram", draft_model_config=config.model_config, target_model_config=config.model_config)


def multimodal(**values: object) -> Any:
    from vllm.config import MultiModalConfig

    return MultiModalConfig(**values)


def namespaces_of(directory: Path, engine: Engine) -> dict[str, str]:
    """Start an engine's connector, and return its namespaces as our metrics show them."""
    said = {"namespace": dict(engine.namespace)} if engine.namespace else {}
    group = KVCacheGroupSpec(layer_names=list(engine.layers), kv_cache_spec=engine.spec)
    kv_cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    found = {}
    path = directory / "model"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shutil.copy(directory / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps(TINY_LLAMA | dict(engine.hf)))
    with engine.patch():
        config = vllm_config_of(path, {}, **engine.options)
        engine.change(config)
        engine.files(path)
        for name, extra in {"spec": our_spec(said), "tier": our_tier(said)}.items():
            config.kv_transfer_config.kv_connector_extra_config = extra
            connector = engine.connector(config, KVConnectorRole.SCHEDULER, kv_cache)
            manager = connector.connector_scheduler.manager
            try:
                info = manager.config_info()[0] if name == "spec" else manager.secondary_tiers[0].config_info()
            finally:
                connector.shutdown()
            found[name] = str(info["tiered_kv_namespace"])
    return found


def our_spec(said: Mapping[str, object]) -> dict[str, object]:
    stack = {"primary": {"capacity": "1MiB"}, "secondary": [], **said}
    return {**OUR_SPEC, "stack": stack}


def our_tier(said: Mapping[str, object]) -> dict[str, object]:
    tier = {**OUR_TIER, "tier": {"type": "memory", "capacity": "1MiB"}, **said}
    return {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier]}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    save_file({"weight": torch.randn(64, 64)}, directory / "model.safetensors")
    for name, engine in engines(directory).items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        try:
            found = namespaces_of(directory, engine)
        except ConfigError as error:
            found = {"refusal": str(error)}
        print(json.dumps({"engine": name, "beside": engine.beside, **found}), flush=True)


if __name__ == "__main__":
    main()
