"""What shapes the bytes of an engine's blocks, from vLLM's whole configuration.

Everything counts that is not known to be irrelevant, so what a later vLLM adds counts by default: settings, variables
of the environment, packages. `irrelevant` names the rest. The table in docs/how-to/vllm.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import vllm
from vllm.config.utils import normalize_value
from vllm.platforms import current_platform

from tiered_kv.errors import ConfigError
from tiered_kv.integrations.environment import computing_packages, counting_variables, instruction_sets
from tiered_kv.integrations.model_files import content_of, depends_on_length, weights_in_files, without_origin
from tiered_kv.integrations.user_namespace import UserModelNamespace
from tiered_kv.integrations.vllm.irrelevant import FIELDS, SECTIONS, VARIABLES

LOCATION = "namespace"
"""Path of the user's part of the namespace, for messages."""


_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "npcache", "pt", "mistral", "runai_streamer"}
)
"""Load formats that read the files of the model's directory or repository."""

_PACKAGES = (
    "torch", "triton", "triton_kernels", "transformers", "torchao", "xformers", "bitsandbytes", "nvidia-modelopt",
    "deep-gemm", "deep-ep", "flashinfer", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-attn-4",
    "flash_attn_interface", "flash-mla", "vllm-flash-attn", "aiter", "amd-aiter", "tilelang", "nvidia-cutlass-dsl",
    "quack-kernels", "humming-kernels", "tokenspeed-mla", "compressed-tensors", "b12x", "helion", "hpc", "fla-core",
    "flydsl", "oink", "zentorch", "torch-npu", "torch-xla", "intel-extension-for-pytorch", "tpu-inference",
    "transformer-engine", "terratorch",
)  # fmt: skip
"""Packages, and modules without a package, that count beside those that `computing_packages` finds by metadata."""

_PLUGINS = re.compile(r"^vllm\.(?!stat_logger_plugins$|endpoint_plugins$|io_processor_plugins$|logits_processors$)")
"""Groups of entry points whose packages count: they bring models, platforms, kernels. Others serve and observe."""

_VARIABLES = re.compile(
    "^(VLLM|AITER|B12X|CK|CUBLAS|CUBLASLT|CUTE_DSL|DG|DNNL|FA|FLA|FLASHINFER|FLASH_ATTENTION|FLYDSL|FMHA|GDN|"
    "HIPBLASLT|HUMMING|INKLING|LAMPORT|MINIMAX|MM_SPARSE_ATTN|MSA|NVTE|ONEDNN|QUACK|ROCBLAS|TILELANG|TRITON|TRTLLM|XPU)_|"
    "^(ATEN_CPU_CAPABILITY|FORCE_NUM_KV_SPLITS|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    "USE_DEFAULT_FLA_NORM|USE_FLAGOS|XHS_VIDEO_JPEG_QUALITY)$"
)
"""Variables that count, of vLLM and of the libraries that it computes with, unless `irrelevant` names them."""

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
    variables = counting_variables(_VARIABLES, VARIABLES)
    sections["variables"] = variables
    facts = {
        "vllm": str(vllm.__version__),
        "platform": _platform(),
        "libraries": computing_packages(_PACKAGES, _PLUGINS),
        "variables": ", ".join(variables) or "none",  # a digest has their values, some of which may be secrets
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
        if name in SECTIONS or value is None:
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
    fields = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return {name: content_of(each) or each for name, each in fields.items() if name not in FIELDS.get(section, ())}


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
        return f"{name} {instruction_sets()}"
    capability = platform.get_device_capability()
    if capability is not None:
        return f"{name} {capability.major}.{capability.minor}"
    try:
        return f"{name} {platform.get_device_name()}"
    except NotImplementedError:
        return name


def _digest(name: str, value: object) -> str:
    try:
        text = json.dumps(normalize_value(value), sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"vLLM's {name} has a value without a stable text: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"tiered-kv-vlm-v1").hexdigest()
