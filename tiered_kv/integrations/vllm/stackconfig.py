"""The configuration of a stack inside vLLM: what the user's file says, completed by what vLLM knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tiered_kv.config.reading import fill_variables, from_source
from tiered_kv.config.stack_config import StackConfig, load_config
from tiered_kv.errors import ConfigError
from tiered_kv.integrations.vllm.identity import ROW_LAYOUT, chunk_tokens, environment, namespace_of
from tiered_kv.integrations.vllm.ranks import Rank, rank_of, stages_of

ROW_ALIGNMENT_BYTES = 4096
"""Rows are whole pages, so that disks read and write them directly."""

_EXTRA = "kv_connector_extra_config"


def stack_config(config: Any, ranks: Sequence[Rank] = ()) -> StackConfig:  # Any: vLLM's OffloadingConfig
    """Return the stack of a vLLM engine, the same in its scheduler and its workers.

    Args:
        config: What vLLM tells this process.
        ranks: All workers in their order; by default all are like that of `config`.

    Raises:
        ConfigError: The file, or a setting in it, cannot be used.
    """
    source = config.extra_config.get("stack")
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise ConfigError(
            f"expected the path of a stack's file, or a stack, found {source!r}", location=f"{_EXTRA}.stack"
        )
    ranks = ranks or [rank_of(config)] * config.parallel.world_size
    return from_source(source, lambda raw: _completed(raw, config, ranks))


def _completed(raw: Mapping[str, object], config: Any, ranks: Sequence[Rank]) -> StackConfig:
    if "block" in raw:
        raise ConfigError("vLLM tells the size of a block; leave this out", location="block")
    if config.canonical_layout:
        raise ConfigError("canonical_layout is for vLLM's own worker; leave it out", location=_EXTRA)
    if raw.get("audit") and len(config.groups) > 1:
        # A group whose blocks are smaller leaves the rest of a row as it was, and rows would seem to differ.
        raise ConfigError("a model with several KV cache groups cannot be audited; leave this out", location="audit")
    environ = environment(config)
    said = fill_variables({"namespace": raw.get("namespace")}, environ)["namespace"]
    row_bytes = max(rank.chunk_bytes for rank in ranks) * len(ranks)
    block = {"bytes": -(-row_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES, "tokens": chunk_tokens(config)}
    namespace = namespace_of(config, said, row_layout=ROW_LAYOUT, stages=stages_of(ranks))
    return load_config({**raw, "namespace": namespace, "block": block}, environ=environ)
