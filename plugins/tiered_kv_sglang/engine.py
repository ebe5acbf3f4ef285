"""HiCache's extra config, the facts that shape the bytes of an engine's pages, and the namespace of each host pool.

`TieredKVHiCache` calls it on the scheduler's thread, when it is made and when it opens its tiers. Everything must count
that is not an ignored setting: settings, variables of the environment, packages. So additions of a later SGLang count
by default. `ignored_settings.toml` names the ignored settings, and sections of settings about other things than the
model. The page docs/reference/namespaces.md lists all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import sglang
import torch
from pydantic import Field
from sglang.srt.arg_groups.arg_utils import namespace_of as sections_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context, get_device, get_parallel, get_server_args, process_model_config
from sglang.srt.server_args import ServerArgs

from tiered_kv.config.entries import tier_type_of
from tiered_kv.config.namespace import Namespace, Parallel
from tiered_kv.config.reading import fill_variables
from tiered_kv.config.validation import validate
from tiered_kv.engines.facts import (
    computing_packages,
    content_of,
    counting_variables,
    depends_on_length,
    instruction_sets,
    weights_in_files,
    without_origin,
)
from tiered_kv.engines.ignored import ignored_settings
from tiered_kv.engines.settings import CallerSettings, UserModelNamespace
from tiered_kv.errors import ConfigError
from tiered_kv_sglang.pools import PagePool

LOCATION = "hicache_storage_backend_extra_config"
"""Path of the extra config, for messages."""

RANK_VARIABLE = "TIERED_KV_RANK"
"""Variable in the texts of an entry: the number of the process, among the processes that hold one copy of the model."""
REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""Variable in the texts of an entry: the number of the copy, with data parallelism."""


class HiCacheNamespace(UserModelNamespace):
    """The part of the namespace that the extra config may set."""

    unknown_key_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dtype", "layout", "hash_algorithm", "hash_seed", "layers", "groups", "parallel"),
        "SGLang sets it; known keys: model, revision, quantization, tenant, extra",
    )


class HiCacheSettings(CallerSettings):
    """The extra config, without the settings that SGLang takes out of it."""

    location = LOCATION

    backend_name: str = Field(description="a name for messages, such as tiered_kv")
    module_path: str = Field(description="tiered_kv_sglang")
    class_name: str = Field(description="TieredKVHiCache")
    interface_v1: Literal[1] = Field(description="write 1: then SGLang hands over places in its memory, not copies")
    namespace: HiCacheNamespace = Field(
        default=HiCacheNamespace(), description="what SGLang does not report of the bytes"
    )
    allocator: Literal["shm"] | None = Field(default=None, description="SGLang's own: where its host pools are")
    file_storage_path: str | None = Field(default=None, description="SGLang's own, not used here")


def read_settings(
    extra_config: Mapping[str, object], environ: Mapping[str, str], processes: Mapping[str, int]
) -> HiCacheSettings:
    """Return the extra config, checked, with its variables filled in.

    Args:
        environ: The variables that its texts may name.
        processes: For each variable that identifies an engine's process, the number of processes. If there are
            several, the path of a tier with its own storage has to name the variable.
    """
    settings = validate(HiCacheSettings, fill_variables(extra_config, environ), (LOCATION,))
    raw = extra_config["tiers"]
    assert isinstance(raw, (list, tuple))
    for number, (tier, entry) in enumerate(zip(settings.tiers, raw, strict=True)):
        setting = tier.storage_settings.directory
        path = None if tier_type_of(tier).is_shared else entry.get(setting)
        for name, count in processes.items():
            if isinstance(path, str) and count > 1 and f"${{{name}" not in path:
                raise ConfigError(
                    f"{count} processes would have one directory, which belongs to one; write ${{{name}}} into it, "
                    f"such as {path}-${{{name}}}; the capacity is that of each",
                    location=f"{LOCATION}.tiers.{number}.{setting}",
                )
    return settings


_NAMESPACE = f"{LOCATION}.namespace"

_FILE_FORMATS = frozenset({"auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "runai_streamer"})
"""Load formats that read the files of the model's directory or repository."""

_PACKAGES = (
    "torch", "triton", "triton_kernels", "transformers", "torchao", "xformers", "bitsandbytes", "nvidia-modelopt",
    "deep-gemm", "sgl-deep-gemm", "deep-ep", "sgl-deep-ep", "flashinfer", "flashinfer-python", "flash-attn",
    "flash-attn-4", "flash_attn_interface", "flash-mla", "sgl-flash-mla", "sgl-kernel", "sglang-kernel", "aiter",
    "amd-aiter", "tilelang", "nvidia-cutlass-dsl", "quack-kernels", "humming-kernels", "kernels", "compressed-tensors",
    "helion", "hpc", "fla-core", "flydsl", "mlx", "torch-npu", "torchair", "spas_sage_attn", "wave-lang",
    "intel-extension-for-pytorch", "kt-kernel", "petit-kernel", "vector-quantize-pytorch",
)  # fmt: skip
"""Packages, and modules without a package, that count besides the packages that `computing_packages` finds."""

_PLUGINS = re.compile(r"^sglang\.")
"""Groups of entry points whose packages count: they bring models, platforms, hooks."""

_VARIABLES = re.compile(
    r"^(?!SGLANG_(BUCKET|CUDA_COREDUMP|DISAGG\w*|EXA|FAILED_SESSION|GRAMMAR|HICACHE|LOG\w*|OLLAMA|OTLP|PREFILL_DELAYER|"
    "SCHEDULER|ZMQ)_)(SGLANG|SGL|AITER|ASCEND_USE|CK|CUBLAS|CUBLASLT|CUTE_DSL|DEEP_NORMAL|DG|DNNL|FA|FLA|FLASHINFER|FLASH_ATTENTION|FLYDSL|"
    "FMHA|GDN|HIPBLASLT|HUMMING|MINIMAX|NVTE|ONEDNN|QUACK|ROCBLAS|ROCM_QUICK_REDUCE|TILELANG|TRITON|TRTLLM|USE_AITER|"
    "USE_ROCM|USE_TRITON)_|"
    "^(ATEN_CPU_CAPABILITY|IS_H200|NVIDIA_TF32_OVERRIDE|TIMM_FUSED_ATTN|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    "VIDEO_MAX_PIXELS|XHS_VIDEO_JPEG_QUALITY)$"
)
"""Variables of SGLang and of its computing libraries that count, unless `ignored_settings.toml` names them. Variables
for metrics, logs, transfers, schedules and parts of the server do not count."""
IGNORED = ignored_settings(Path(__file__).parent)
_GEOMETRY = ("start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
"""Attributes that host pools may have for their layers and heads."""


def model_path() -> str:
    return str(get_context().config_bag("model").model_path)


def engine_facts(user: UserModelNamespace) -> dict[str, str]:
    """Return the engine's facts that the namespace needs beside the reports of HiCache and its host pools, by name."""
    config = process_model_config()
    user.check_attention("SGLang", config.hf_text_config.to_dict(), _NAMESPACE)
    if _value("enable_lora", "lora"):
        user.check_adapters("SGLang", _NAMESPACE)
    sections: dict[str, object] = {"hf_config": _model(config)}
    is_drafting = _has_draft()
    for name, path in sorted(sections_of(ServerArgs).items()):
        section = path.partition(".")[0]
        if IGNORED.counts(section, name) and (section != "spec" or is_drafting):
            values = sections.setdefault(section, {})
            assert isinstance(values, dict)
            value = _value(name, path)
            values[name] = content_of(value) or value
    variables = counting_variables(_VARIABLES, IGNORED.variables)
    sections["variables"] = variables
    return {
        "sglang": str(sglang.__version__),
        "dtype": str(config.dtype),
        "platform": _platform(),
        "libraries": computing_packages(_PACKAGES, _PLUGINS),
        "variables": ", ".join(variables) or "none",  # a digest has their values, some of which may be secrets
        "weights": _weights(config, str(_value("load_format", "model")), user),
        **(_draft_weights(user) if is_drafting else {}),
        **{f"sglang.{name}": _digest(name, value) for name, value in sections.items()},
    }


def _value(name: str, path: str) -> object:
    top, *inner = path.split(".")
    bag = get_parallel() if top == "parallel" else get_context().config_bag(top)
    for each in inner:
        bag = getattr(bag, each)
    return getattr(bag, name)


def _model(config: ModelConfig) -> dict[str, object]:
    described = {}
    for name in ("hf_config", "hf_text_config"):
        entries = {**getattr(config, name).to_dict()}
        entries.pop("context_len", None)  # SGLang adds it
        described[name] = without_origin(entries)
    is_foreign_code = bool(_value("trust_remote_code", "model")) or str(_value("model_impl", "model")) not in (
        "auto",
        "sglang",
    )
    model_type = getattr(config.hf_text_config, "model_type", "")
    counts = depends_on_length(described["hf_config"], model_type, is_foreign_code=is_foreign_code)
    return {**described, "context_length": config.context_len if counts else None}


def _has_draft() -> bool:
    """Return whether a draft model adds layers."""
    return str(_value("speculative_algorithm", "spec") or "NGRAM").upper() != "NGRAM"


def _draft_weights(user: UserModelNamespace) -> dict[str, str]:
    path = _value("speculative_draft_model_path", "spec")
    revision = _value("speculative_draft_model_revision", "spec")
    if path is None or (path, revision) == (model_path(), _value("revision", "model")):
        return {}
    config = ModelConfig.from_server_args(
        get_server_args(), model_path=str(path), model_revision=revision, is_draft_model=True
    )
    load_format = _value("speculative_draft_load_format", "spec") or _value("load_format", "model")
    return {"draft": _weights(config, str(load_format), user), "draft.hf_config": _digest("draft", _model(config))}


def _weights(config: ModelConfig, load_format: str, user: UserModelNamespace) -> str:
    comes_later = _value("checkpoint_engine_wait_weights_before_ready", "model")
    if load_format == "dummy" and not comes_later:
        return f"dummy {get_device().random_seed}"
    if load_format in _FILE_FORMATS and not comes_later and not _value("custom_weight_loader", "model"):
        commit = getattr(config.hf_config, "_commit_hash", None)
        found = weights_in_files(config.model_path, commit, load_format)
        if found is not None:
            return found
    return user.named_weights("SGLang", config.model_path, load_format, _NAMESPACE)


def _platform() -> str:
    """Return the hardware by which SGLang chooses kernels."""
    device = str(_value("device", "device"))
    if device == "cuda":
        return f"{device} {torch.version.hip or ''} {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    if device == "cpu":
        return f"{device} {instruction_sets()}"
    try:
        return f"{device} {torch.get_device_module(device).get_device_name()}"
    except (RuntimeError, AttributeError):  # PyTorch does not know the device, or its module has no names
        return device


def _digest(name: str, value: object) -> str:
    try:
        text = json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"SGLang's {name} has a value without a stable text: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tiered-kv-sgl-v1").hexdigest()


def _plain(value: Any) -> object:  # Any: a value of a configuration
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (torch.dtype, type)):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")


def process_variables() -> tuple[dict[str, str], dict[str, int]]:
    """Return the variables that identify an engine's process: their values here, and how many values each has."""
    parallel = get_parallel()
    ranks, replicas = int(parallel.launch_world_size), int(parallel.dp_size)
    rank = int(parallel.launch_world_rank) if ranks > 1 else 0
    replica = int(parallel.dp_rank or 0) if replicas > 1 else 0
    return {RANK_VARIABLE: str(rank), REPLICA_VARIABLE: str(replica)}, {
        RANK_VARIABLE: ranks,
        REPLICA_VARIABLE: replicas,
    }


def check_sharing(config: HiCacheStorageConfig, settings: HiCacheSettings) -> None:
    """Raise ConfigError for tiers that cannot hand one rank's pages to the others, where SGLang stores them once.

    With multi-head latent attention the ranks of a tensor parallel group have the same pages, and the first one alone
    stores them. All have to load them.
    """
    if not config.is_mla_model or config.tp_size == 1:
        return
    for number, tier in enumerate(settings.tiers):
        if not tier_type_of(tier).is_shared:
            raise ConfigError(
                f"found '{tier.type}', whose storage belongs to one process. The pages of this model are the same on "
                f"all {config.tp_size} tensor parallel ranks: SGLang stores them on the first and loads them on all. "
                "Use tiers that ranks share, such as host, fs, redis and s3",
                location=f"{LOCATION}.tiers.{number}",
            )


def namespace_of(
    pool: PagePool, config: HiCacheStorageConfig, settings: HiCacheSettings, engine_facts: Mapping[str, str]
) -> Namespace:
    """Return the namespace of a host pool's pages, without the size of a part."""
    facts = {
        **engine_facts,
        "engine": "sglang",
        "class": type(pool.pool).__name__,
        "parts": ",".join(map(str, pool.sizes)),
        "format": str(getattr(pool.pool, "storage_format_tag", None)),
    }
    geometry = {name: getattr(pool.pool, name, None) for name in _GEOMETRY}
    fields = {
        "model": model_path(),
        "dtype": str(pool.pool.dtype).removeprefix("torch."),
        "layout": f"sglang {pool.pool.layout}",
        "hash_algorithm": "sglang-sha256",
        "layers": int(getattr(pool.pool, "layer_num", 0) or 0),
        "groups": (
            ", ".join([pool.name, *(f"{name} {value}" for name, value in geometry.items() if value is not None)]),
        ),
        "parallel": _parallel(pool.name, pool.pool, config),
    }
    return settings.namespace.complete("SGLang", fields, facts, (LOCATION, "namespace"))


def _parallel(name: str, pool: Any, config: HiCacheStorageConfig) -> Parallel:  # Any: a host pool
    """Return the part of the model that a pool has.

    In models with latent attention, all ranks of the tensor parallel group have the same pool, but for states. SGLang
    stores it once, so its replicas are one part.
    """
    is_replicated = config.is_mla_model and name != PoolName.MAMBA
    if is_replicated and config.tp_size > 1 and isinstance(pool, MHATokenToKVPoolHost):
        raise ConfigError(
            f"SGLang stores the host pool '{name}' on the first of {config.tp_size} tensor parallel ranks, and each "
            "rank has other heads in it: the others would find nothing. Use a draft model with latent attention, or no "
            "storage backend"
        )
    tensor, tensor_rank = (1, 0) if is_replicated else (config.tp_size, config.tp_rank)
    rank = (config.pp_rank * config.attn_cp_size + config.attn_cp_rank) * tensor + tensor_rank
    return Parallel(tensor=tensor, pipeline=config.pp_size, prefill_context=config.attn_cp_size, rank=rank)
