"""What the workers of an engine store of a chunk, and how each process learns it.

vLLM hands each process the layers of one worker: a worker gets its own, and the scheduler those of worker 0. With
pipeline stages of unequal layers, rows and namespace that are computed from these differ between processes. So with
more than one stage each worker writes what it has into the engine's shared file, and every process reads them all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.integrations.vllm.identity import Stage, stage_of
from tiered_kv.worker.shared import SCHEDULER, parties_of, worker_party
from tiered_kv.worker.shared_file import SharedFile


@dataclass(frozen=True, slots=True)
class Rank:
    """One worker: what it stores of a chunk, all of its layers, and its stage."""

    chunk_bytes: int
    stage: Stage


def rank_of(config: Any) -> Rank:  # Any: vLLM's OffloadingConfig
    """Return the worker that a process knows: a worker itself, and the scheduler worker 0.

    Raises:
        ConfigError: vLLM tells no size.
    """
    size = int(config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk)
    if size < 1:
        raise ConfigError("vLLM tells no size of a KV cache block, so there is nothing to offload")
    return Rank(size, stage_of(config))


def stages_of(ranks: Sequence[Rank]) -> list[Stage]:
    """Return the pipeline stages in their order; vLLM numbers the workers of a stage one after the other."""
    return list(dict.fromkeys(rank.stage for rank in ranks))


def exchange(config: Any, name: str, party: str) -> tuple[SharedFile, list[Rank]]:  # Any: vLLM's OffloadingConfig
    """Join the engine's shared file, and wait until all workers have.

    Args:
        config: What vLLM tells this process.
        name: The file's name, without its ending.
        party: Which process this is.

    Returns:
        The file, which the caller leaves, and all workers in their order.

    Raises:
        ConfigError: The file cannot be had, or a worker does not join it in time.
    """
    size = config.parallel.world_size
    note = b"" if party == SCHEDULER else _encode(rank_of(config))
    file = SharedFile(name, party, parties_of(size), note)
    try:
        return file, [_decode(note) for note in file.notes_of([worker_party(rank) for rank in range(size)])]
    except BaseException:
        file.leave()
        raise


def _encode(rank: Rank) -> bytes:
    return json.dumps([rank.chunk_bytes, rank.stage.layers, rank.stage.groups]).encode()


def _decode(note: bytes) -> Rank:
    chunk_bytes, layers, groups = json.loads(note)
    return Rank(chunk_bytes, Stage(layers, tuple(groups)))
