"""The namespace of an engine's blocks: everything in vLLM's whole configuration that shapes their bytes.

The spec asks for it while it opens, in the scheduler and in each worker, which must get the same namespace. Everything
counts that is not an ignored setting: settings, variables of the environment, packages. So an addition of a later vLLM
counts by default. `ignored_settings.toml` names the rest. The page docs/reference/namespaces.md lists all.

vLLM's summary for an offloading backend has the model's name, the data type, the layout, the groups and the parallel
sizes. `engine_facts` takes more from vLLM's whole configuration. The user's `namespace` gives the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import vllm
from pydantic import Field
from vllm.config.utils import normalize_value
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import iter_layer_specs

from tiered_kv.config.namespace import Label, Namespace, Parallel
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
from tiered_kv.engines.settings import UserModelNamespace
from tiered_kv.errors import ConfigError

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
"""Packages, and modules without a package, that count besides the packages that `computing_packages` finds."""

_PLUGINS = re.compile(r"^vllm\.(?!stat_logger_plugins$|endpoint_plugins$|io_processor_plugins$|logits_processors$)")
"""Groups of entry points whose packages count: they bring models, platforms, kernels. Others serve and observe."""

_VARIABLES = re.compile(
    "^(VLLM|AITER|B12X|CK|CUBLAS|CUBLASLT|CUTE_DSL|DG|DNNL|FA|FLA|FLASHINFER|FLASH_ATTENTION|FLYDSL|FMHA|GDN|"
    "HIPBLASLT|HUMMING|INKLING|LAMPORT|MINIMAX|MM_SPARSE_ATTN|MSA|NVTE|ONEDNN|QUACK|ROCBLAS|TILELANG|TRITON|TRTLLM|XPU)_|"
    "^(ATEN_CPU_CAPABILITY|FORCE_NUM_KV_SPLITS|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|"
    "USE_DEFAULT_FLA_NORM|USE_FLAGOS|XHS_VIDEO_JPEG_QUALITY)$"
)
"""Variables of vLLM and of its computing libraries that count, unless `ignored_settings.toml` names them."""

IGNORED = ignored_settings(Path(__file__).parent)

current_engine: ContextVar[tuple[Any, Any] | None] = ContextVar("tiered_kv_engine", default=None)
"""vLLM's whole configuration and the one of its KV caches, within `configured`; else None."""
ROW_LAYOUT = "tiered-kv-1"
"""How our worker lays out a chunk in a row of the primary tier."""
VLLM_ROW_LAYOUT = "vllm-direct"
"""How vLLM's own worker lays out a chunk."""
REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""In a stack or tier, `${TIERED_KV_REPLICA}` is the index of the data-parallel replica that opens it."""
_OF_ONE_RANK = {"num_kv_heads", "num_head_slots", "page_size_padded"}
"""Fields of a layer's cache that depend on the number of ranks. The model's configuration has all heads."""
_CAN_BE_SET = "model, revision, quantization, tenant, hash_algorithm, extra"


@contextmanager
def configured(vllm_config: Any, kv_cache_config: Any) -> Iterator[None]:
    """Let `engine_facts` see an engine's configuration, in this thread and for as long as the context lasts."""
    token = current_engine.set((vllm_config, kv_cache_config))
    try:
        yield
    finally:
        current_engine.reset(token)


def run_name(config: Any) -> str:  # Any: vLLM's OffloadingConfig
    """Return a name of this run of an engine, the same in its scheduler and its workers.

    Users may give each run the same `engine_id`. The `instance_id` is new for each run, and reaches every process.
    """
    found = current_engine.get()
    instance = "" if found is None else str(getattr(found[0], "instance_id", ""))
    return f"{config.engine_id}-{instance}"


def engine_facts(user: UserModelNamespace, *, is_canonical: bool = False) -> dict[str, str]:
    """Return the engine's facts that the namespace needs beside vLLM's summary, by name.

    With a canonical layout, facts that only say how the model is split are left out.
    """
    found = current_engine.get()
    if found is None:
        raise ConfigError(
            "vLLM's OffloadingConnector does not report what shapes a block; write "
            '"kv_connector": "TieredKVConnector", "kv_connector_module_path": "tiered_kv_vllm"',
            location="kv_transfer_config",
        )
    config, kv_cache = found
    _check_user_namespace(config, user)
    kept = [_spec(group, is_canonical=is_canonical) for group in kv_cache.kv_cache_groups]
    sections = {"kv_cache": kept, **_sections(config)}
    variables = counting_variables(_VARIABLES, IGNORED.variables)
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
    user.check_attention("vLLM", config.model_config.hf_text_config.to_dict(), LOCATION)
    if config.lora_config is not None:
        user.check_adapters("vLLM", LOCATION)
    if config.weight_transfer_config is not None and user.revision is None:
        raise ConfigError(
            "the engine's weights are replaced while it runs (weight_transfer_config), and no file has them; "
            'name the run by "revision" here, a new one for every start',
            location=LOCATION,
        )


def _sections(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}  # Any: as JSON
    for name in (each.name for each in dataclasses.fields(config)):
        value = getattr(config, name)
        if name in IGNORED.sections or value is None:
            continue
        if name == "model_config":
            found[name] = _model(value)
        elif name == "speculative_config":
            if _has_draft(value):
                found[name] = {**_counting_fields(name, value), "draft_model_config": _model(value.draft_model_config)}
                if value.draft_tensor_parallel_size == config.parallel_config.tensor_parallel_size:
                    del found[name]["draft_tensor_parallel_size"]  # vLLM's summary has it where it shapes the bytes
        else:
            found[name] = _counting_fields(name, value)
    return found


def _counting_fields(section: str, value: Any) -> Any:
    if not dataclasses.is_dataclass(value):
        return value
    fields = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
    return {name: content_of(each) or each for name, each in fields.items() if IGNORED.counts(section, name)}


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
    """Return whether a draft model adds layers. With ngram and suffix decoding, the draft is the target."""
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


def _spec(group: Any, *, is_canonical: bool) -> dict[str, object]:
    """Return how a group's layers keep states. A worker may have a spec for each layer, the scheduler one for all."""
    spec = group.kv_cache_spec
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    names = {each.name for each in dataclasses.fields(spec)} - (_OF_ONE_RANK if is_canonical else set())
    fields = {name: getattr(spec, name) for name in names}
    return {"class": type(spec), **{name: str(value) for name, value in fields.items()}}


def _platform() -> str:
    """Return the hardware by which vLLM chooses kernels, and with them the layout within a page."""
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


class VllmNamespace(UserModelNamespace):
    """The part of the namespace that a user may set."""

    unknown_key_advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dtype", "layout", "hash_seed", "layers", "groups", "parallel"),
        f"vLLM sets it; known keys: {_CAN_BE_SET}",
    )

    hash_algorithm: Label | None = Field(default=None, description="What vLLM hashes tokens with.")


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage's share of the model: its layers, and a text for each of its KV cache groups."""

    layers: int
    groups: tuple[str, ...]


def stage_of(config: Any) -> Stage:  # Any: vLLM's OffloadingConfig
    """Return the stage that a process knows: a worker's own, and in the scheduler the stage of worker 0."""
    return Stage(sum(len(group.layer_names) for group in config.groups), tuple(map(_describe, config.groups)))


def environment(config: Any) -> dict[str, str]:  # Any: vLLM's OffloadingConfig
    """Return the variables that a stack's texts may name: the process's, and the replica's index."""
    return {**os.environ, REPLICA_VARIABLE: str(config.parallel.data_parallel_index)}


def namespace_of(
    config: Any,  # Any: vLLM's OffloadingConfig
    said: object,
    *,
    row_layout: str,
    stages: Sequence[Stage] = (),
) -> Namespace:
    """Return the namespace of an engine's blocks.

    Args:
        said: The `namespace` of the user's configuration, or None.
        stages: All pipeline stages in their order; by default the stage of `config` alone.
    """
    user = validate(VllmNamespace, {} if said is None else said, (LOCATION,))
    stages = stages or [stage_of(config)]
    facts = {
        **engine_facts(user, is_canonical=config.canonical_layout),
        "engine": "vllm",
        "rows": row_layout,
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "canonical": str(bool(config.canonical_layout)).lower(),
        "parts": "one for all ranks" if has_one_part(config) else "one for each rank",
    }
    parallel = config.parallel
    fields = {
        "model": config.model.name,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout or "default",
        "hash_algorithm": "vllm",
        "hash_seed": os.environ.get("PYTHONHASHSEED", DEFAULT_NONE_HASH_SEED),
        "layers": sum(stage.layers for stage in stages),
        "groups": tuple(
            group if len(stages) == 1 else f"stage {number}, {group}"
            for number, stage in enumerate(stages)
            for group in stage.groups
        ),
        "parallel": Parallel(
            tensor=parallel.tp_size,
            pipeline=parallel.pp_size,
            decode_context=parallel.dcp_size,
            prefill_context=parallel.pcp_size,
            same_bytes_on_every_rank=has_one_part(config),
        ),
    }
    return user.complete("vLLM", fields, facts, (LOCATION,))


def has_one_part(config: Any) -> bool:  # Any: vLLM's OffloadingConfig
    """Return whether a row has one part for all tensor parallel ranks, with the same bytes for any number of ranks.

    It has one with a canonical layout, and if vLLM finds that all ranks have the same bytes. A single rank has them if
    all of its layers are latent.
    """
    if config.canonical_layout or config.replicated_layout:
        return True
    specs = layer_specs()
    return config.parallel.world_size == 1 and bool(specs) and all(map(_is_latent, specs))


def canonical_shards(config: Any) -> int:  # Any: vLLM's OffloadingConfig
    """Return how many ranks' pages make up a canonical page.

    Raises:
        ConfigError: vLLM has no canonical layout for the model or its split.
    """
    parallel, specs = config.parallel, layer_specs()
    found = current_engine.get()
    heads = 0 if found is None else found[0].model_config.get_total_num_kv_heads()
    shards = {1 if _is_latent(each) else min(parallel.tp_size, heads) for each in specs}
    if not parallel.is_parallelism_agnostic or parallel.world_size != parallel.tp_size or len(shards) != 1:
        raise ConfigError(
            "vLLM has no canonical layout for this model and split: it has none for recurrent states, pipeline stages, "
            "context parallelism, scales of tokens, and latent attention beside another; leave canonical_layout out",
            location="kv_connector_extra_config.canonical_layout",
        )
    return shards.pop()


def layer_specs() -> list[Any]:  # Any: vLLM's KVCacheSpec
    found = current_engine.get()
    groups = [] if found is None else found[1].kv_cache_groups
    return [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]


def _is_latent(spec: Any) -> bool:
    return getattr(spec, "max_tp_shards", None) == 1


def chunk_tokens(config: Any) -> int:  # Any: vLLM's OffloadingConfig
    """Return how many tokens a chunk of the first group holds."""
    return int(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)


def _describe(group: Any) -> str:  # Any: vLLM's OffloadingGroupConfig
    names = hashlib.blake2b("\n".join(group.layer_names).encode(), digest_size=8).hexdigest()
    return f"{group.group_id}: {group.tokens_per_block} tokens, {len(group.layer_names)} layers {names}"


def check_stages(config: Any) -> None:  # Any: vLLM's OffloadingConfig
    """Raise ConfigError for pipeline stages with vLLM's tiering: a tier learns only the layers of worker 0."""
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"found {config.parallel.pp_size} pipeline stages: vLLM's tiering does not report the layers of all "
            "stages to a tier, nor make their rows agree; use TieredKVOffloadingSpec, which does",
            location="kv_connector_extra_config.spec_name",
        )
