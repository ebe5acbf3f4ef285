"""What shapes the bytes of an engine's pages, from SGLang's whole configuration.

Everything counts that is not known to be irrelevant, so what a later SGLang adds counts by default: settings, variables
of the environment, packages. `irrelevant` names the rest. The table in docs/how-to/sglang.md has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of as sections_of
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_context, get_device, get_parallel, get_server_args, process_model_config
from sglang.srt.server_args import ServerArgs

from tiered_kv.errors import ConfigError
from tiered_kv.integrations.environment import computing_packages, counting_variables, instruction_sets
from tiered_kv.integrations.hf_config import depends_on_length, without_origin
from tiered_kv.integrations.sglang.irrelevant import SETTINGS, VARIABLES
from tiered_kv.integrations.sglang.settings import LOCATION
from tiered_kv.integrations.user_namespace import UserModelNamespace
from tiered_kv.integrations.weight_files import content_of, weights_in_files

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
"""Packages, and modules without a package, that count beside those that `computing_packages` finds by metadata."""

_PLUGINS = re.compile(r"^sglang\.")
"""Groups of entry points whose packages count: they bring models, platforms, hooks."""

_VARIABLES = re.compile(
    "^(SGLANG|SGL|AITER|ASCEND_USE|CK|CUBLAS|CUBLASLT|CUTE_DSL|DEEP_NORMAL|DG|DNNL|FA|FLA|FLASHINFER|FLASH_ATTENTION|FLYDSL|"
    "FMHA|GDN|HIPBLASLT|HUMMING|MINIMAX|NVTE|ONEDNN|QUACK|ROCBLAS|ROCM_QUICK_REDUCE|TILELANG|TRITON|TRTLLM|USE_AITER|"
    "USE_ROCM|USE_TRITON)_|"
    "^(ATEN_CPU_CAPABILITY|IS_H200|NVIDIA_TF32_OVERRIDE|TIMM_FUSED_ATTN|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    "VIDEO_MAX_PIXELS|XHS_VIDEO_JPEG_QUALITY)$"
)
"""Variables that count, of SGLang and of the libraries that it computes with, unless `irrelevant` names them."""


def model_path() -> str:
    """Return the name or path of the engine's model."""
    return str(get_context().config_bag("model").model_path)


def engine_facts(user: UserModelNamespace) -> dict[str, str]:
    """Return what the namespace has to hold of the engine beside what HiCache and its host pools report, by name."""
    config = process_model_config()
    if _value("enable_lora", "lora"):
        user.check_adapters("SGLang", _NAMESPACE)
    sections: dict[str, object] = {"hf_config": _model(config)}
    is_drafting = _has_draft()
    for name, path in sorted(sections_of(ServerArgs).items()):
        section = path.partition(".")[0]
        if name not in SETTINGS.get(section, ()) and (section != "spec" or is_drafting):
            values = sections.setdefault(section, {})
            assert isinstance(values, dict)
            value = _value(name, path)
            values[name] = content_of(value) or value
    variables = counting_variables(_VARIABLES, VARIABLES)
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
    """Return what SGLang chooses kernels by."""
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


def _plain(value: Any) -> object:  # Any: whatever a configuration holds
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (torch.dtype, type)):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")
