"""What of vLLM's configurations cannot be offloaded rightly, and is refused as the engine starts."""

from __future__ import annotations

from typing import Any

from tiered_kv.errors import ConfigError

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
