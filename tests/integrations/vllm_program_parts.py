"""What the programs that run in vLLM's environments have in common."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

CHUNK_BYTES = 16 << 10
WAIT_S = 20.0


def config_with(extra: Mapping[str, object], model: str = "m", enable_events: bool = False) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=enable_events,
        extra_config=extra,
        engine_id=f"test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def keys_of(name: str, count: int) -> list[bytes]:
    return [make_offload_key(hashlib.sha256(f"{name}-{index}".encode()).digest(), 0) for index in range(count)]


def wait_for(attempt: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (answer := attempt()):
        assert time.monotonic() < end_s, "nothing came of it in time"
        time.sleep(0.0005)
    return answer


def refusal_of(attempt: Callable[[], object], kind: type[Exception]) -> str:
    """Return the message with which an attempt is refused."""
    try:
        attempt()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")
