"""Which pages of an SGLang engine are interchangeable: the namespace of each host pool's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from tiered_kv.config.namespace import Namespace, Parallel
from tiered_kv.direct.settings import OWN_STORAGE
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.sglang.engine import model_path
from tiered_kv.integrations.sglang.pools import PagePool
from tiered_kv.integrations.sglang.settings import LOCATION, RANK_VARIABLE, REPLICA_VARIABLE, HiCacheSettings

_GEOMETRY = ("start_layer", "end_layer", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")
"""Attributes that host pools may have for their layers and heads."""


def process_variables() -> tuple[dict[str, str], dict[str, int]]:
    """Return the variables that identify an engine's process: their values here, and the numbers of processes."""
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
        if tier.type in OWN_STORAGE:
            raise ConfigError(
                f"found '{tier.type}', whose storage belongs to one process. The pages of this model are the same on "
                f"all {config.tp_size} tensor parallel ranks: SGLang stores them on the first and loads them on all. "
                "Use tiers that ranks share, such as fs, redis and s3",
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

    Replicas of a pool within the tensor parallel group are one part: SGLang stores them once. That is so in models with
    latent attention, but for states.
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
