"""Which blocks of a vLLM engine are interchangeable: the namespace.

vLLM's summary for an offloading backend has the model's name, the data type, the layout, the groups and the parallel
sizes. `engine_facts` takes the rest from its whole configuration. The user says what that does not have.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

from tiered_kv.config.namespace import Label, Namespace, Parallel
from tiered_kv.config.validation import validate
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.user_namespace import UserModelNamespace
from tiered_kv.integrations.vllm.engine import LOCATION, engine_facts

ROW_LAYOUT = "tiered-kv-1"
"""How our worker lays out a chunk in a row of the primary tier."""
VLLM_ROW_LAYOUT = "vllm-direct"
"""How vLLM's own worker does."""

REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""In a stack or tier, `${TIERED_KV_REPLICA}` is the index of the data-parallel replica that opens it."""

_CAN_BE_SET = "model, revision, quantization, tenant, hash_algorithm, extra"


class VllmNamespace(UserModelNamespace):
    """What a configuration may say of the namespace."""

    unknown_key_hints: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dtype", "layout", "hash_seed", "layers", "groups", "parallel"),
        f"vLLM sets it; known keys: {_CAN_BE_SET}",
    )

    hash_algorithm: Label | None = Field(default=None, description="What vLLM hashes tokens with.")


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pipeline stage has of the model: its layers, and a text for each of its KV cache groups."""

    layers: int
    groups: tuple[str, ...]


def stage_of(config: Any) -> Stage:  # Any: vLLM's OffloadingConfig
    """Return the stage that a process knows: a worker's own, and in the scheduler that of worker 0."""
    return Stage(sum(len(group.layer_names) for group in config.groups), tuple(map(_describe, config.groups)))


def environment(config: Any) -> dict[str, str]:  # Any: vLLM's OffloadingConfig
    """Return the variables that a stack's texts may name: those of the process, and the replica's index."""
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
        stages: All pipeline stages in their order; by default that of `config` alone.
    """
    user = validate(VllmNamespace, {} if said is None else said, (LOCATION,))
    stages = stages or [stage_of(config)]
    facts = {
        **engine_facts(user),
        "engine": "vllm",
        "rows": row_layout,
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "canonical": str(bool(config.canonical_layout)).lower(),
        "replicated": str(bool(config.replicated_layout)).lower(),
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
        ),
    }
    return user.complete("vLLM", fields, facts, (LOCATION,))


def chunk_tokens(config: Any) -> int:  # Any: vLLM's OffloadingConfig
    """Return how many tokens a chunk of the first group holds."""
    return int(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)


def _describe(group: Any) -> str:  # Any: vLLM's OffloadingGroupConfig
    names = hashlib.blake2b("\n".join(group.layer_names).encode(), digest_size=8).hexdigest()
    return f"{group.group_id}: {group.tokens_per_block} tokens, {len(group.layer_names)} layers {names}"


_UNKNOWN = object()


def check_chunks(config: Any) -> None:  # Any: vLLM's OffloadingConfig
    """Raise ConfigError for chunks of several blocks where vLLM may store parts of a chunk.

    vLLM leaves out the blocks that a sliding window or a state no longer needs, and does not say which places of a
    chunk the others fill. vLLM 0.33 reports which groups have a window. 0.32 does not, so several groups are refused
    there. One group of windows is not known at start; the worker refuses its first store that does not fill its rows.
    """
    if config.cache.blocks_per_chunk == 1:
        return
    windows = [getattr(group, "sliding_window_size_in_chunks", _UNKNOWN) for group in config.groups]
    is_refused = len(windows) > 1 if _UNKNOWN in windows else any(window is not None for window in windows)
    if is_refused:
        raise ConfigError(
            f"found chunks of {config.cache.blocks_per_chunk} blocks, and KV cache groups with sliding windows or "
            "states, of which vLLM stores parts of chunks: rows would keep bytes of other blocks; leave out "
            "blocks_per_chunk and block_size",
            location="kv_connector_extra_config",
        )


def check_stages(config: Any) -> None:  # Any: vLLM's OffloadingConfig
    """Raise ConfigError for pipeline stages below vLLM's own tiering.

    There each process computes the size of a row from its own layers, and a tier learns the layers of worker 0 alone.
    So blocks could be mixed up within the engine, and between engines with other stages.
    """
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"found {config.parallel.pp_size} pipeline stages: vLLM's tiering does not report the layers of all "
            "stages to a tier, nor make their rows agree; use TieredKVOffloadingSpec, which does",
            location="kv_connector_extra_config.spec_name",
        )
