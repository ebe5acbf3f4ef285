"""Which blocks of a vLLM engine are interchangeable: the namespace.

vLLM's summary for an offloading backend has the model's name, the data type, the layout, the groups and the parallel
sizes. The rest comes from its whole configuration, by `engine_facts`; what even that does not have, the user says.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

from tiered_kv.config.namespace import Namespace, Parallel
from tiered_kv.config.validation import suggestion, validate
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.vllm.engine import LOCATION, engine_facts

OWN_FIELDS = ("model", "revision", "quantization", "tenant", "hash_algorithm", "extra")
"""What a configuration may say of the namespace; the rest is vLLM's to say."""

ROW_LAYOUT = "tiered-kv-1"
"""How our worker lays a chunk out in a row of the primary tier."""
VLLM_ROW_LAYOUT = "vllm-direct"
"""How vLLM's own worker does."""

REPLICA_VARIABLE = "TIERED_KV_REPLICA"
"""In a stack or tier of ours, `${TIERED_KV_REPLICA}` is the index of the data-parallel replica that opens it."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pipeline stage has of the model: its layers, and for each KV cache group what it holds of them."""

    layers: int
    groups: tuple[str, ...]


def stage_of(config: Any) -> Stage:  # Any: vLLM's OffloadingConfig
    """Return the stage that a process knows: a worker its own, and the scheduler that of worker 0."""
    return Stage(sum(len(group.layer_names) for group in config.groups), tuple(map(_describe, config.groups)))


def environment(config: Any) -> dict[str, str]:  # Any: vLLM's OffloadingConfig
    """Return the variables that a stack's texts may name: those of the process, and the replica's index."""
    return {**os.environ, REPLICA_VARIABLE: str(config.parallel.data_parallel_index)}


def namespace_of(config: Any, said: object, *, row_layout: str, stages: Sequence[Stage] = ()) -> Namespace:
    """Return the namespace of an engine's blocks.

    Args:
        config: vLLM's `OffloadingConfig`.
        said: What the user's configuration says of it: a mapping of some of `OWN_FIELDS`, or None.
        row_layout: How the worker lays a chunk out in a row.
        stages: All pipeline stages in their order; by default there is one, that of `config`.

    Raises:
        ConfigError: `said` cannot be used, or has to say more.
    """
    own = _own_fields(said)
    extra = own.pop("extra", {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"expected a mapping, found {extra!r}", location=f"{LOCATION}.extra")
    stages = stages or [stage_of(config)]
    told = {
        **engine_facts(own | {"extra": extra}),
        "engine": "vllm",
        "rows": row_layout,
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "canonical": str(bool(config.canonical_layout)).lower(),
        "replicated": str(bool(config.replicated_layout)).lower(),
    }
    taken = sorted(set(map(str, extra)) & set(told))
    if taken:
        raise ConfigError(f"vLLM tells '{taken[0]}'; choose another name", location=f"{LOCATION}.extra")
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
        **own,
        "extra": {**extra, **told},
    }
    return validate(Namespace, fields, (LOCATION,))


def chunk_tokens(config: Any) -> int:  # Any: vLLM's OffloadingConfig
    """Return how many tokens a chunk of the first group holds."""
    return int(config.groups[0].tokens_per_block * config.cache.blocks_per_chunk)


def _own_fields(said: object) -> dict[str, object]:
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise ConfigError(f"expected a mapping, found {said!r}", location=LOCATION)
    for name in said:
        if name not in OWN_FIELDS:
            known = ", ".join(OWN_FIELDS)
            hint = suggestion(str(name), OWN_FIELDS) or "; vLLM tells the rest of it"
            raise ConfigError(f"'{name}' cannot be set here{hint}; what can: {known}", location=LOCATION)
    return dict(said)


def _describe(group: Any) -> str:  # Any: vLLM's OffloadingGroupConfig
    names = hashlib.blake2b("\n".join(group.layer_names).encode(), digest_size=8).hexdigest()
    return f"{group.group_id}: {group.tokens_per_block} tokens, {len(group.layer_names)} layers {names}"


_NOT_TOLD = object()


def check_chunks(config: Any) -> None:  # Any: vLLM's OffloadingConfig
    """Raise ConfigError for chunks of several blocks where vLLM may leave out blocks of a chunk.

    vLLM drops the blocks that a sliding window or a state no longer needs, and does not say which places of a chunk the
    others fill. 0.33 tells which groups have a window. 0.32 does not, so several groups are refused there. One group of
    windows alone is not known at start; the worker refuses its first store that does not fill its rows.
    """
    if config.cache.blocks_per_chunk == 1:
        return
    windows = [getattr(group, "sliding_window_size_in_chunks", _NOT_TOLD) for group in config.groups]
    is_refused = len(windows) > 1 if _NOT_TOLD in windows else any(window is not None for window in windows)
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
    So blocks could be mixed up within the engine, and between engines that cut a model into other stages.
    """
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"found {config.parallel.pp_size} pipeline stages: vLLM's tiering does not tell a tier the layers of all "
            "stages, nor make their rows agree; use TieredKVOffloadingSpec, which does",
            location="kv_connector_extra_config.spec_name",
        )
