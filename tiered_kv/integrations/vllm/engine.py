"""What shapes the bytes of an engine's blocks, from vLLM's whole configuration.

Everything counts that is not known to be irrelevant, so what a later vLLM adds counts by default. Of what decides
neither bytes nor layout (memory, scheduling, serving, sampling, compilation) the names are listed here. The table in
docs/how-to/vllm.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config.utils import normalize_value
from vllm.platforms import current_platform

from tiered_kv.errors import ConfigError
from tiered_kv.integrations.hf_config import depends_on_length, without_origin
from tiered_kv.integrations.user_namespace import UserModelNamespace
from tiered_kv.integrations.versions import installed_versions
from tiered_kv.integrations.weight_files import weights_in_files

LOCATION = "namespace"
"""Path of the user's part of the namespace, for messages."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IRRELEVANT_SECTIONS = _names(
    """
    scheduler_config offload_config structured_outputs_config reasoning_config watermark_config observability_config
    logging_config profiler_config watchdog_config aux_output_config instance_id shutdown_timeout
    kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
    compilation_config optimization_level performance_mode
    quant_config device_config load_config weight_transfer_config
    """
)
"""Sections that do not count: memory, scheduling, serving, sampling and observing; other transfers, and this one; how
kernels are made, which changes the last bits of a value and not its meaning. `quant_config` is made from what counts,
and `_platform`, `_weights` and `_check_user_namespace` cover the last three."""

_IRRELEVANT: Mapping[str, frozenset[str]] = {
    section: _names(names)
    for section, names in {
        # The model's origin, which `_weights` has; its length, which `depends_on_length` decides; `hf_overrides`, whose
        # result counts. Then what concerns tokens, which the hashes cover; logits, samples and pools; serving, memory.
        "model_config": """
            model model_weights revision hf_config_path config_format hf_token max_model_len
            spec_target_max_model_len seed hf_overrides
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds
            allowed_local_media_path allowed_media_domains renderer_num_workers io_processor_plugin
            max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay generation_config
            override_generation_config logits_processors pooler_config word_embeddings_untied_by_checkpoint
            served_model_name allow_deprecated_quantization enforce_eager disable_cascade_attn enable_sleep_mode
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend
            enable_cumem_allocator""",
        "multimodal_config": """
            limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
            mm_ipc_gpu_memory_gb mm_tensor_ipc mm_encoder_tp_mode mm_encoder_fp8_scale_save_path
            mm_encoder_fp8_scale_save_margin skip_mm_profiling""",
        # The last line derives from the groups, which count, where an engine has got that far.
        "cache_config": """
            gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
            kv_cache_size_tokens kv_cache_max_concurrency kv_offloading_size kv_offloading_backend
            simple_cpu_offload_num_blocks enable_prefix_caching prefix_cache_retention_interval
            enable_mamba_shared_prefix_checkpoint user_specified_block_size _block_size_resolved
            kv_cache_layout effective_attention_block_size hash_block_size cache_hit_alignment_tokens""",
        "attention_config": """
            flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph
            tokenspeed_mla_min_split_kv""",
        # What is left chooses a backend, and with it the type in which a quantized layer computes.
        "kernel_config": """
            ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
            enable_jit_warmup""",
        "lora_config": "max_loras max_cpu_loras max_lora_rank fully_sharded_loras specialize_active_lora",
        "speculative_config": "target_model_config target_parallel_config draft_parallel_config enforce_eager",
    }.items()
}
"""Fields that do not count, by section."""

_PARALLEL = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size", "worker_cls")
"""What counts of `parallel_config` beside the sizes that vLLM's summary has; the rest places processes."""

_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "npcache", "pt", "mistral", "runai_streamer"}
)
"""Load formats that read the files of the model's directory or repository."""

_PACKAGES = ("flashinfer-python", "flash-attn", "flash-attn-3", "flash-attn-4", "amd-aiter", "aiter")
"""Libraries of kernels, by which vLLM chooses the attention's backend, and so how a page is packed."""

_VARIABLES = re.compile(
    "ATTN|ATTENTION|AITER|MLA_|LAYOUT|KV_CACHE|SSM|GDN|QUANT|DTYPE|PRECISION|FP8|FP4|INT4|E8M0|ROUTING"
)
"""Those of vLLM's environment variables that choose the backend, a page's layout, or in which type and by which experts
layers compute, by their names."""

_current: ContextVar[tuple[Any, Any] | None] = ContextVar("tiered_kv_engine", default=None)


@contextmanager
def configured(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """Let `engine_facts` see an engine's configuration, in this thread and for as long as the context lasts."""
    token = _current.set((vllm_config, kv_cache_config))
    try:
        yield
    finally:
        _current.reset(token)


def engine_facts(user: UserModelNamespace) -> dict[str, str]:
    """Return what the namespace has to hold of the engine beside vLLM's summary, by name."""
    found = _current.get()
    if found is None:
        raise ConfigError(
            "vLLM's OffloadingConnector does not report what shapes a block; write "
            '"kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv.integrations.vllm"',
            location="kv_transfer_config",
        )
    config, kv_cache = found
    _check_user_namespace(config, user)
    sections = {"kv_cache": [_spec(group) for group in kv_cache.kv_cache_groups], **_sections(config)}
    sections["parallel_config"] = {name: getattr(config.parallel_config, name, None) for name in _PARALLEL}
    sections["variables"] = {
        name: read() for name, read in sorted(envs.environment_variables.items()) if _VARIABLES.search(name)
    }
    facts = {
        "vllm": str(vllm.__version__),
        "platform": _platform(),
        "libraries": installed_versions(_PACKAGES),
        "runner": "v2" if config.use_v2_model_runner else "v1",
        "weights": _weights(config.model_config, config.load_config, user),
        **{f"vllm.{name}": _digest(name, value) for name, value in sections.items()},
    }
    draft = config.speculative_config
    if _has_draft(draft):
        facts["draft"] = _weights(draft.draft_model_config, draft.draft_load_config or config.load_config, user)
    return facts


def _check_user_namespace(config: Any, user: UserModelNamespace) -> None:
    if config.lora_config is not None:
        user.check_adapters("vLLM", LOCATION)
    if config.weight_transfer_config is not None and user.revision is None:
        raise ConfigError(
            "the engine's weights are replaced while it runs (weight_transfer_config), and no file has them; "
            'name the run by "revision" here, a new one for every start',
            location=LOCATION,
        )


def _sections(config: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in (each.name for each in dataclasses.fields(config)):
        value = getattr(config, name)
        if name in _IRRELEVANT_SECTIONS or name == "parallel_config" or value is None:
            continue
        if name == "model_config":
            found[name] = _model(value)
        elif name == "speculative_config":
            if _has_draft(value):
                found[name] = {**_counting_fields(name, value), "draft_model_config": _model(value.draft_model_config)}
        else:
            found[name] = _counting_fields(name, value)
    return found


def _counting_fields(section: str, value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    names = (each.name for each in dataclasses.fields(value))
    return {name: getattr(value, name, None) for name in names if name not in _IRRELEVANT.get(section, ())}


def _model(config: Any) -> dict[str, object]:
    counting: dict[str, object] = _counting_fields("model_config", config)
    for name in ("hf_config", "hf_text_config"):
        counting[name] = without_origin(getattr(config, name).to_dict())
    counting["multimodal_config"] = _counting_fields("multimodal_config", config.multimodal_config)
    if depends_on_length(
        counting["hf_config"],
        getattr(config.hf_text_config, "model_type", ""),
        is_foreign_code=config.trust_remote_code or str(config.model_impl) not in ("auto", "vllm"),
    ):
        counting["max_model_len"] = config.max_model_len
    return counting


def _has_draft(config: Any) -> bool:
    """Return whether a draft model adds layers; ngram and suffix decoding have the target's."""
    draft = None if config is None else config.draft_model_config
    return draft is not None and draft is not config.target_model_config


def _weights(model: Any, load: Any, user: UserModelNamespace) -> str:
    load_format = str(load.load_format)
    if load_format == "dummy":
        return f"dummy {model.seed}"
    if load_format in _FILE_FORMATS and not model.model_weights:
        commit = None if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
        found = weights_in_files(model.model, commit, f"{load_format} {load.ignore_patterns}")
        if found is not None:
            return found
    return user.named_weights("vLLM", model.model_weights or model.model, load_format, LOCATION)


def _spec(group: Any) -> dict[str, object]:
    """Return how a group's layers keep their states; a worker may have a spec a layer where the scheduler has one."""
    spec = group.kv_cache_spec
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    fields = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    return {"class": type(spec), **{name: str(value) for name, value in fields.items()}}


def _platform() -> str:
    """Return what vLLM chooses kernels by, and with them the layout within a page."""
    platform = current_platform
    name = str(getattr(platform, "device_name", None) or platform.device_type)
    if platform.is_cpu():
        capabilities = torch.cpu.get_capabilities()
        flags = sorted(flag for flag, is_there in capabilities.items() if is_there is True)
        return f"{name} {capabilities['architecture']} {_digest('capabilities', flags)}"
    capability = platform.get_device_capability()
    return name if capability is None else f"{name} {capability.major}.{capability.minor}"


def _digest(name: str, value: object) -> str:
    try:
        text = json.dumps(normalize_value(value), sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"vLLM's {name} has a value without a stable text: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tiered-kv-vlm-v1").hexdigest()
