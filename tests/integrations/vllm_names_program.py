"""Runs without vLLM: our adapters, over stand-ins for the few classes of vLLM's that they are made of, move blocks.

    python vllm_names_program.py spec|tier ENTRY

Stores blocks by the adapter, opens it anew and loads them again, and prints as JSON how many were stored and loaded,
and the keys and the namespace's digest in hexadecimal. ENTRY is a tier's YAML entry as JSON. Real vLLMs run the
programs beside this one; what this one leaves out of vLLM, and of torch, has no part in what blocks are called.
"""

from __future__ import annotations

import enum
import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.testing.rig import make_keys

BLOCK_BYTES = 4096
ROWS = 64
"""So many that the budgets of a tier, which are parts of it, let all keys through."""
KEYS = 4
WAIT_S = 30.0


def stand_in(name: str, **contents: object) -> None:
    """Make a module of vLLM's, and the packages that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = []
    vars(sys.modules[name]).update(contents)


class LookupResult(enum.Enum):
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()
    MISS = enum.auto()


class Medium(enum.Enum):
    CPU = enum.auto()
    STORAGE = enum.auto()


class OffloadPolicy(enum.Enum):
    CHUNK_LEVEL = enum.auto()
    REQUEST_LEVEL = enum.auto()


class CacheHitSource(enum.Enum):
    HOST = enum.auto()
    DISK = enum.auto()
    EXTERNAL_UNSPECIFIED = enum.auto()


class TierFilter:
    ALL: Any


TierFilter.ALL = TierFilter()


@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Sequence[bytes] | None = None
    transfer_time: float = 0.0
    transfer_bytes: int = 0


class OffloadingManager:
    def on_reset_flushed(self) -> None:
        return


class OffloadingSpec:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.kv_events_config = SimpleNamespace(enable_kv_cache_events=False)


class SecondaryTierManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, detector: Any = None) -> None:
        return


class Anything:
    """What is named in annotations, or made where nobody looks at it."""

    def __init__(self, *arguments: object, **fields: object) -> None:
        return


def put_stand_ins() -> None:
    stand_in("vllm", __version__="0.33.0")
    stand_in("vllm.envs")
    stand_in("vllm.config.utils", normalize_value=None)
    stand_in("vllm.platforms", current_platform=None)
    stand_in("vllm.v1.core.kv_cache_utils", DEFAULT_NONE_HASH_SEED="0")
    stand_in(
        "vllm.v1.kv_offload.base",
        Locality=Anything,
        LookupResult=LookupResult,
        Medium=Medium,
        OffloadPolicy=OffloadPolicy,
        OffloadingEvent=Anything,
        OffloadingGaugeMetadata=Anything,
        OffloadingManager=OffloadingManager,
        OffloadingSpec=OffloadingSpec,
        OffloadingWorker=Anything,
        RequestOffloadingContext=RequestOffloadingContext,
        TierFilter=TierFilter,
        TransferResult=Anything,
    )
    stand_in(
        "vllm.v1.kv_offload.tiering.base",
        JobResult=JobResult,
        SecondaryTierManager=SecondaryTierManager,
        TransferJob=Anything,
    )
    stand_in("vllm.v1.metrics.cache_hit_source", CacheHitSource=CacheHitSource)
    stand_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
        OffloadingConnectorStats=Anything,
    )
    stand_in("torch")


def config_of(extra: dict[str, object]) -> Any:
    """Return what vLLM's `OffloadingConfig` tells of an engine of one worker."""
    return SimpleNamespace(
        engine_id=f"test-{uuid.uuid4().hex}",
        worker_kv_bytes_per_block=BLOCK_BYTES,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        parallel=SimpleNamespace(
            data_parallel_index=0, rank=0, world_size=1, tp_size=1, pp_size=1, dcp_size=1, pcp_size=1
        ),
        model=SimpleNamespace(name="m", dtype="bfloat16"),
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer.0"], group_id=0)],
        kv_cache_layout=None,
        canonical_layout=False,
        replicated_layout=False,
        extra_config=extra,
    )


@dataclass
class Request:
    """What of vLLM's `ReqContext` the adapters use."""

    req_id: str
    load_tier_filter: Any = TierFilter.ALL
    positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.positions.get(key)


def content_of(number: int) -> bytes:
    return bytes([0xA0 + number]) * BLOCK_BYTES  # which says nothing of its key


def wait_for(attempt: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + WAIT_S
    while not (answer := attempt()):
        assert time.monotonic() < end_s, "nothing came of it in time"
        time.sleep(0.0005)
    return answer


def by_spec(entry: dict[str, object], keys: Sequence[OffloadKey], is_store: bool) -> tuple[int, str]:
    """Open our whole stack as vLLM's spec, and store the keys' blocks or load them; return how many, and the digest."""
    from tiered_kv.cpu.geometry import Geometry
    from tiered_kv.integrations.vllm.spec import TieredKVOffloadingSpec
    from tiered_kv.worker.shared_file import SharedFile
    from tiered_kv.worker.shared_region import SharedRegion

    stack = {"primary": {"capacity": ROWS * BLOCK_BYTES}, "secondary": [entry]}
    config = config_of({"stack": stack})
    spec = TieredKVOffloadingSpec(config)
    manager: Any = spec.get_manager()  # Any: as vLLM sees it
    name, parties = f"tiered-kv-{config.engine_id}", ["scheduler", "worker 0"]
    region = SharedRegion.join(SharedFile(name, "worker 0", parties), Geometry(ROWS, BLOCK_BYTES))
    rows = np.asarray(region.kv_view).view(np.uint8)
    request = Request("request")
    manager.on_new_request(request)
    done = 0
    if is_store:
        output = manager.prepare_store(keys, request)
        for key, row in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            rows[row] = np.frombuffer(content_of(keys.index(key)), np.uint8)
        manager.complete_store(set(output.keys_to_store), request)
        done = len(output.keys_to_store)
    else:

        def answers() -> list[LookupResult] | None:
            found = [manager.lookup(key, request) for key in keys]
            manager.on_schedule_end(None)
            return None if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found) else found

        hits = [key for key, found in zip(keys, wait_for(answers), strict=True) if found is LookupResult.HIT]
        if hits:
            for key, row in zip(hits, manager.prepare_load(hits, request).block_ids, strict=True):
                assert rows[row].tobytes() == content_of(keys.index(key)), "wrong bytes"
            manager.complete_load(set(hits), request)
        done = len(hits)
    manager.on_request_finished(request)
    (info,) = manager.config_info()
    manager.shutdown()
    del rows
    region.close()
    return done, str(info["tiered_kv_namespace"])


def by_tier(entry: dict[str, object], keys: Sequence[OffloadKey], is_store: bool) -> tuple[int, str]:
    """Open a tier of ours as vLLM's, and store the keys' blocks or load them; return how many, and the digest."""
    from tiered_kv.integrations.vllm.tier import TieredKVTier

    memory = np.zeros((ROWS, BLOCK_BYTES), np.int8)
    spec = OffloadingSpec(config_of({}))
    tier = TieredKVTier(spec, memory.data, "TieredKVTier", tier=entry)
    request = Request("request")
    tier.on_new_request(request)
    rows = list(range(len(keys)))
    job = SimpleNamespace(job_id=1, keys=list(keys), chunk_ids=rows, req_context=request, is_promotion=not is_store)
    done = 0
    if is_store:
        for row in rows:
            memory[row] = np.frombuffer(content_of(row), np.int8)
        tier.submit_store(job)
        done = sum(len(keys) * result.success for result in wait_for(tier.get_finished_jobs))
    else:

        def answers() -> list[LookupResult] | None:
            found = [tier.lookup(key, request) for key in keys]
            tier.on_schedule_end(None)
            return None if LookupResult.RETRY in found else found

        if set(wait_for(answers)) == {LookupResult.HIT}:
            tier.submit_load(job)
            assert all(result.success for result in wait_for(tier.get_finished_jobs))
            assert all(memory[row].tobytes() == content_of(row) for row in rows), "wrong bytes"
            done = len(keys)
    tier.on_request_finished(request)
    digest = tier.config_info()["tiered_kv_namespace"]
    tier.shutdown()
    return done, digest


def main() -> None:
    adapter, text = sys.argv[1:]
    put_stand_ins()
    from tiered_kv.integrations.vllm import identity

    vars(identity)["engine_facts"] = lambda *_: {}  # of an engine that is not there
    entry = json.loads(text)
    keys = make_keys(KEYS, "a prompt that the reader knows")
    move = by_spec if adapter == "spec" else by_tier
    stored, digest = move(entry, keys, True)
    loaded, again = move(entry, keys, False)
    assert again == digest, "the same engine has two namespaces"
    print(json.dumps({"stored": stored, "loaded": loaded, "keys": [key.hex() for key in keys], "digest": digest}))


if __name__ == "__main__":
    main()
