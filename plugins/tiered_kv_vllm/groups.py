"""vLLM's KV cache groups: checks that refuse some, the group that is audited, and the caches of a worker.

A group has the layers that keep their states in one way: full attention, windows of one size, or recurrent states. The
connector, the specs and the adapter for vLLM's tiers call these functions while they open. Both the scheduler and the
workers do so, each on the engine's thread. Nothing here keeps a state. What must stay true: a group whose blocks could
be found with wrong bytes is refused with a `ConfigError` before the first block.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from tiered_kv.errors import ConfigError
from tiered_kv.tiering.audit.comparison import AuditedGroup
from tiered_kv.tiering.audit.manager import AuditedManager
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.worker.plan import offloaded_bytes
from tiered_kv_vllm.engine import canonical_shards, current_engine, layer_specs

_log = logging.getLogger(__name__)

_OFFLOADED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
"""Kinds of layers, subclasses included, for which vLLM's connector knows which blocks a request needs."""


def check_kinds() -> None:
    """Raise ConfigError for layers with which vLLM's connector would fail without a reason, or store wrong blocks.

    The connector knows no cross attention. It takes layers of R-SWA for full attention, but vLLM frees their blocks
    while the request runs. So a store could read bytes of the next request. vLLM itself leaves out the layers that take
    no part in prefix caching, and computes their states again.
    """
    others = [
        type(each).__name__
        for each in layer_specs()
        if each.prefix_cacheable and (not isinstance(each, _OFFLOADED) or isinstance(each, RSWASpec))
    ]
    if others:
        raise ConfigError(
            f"found layers of {', '.join(sorted(set(others)))}, whose blocks vLLM's connector cannot store; start this "
            "model without kv_transfer_config",
            location="kv_transfer_config",
        )


def check_groups(config: Any) -> None:  # Any: vLLM's OffloadingConfig
    """Raise ConfigError for KV cache groups whose blocks vLLM would store only in part, or would not find again.

    In a chunk of several blocks, vLLM leaves out the blocks that a sliding window or a state no longer needs. It does
    not say which places of the chunk the other blocks fill.
    """
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in layer_specs()):
        raise ConfigError(
            "vLLM keeps recurrent states at the ends of blocks only if it caches prefixes; add --enable-prefix-caching"
        )
    found = current_engine.get()
    if found is not None and getattr(found[1], "hisparse_host_num_blocks", None) is not None:
        raise ConfigError("with HiSparse, vLLM stores a part of each block only; start it without one of both")
    if found is not None and _loses_windows(*found):
        raise ConfigError("vLLM finds no window beside a draft; set --prefix-cache-retention-interval to a block")
    is_full = all(isinstance(spec, FullAttentionSpec) for spec in layer_specs())
    if config.cache.blocks_per_chunk > 1 and not is_full:
        raise ConfigError(
            f"found chunks of {config.cache.blocks_per_chunk} blocks, and KV cache groups with sliding windows or "
            "states, of which vLLM stores parts of chunks: rows would keep bytes of other blocks; leave out "
            "blocks_per_chunk and block_size",
            location="kv_connector_extra_config",
        )


def _loses_windows(config: Any, kv_cache: Any) -> bool:
    """Return whether vLLM looks for each window one block before the window that it has stored.

    By default vLLM stores only the window before a prompt's end. With a draft model it drops the last block found.
    """
    is_sparse = config is not None and config.cache_config.prefix_cache_retention_interval == 0
    has_window = any(getattr(spec, "sliding_window", None) for spec in layer_specs())
    return is_sparse and has_window and any(group.is_eagle_group for group in kv_cache.kv_cache_groups)


def our_caches(kv_caches: Any, *, is_canonical: bool = False) -> CanonicalKVCaches:  # Any: vLLM's CanonicalKVCaches
    """Return vLLM's caches as our type. With `is_canonical` it has vLLM's mapping to a canonical layout.

    Raises:
        ConfigError: vLLM has no such mapping for a layer.
    """
    refs = [ref for group in kv_caches.group_data_refs for ref in group]
    if is_canonical and not all(ref.mapping and ref.mapping.parallelism_agnostic for ref in refs):
        raise ConfigError(
            "vLLM has no canonical layout for the KV cache of this attention backend; leave canonical_layout out",
            location="kv_connector_extra_config.canonical_layout",
        )
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(each.tensor, each.page_size_bytes) for each in kv_caches.tensors],
        group_data_refs=[
            [
                CanonicalKVCacheRef(ref.tensor_idx, ref.page_size_bytes, ref.mapping if is_canonical else None)
                for ref in group
            ]
            for group in kv_caches.group_data_refs
        ],
    )


def audited_group(config: Any, num_parts: int) -> AuditedGroup | None:  # Any: vLLM's OffloadingConfig
    """Return which of several groups the audit compares; None if there is only one, whose whole rows it compares.

    It is the first group with full attention: vLLM looks up the blocks of that group first, and computes every block
    that it misses. `num_parts` is the number of equal parts of a row.

    Raises:
        ConfigError: The model cannot be audited.
    """
    found = current_engine.get()
    groups = [] if found is None else found[1].kv_cache_groups
    if found is not None and found[0] is not None and _has_drafts_everywhere(found[0].speculative_config, groups):
        raise _refusal("what a draft model keeps for a token depends on the next one")
    if len(config.groups) == 1:
        return None
    if config.parallel.pp_size > 1:
        raise _refusal("several KV cache groups, and pipeline stages")
    for group in config.groups:
        spec = groups[group.group_id].kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
        if isinstance(spec, FullAttentionSpec) and not groups[group.group_id].is_eagle_group:
            shards = canonical_shards(config) if config.canonical_layout else 1
            pages = shards * len(group.layer_names) * config.cache.blocks_per_chunk
            tokens = group.tokens_per_block * config.cache.blocks_per_chunk
            return AuditedGroup(group.group_id, tokens, pages * spec.unpadded_page_size_bytes, num_parts)
    raise _refusal("several KV cache groups, and none of full attention without a draft's layers")


def audit_only(manager: TieringOffloadingManager, group: AuditedGroup, config: Any) -> None:
    """Restrict a stack's audit to the blocks of one of several groups, and log this."""
    assert isinstance(manager, AuditedManager)
    manager.audit_only(group)
    _log.warning(
        "the audit compares the blocks of KV cache group %d, which has full attention; the others, %d in number, are "
        "not audited",
        group.number,
        len(config.groups) - 1,
    )


def check_audited(config: Any, group: AuditedGroup, caches: CanonicalKVCaches) -> None:
    """Raise ConfigError if a block of the audited group fills more or fewer bytes than the scheduler computed."""
    (refs,) = [
        refs for each, refs in zip(config.groups, caches.group_data_refs, strict=True) if each.group_id == group.number
    ]
    if config.cache.blocks_per_chunk * sum(map(offloaded_bytes, refs)) != group.used_bytes:
        raise _refusal("several KV cache groups, whose layers have pages of several sizes, or share one page")


def _has_drafts_everywhere(draft: Any, groups: Any) -> bool:
    """Return whether every group may have layers of a draft model that reads ahead (EAGLE, MTP).

    From 0.33 on, vLLM marks each group that has such layers. vLLM 0.32 marks only some of these groups.
    """
    return draft is not None and draft.use_eagle() and (len(groups) == 1 or not any(g.is_eagle_group for g in groups))


def _refusal(found: str) -> ConfigError:
    return ConfigError(f"this model cannot be audited: found {found}; leave this out", location="audit")
