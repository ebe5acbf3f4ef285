"""What shapes the bytes of an engine's pages, from SGLang's whole configuration.

SGLang sorts its settings by what they are for. Of those that concern the model and how it is computed, everything
counts that is not known to be irrelevant. The table in docs/how-to/sglang.md has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import os
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
from tiered_kv.integrations.hf_config import depends_on_length, without_origin
from tiered_kv.integrations.sglang.settings import LOCATION
from tiered_kv.integrations.user_namespace import UserModelNamespace
from tiered_kv.integrations.versions import installed_versions
from tiered_kv.integrations.weight_files import files_digest, weights_in_files

_NAMESPACE = f"{LOCATION}.namespace"

_SECTIONS = ("model", "exec", "mm", "spec")
"""Sections of settings that count. The others are about places, memory, scheduling, serving and observing; about other
transfers; and about adapters, which `check_adapters` covers. What they change in a page shows in the host pools."""

_IRRELEVANT = re.compile(
    # The model's origin and length, which `_weights` and `_model` have; how its files are read.
    "model_path|revision|load_format|context_length|is_embedding|json_model_override_args|dtype|decrypted_.*|"
    "modelopt_.*_save_path|modelopt_export_path|startup_weight_load_mode|weight_loader_.*|remote_instance_.*|engine_info_.*|modelexpress_config|"
    "download_dir|model_checksum|delete_ckpt_after_loading|checkpoint_engine_.*|weight_cache_.*|model_loader_extra_config|"
    # What is done with logits and hidden states, and with tokens, which the hashes cover.
    "enable_fp32_lm_head|enable_custom_logit_processor|.*watermark.*|.*return_.*|aux_hidden_state_capture|sampling_.*|"
    "grammar_backend|disable_outlines_disk_cache|"
    # Memory, graphs and compilation, tuning, places of experts, communication.
    "enable_memory_saver|.*weights_cpu_backup|.*cuda_?graph.*|enable_torch_compile.*|torch_compile_.*|"
    ".*flashinfer_autotune.*|enable_layerwise_nvtx_marker|enable_nccl_nvls|enable_symm_mem|enable_torch_symm_mem|"
    "disable_custom_all_reduce|enable_mscclpp|pre_warm_nccl|ep_num_redundant_experts|init_expert_location|.*eplb.*|"
    "expert_distribution_.*|expert_balancedness_.*|.*elastic_e.*|mooncake_ib_device|ep_join_mode|is_ep_.*|cpu_offload_gb|"
    "offload_.*|ple_offload_.*|kt_cpuinfer|kt_threadpool_count|paged_experts_num_resident|"
    # Images: how many at a time, from where, by whom.
    "mm_.*_worker_num|allowed_media_domains|media_url_.*|mm_preprocess_cache_.*|limit_mm_.*|.*mm_global_cache.*|"
    "mm_feature_transport|enable_broadcast_mm_.*|enable_prefix_mm_cache|"
    # Which drafts are accepted.
    "speculative_accept_.*|speculative_use_.*|speculative_num_.*|speculative_eagle_topk|speculative_draft_model_path|"
    "speculative_draft_model_revision|speculative_draft_load_format|spec_trace_dir|speculative_ngram_.*|"
    "speculative_adaptive.*"
)
"""Settings within those sections that do not count."""

_OTHERS = (
    "forward_hooks",
    "weight_version",
    "cp_strategy",
    "enable_prefill_cp",
    "enable_cp_tp_group_sharing",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
)
"""What counts of other sections. Hooks may change what layers compute; HiCache reports the sizes of `parallel`."""

_FILES = ("quantization_param_path", "kt_weight_path", "modelopt_checkpoint_restore_path")
"""Settings that name files beside the model's, of which the content counts: scales, and weights."""

_FILE_FORMATS = frozenset({"auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors", "runai_streamer"})
"""Load formats that read the files of the model's directory or repository."""

_PACKAGES = ("sgl-kernel", "sglang-kernel", "flashinfer-python", "flash-attn", "flash-attn-4", "amd-aiter", "aiter")

_VARIABLES = re.compile(
    "ATTN|ATTENTION|AITER|MLA|LAYOUT|KV|SSM|MAMBA|GDN|QUANT|DTYPE|PRECISION|FP8|FP4|FP32|F16|INT8|INT4|W4A|E8M0|ROUT|DSV4|"
    "DSA|MSA|ROPE|SOFTMAX|DENSE|SPARSE|TOPK|IMAGE|RESAMPLE|EXTERNAL|PLUGINS"
)
"""Those of SGLang's environment variables that choose how a page is laid out, how exactly and in which type layers
compute, how images are processed, and whose code it is."""


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
        counts = section in _SECTIONS and not _IRRELEVANT.fullmatch(name)
        if (counts and (section != "spec" or is_drafting)) or name in _OTHERS:
            values = sections.setdefault(section, {})
            assert isinstance(values, dict)
            value = _value(name, path)
            values[name] = (files_digest(str(value)) or value) if value and name in _FILES else value
    sections["variables"] = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("SGLANG_", "FLASHINFER_", "DEEP_NORMAL_", "USE_")) and _VARIABLES.search(name)
    }
    return {
        "sglang": str(sglang.__version__),
        "dtype": str(config.dtype),
        "platform": _platform(),
        "libraries": installed_versions(_PACKAGES),
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
