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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode, MLAAttentionSpec
from vllm_program_parts import (  # type: ignore[import-not-found]  # found beside this program when it runs
    DEEPSEEK,
    OUR_SPEC,
    OUR_TIER,
    stand_in_for_a_device,
    vllm_config_of,
)

from tests.support.namespaces import Case, all_cases
from tests.support.tiny_llama import TINY_LLAMA
from tiered_kv.errors import ConfigError

stand_in_for_a_device()

from tiered_kv_vllm import TieredKVConnector  # noqa: E402 - which asks for the device

TOKENS = 32
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, max_tp_shards=1, head_size=128, dtype=torch.float32)


@dataclasses.dataclass(frozen=True)
class Engine:
    """What data does not say of an engine.

    Args:
        files: Changes the model's directory.
        patch: Entered while the engine starts: another machine.
        change: Changes vLLM's configuration, for what this machine's would refuse.
        hf: Entries of the model's config.json.
        spec: How a layer keeps its states.
        layers: Names of the layers that have a cache.
        connector: What vLLM was told to use.
    """

    files: Callable[[Path], object] = lambda _: None
    patch: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    change: Callable[[Any], object] = lambda _: None
    hf: Mapping[str, object] = dataclasses.field(default_factory=dict)
    spec: Any = SPEC
    layers: tuple[str, ...] = ("layers.0.attn", "layers.1.attn")
    connector: type = TieredKVConnector


def change_setting(config: Any, section: str, name: str, value: object) -> None:
    target = getattr(config, section) if section else config
    assert hasattr(target, name), (section, name)
    object.__setattr__(target, name, value)


def environment(variables: Mapping[str, str]) -> contextlib.AbstractContextManager[object]:
    """Return the variables as a context; without any, what vLLM sets itself at its first start has to stay."""
    return mock.patch.dict(os.environ, variables) if variables else contextlib.nullcontext()


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
    return lambda: mock.patch("tiered_kv_vllm.engine.current_platform", stand_in)


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


LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 512,
    }
}


def engines_by_hand(directory: Path) -> dict[str, Engine]:
    """Return what data does not say, by the name of a case in `namespaces.toml`."""
    site = directory / "site"
    fp8 = dataclasses.replace(SPEC, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    return {
        "first, longrope": Engine(hf=LONG),
        "first, adapters": Engine(change=lora),
        "first, draft": Engine(change=with_draft()),
        "first, hub": Engine(change=from_hub("a" * 40)),
        "first, named file": Engine(files=lambda path: scales_in(path, b"1"), change=with_scales(directory)),
        "first, large": Engine(files=large_weights),
        "first, two kinds": Engine(files=two_kinds_of_weights),
        "first, latent": Engine(hf=DEEPSEEK, spec=LATENT),
        "first, cuda": Engine(patch=platform("cuda", (9, 0))),
        # What shapes the bytes.
        "quantization of the checkpoint": Engine(
            change=lambda config: setattr(config.model_config.hf_config, "quantization_config", {"bits": 4})
        ),
        "max_model_len with longrope": Engine(hf=LONG),
        "weights replaced": Engine(files=edit_weights),
        "large weights replaced": Engine(files=edit_large_weights),
        "load format": Engine(files=two_kinds_of_weights),
        "commit": Engine(change=from_hub("b" * 40)),
        "kv cache spec": Engine(spec=fp8),
        "packing": Engine(spec=dataclasses.replace(SPEC, num_head_slots=1, state_content_bytes=512)),
        "block size": Engine(spec=dataclasses.replace(SPEC, block_size=64)),
        "layers": Engine(layers=("layers.0.attn", "layers.2.attn")),
        "model runner": Engine(change=other_runner, patch=lambda: mock.patch.dict(os.environ)),
        "kernel libraries": Engine(patch=lambda: library(site, "amd-aiter", "9.9")),
        "library that changes weights": Engine(patch=lambda: library(site, "deep-gemm", "2.1")),
        "plugin": Engine(patch=lambda: library(site, "our-models", "1.0", "vllm.general_plugins")),
        "platform": Engine(patch=platform("rocm", (9, 0))),
        "compute capability": Engine(patch=platform("cuda", (10, 0))),
        "instruction set": Engine(patch=cpu_without("avx2")),
        "vllm version": Engine(patch=lambda: mock.patch("vllm.__version__", "0.32.99")),
        "adapters": Engine(change=lora),
        "lora dtype": Engine(change=lora),
        "draft model": Engine(change=with_draft(quantization="awq")),
        "draft decoding": Engine(change=with_draft()),
        "scales in a named file": Engine(files=lambda path: scales_in(path, b"2"), change=with_scales(directory)),
        "multimodal processing": Engine(
            change=lambda config: setattr(config.model_config, "multimodal_config", multimodal(video_pruning_rate=0.5))
        ),
        # What vLLM does not tell has to be said.
        "refused: adapters": Engine(change=lora),
        "refused: weights without a file": Engine(files=without_weights),
        "refused: a hub without a commit": Engine(change=from_hub(None)),
        "refused: weights that are replaced": Engine(
            change=lambda config: change_setting(config, "", "weight_transfer_config", SimpleNamespace())
        ),
        "refused: another connector": Engine(connector=OffloadingConnector),
        "weights without a file, said": Engine(files=without_weights),
        # What must not matter.
        "other libraries": Engine(patch=lambda: library(site, "our-metrics", "1.0")),
        "a copy of the files": Engine(files=lambda path: os.utime(path / "model.safetensors", (1, 1))),
        "ngram": Engine(change=lambda config: setattr(config, "speculative_config", ngram(config))),
        "adapters in memory": Engine(change=lora),
        "latent attention, two ranks": Engine(hf=DEEPSEEK, spec=LATENT),
    }


def ngram(config: Any) -> Any:
    return speculative(method="ngram", draft_model_config=config.model_config, target_model_config=config.model_config)


def multimodal(**values: object) -> Any:
    from vllm.config import MultiModalConfig

    return MultiModalConfig(**values)


def namespaces_of(directory: Path, case: Case, engine: Engine) -> dict[str, str]:
    """Start an engine's connector, and return its namespaces as our metrics show them."""
    said = {"namespace": dict(case["namespace"])} if "namespace" in case else {}
    group = KVCacheGroupSpec(layer_names=list(engine.layers), kv_cache_spec=engine.spec)
    kv_cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    ranks = case.get("settings", {}).get("parallel_config", {}).get("tensor_parallel_size", 1)
    kv_cache.kv_tp_replicas = ranks if engine.spec.max_tp_shards == 1 else 1  # as vLLM counts them
    found = {}
    path = directory / "model"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shutil.copy(directory / "model.safetensors", path)
    (path / "config.json").write_text(json.dumps({**TINY_LLAMA, **engine.hf, **case.get("hf", {})}))
    with environment(case.get("variables", {})), engine.patch():
        config = vllm_config_of(path, {}, **case.get("options", {}))
        engine.change(config)
        for section, values in case.get("settings", {}).items():
            for name, value in values.items():
                change_setting(config, section, name, value)
        engine.files(path)
        for name, text in case.get("files", {}).items():
            (path / name).write_text(text)
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
    by_hand = engines_by_hand(directory)
    for name, case in all_cases("vllm", by_hand).items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        try:
            found = namespaces_of(directory, case, by_hand.get(name, Engine()))
        except ConfigError as error:
            found = {"refusal": str(error)}
        print(json.dumps({"engine": name, **found}), flush=True)


if __name__ == "__main__":
    main()
