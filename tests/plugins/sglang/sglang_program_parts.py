"""Host pools of SGLang's in CPU memory, and our backend over them, without an engine; for the programs beside this."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from tiered_kv_sglang.backend import TieredKVHiCache

PAGE = 64
PAGES = 24
CPU = torch.device("cpu")
DTYPE = torch.bfloat16


def publish_engine(model: Path, **arguments: object) -> None:
    """Let the process be an engine's scheduler, as far as our backend sees."""
    told: dict[str, Any] = {"load_format": "dummy", "random_seed": 0, "page_size": PAGE, **arguments}
    args = ServerArgs(
        model_path=str(model), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True, **told
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=0, dp_rank=0))


def mha_pool(
    layout: str,
    *,
    layers: int = 3,
    heads: int = 2,
    width: int = 64,
    value_width: int | None = None,
    pages: int = PAGES,
) -> Any:
    value_width = value_width or width
    keys = [torch.zeros(PAGE, heads, width, dtype=DTYPE) for _ in range(layers)]
    values = [torch.zeros(PAGE, heads, value_width, dtype=DTYPE) for _ in range(layers)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(keys),
            v=tuple(values),
            k_data_ptrs=pointers(keys),
            v_data_ptrs=pointers(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=width,
        v_head_dim=value_width,
        dtype=DTYPE,
        device=CPU,
    )
    pool_class: type[MHATokenToKVPoolHost] = get_mha_host_pool_cls(info)
    return pool_class(info, 1.0, 0, PAGE, layout, pin_memory=False, **capacity(layers, pages))


def mla_pool(layout: str, *, layers: int = 3) -> Any:
    rows = [torch.zeros(PAGE, 1, 96, dtype=DTYPE) for _ in range(layers)]
    info = MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=pointers(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=PAGE,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=96,
        dtype=DTYPE,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info, 1.0, 0, PAGE, layout, pin_memory=False, target_layer_num=layers, **capacity(layers)
    )


def mamba_pool(layout: str, *, extra: bool = False) -> Any:
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, 4, 16, 16, dtype=torch.float32),
        conv=(torch.zeros(2, PAGES, 96, 4, dtype=DTYPE), torch.zeros(2, PAGES, 32, 4, dtype=DTYPE)),
        extra_checkpoint_buffers=(torch.zeros(PAGES, 8),) if extra else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=PAGES, pin_memory=False, layout=layout)


def capacity(layers: int, pages: int = PAGES) -> dict[str, int]:
    return {"device_capacity_tokens": (pages - 1) * PAGE, "start_layer": 0, "end_layer": layers}


def pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def storage_config(extra: Mapping[str, object], **fields: Any) -> HiCacheStorageConfig:
    told = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "a model",
    }
    return HiCacheStorageConfig(**{**told, "extra_config": dict(extra), **fields})


def extra_config(tiers: Sequence[Mapping[str, object]], **more: object) -> dict[str, object]:
    return {
        "backend_name": "tiered_kv",
        "module_path": "tiered_kv_sglang",
        "class_name": "TieredKVHiCache",
        "interface_v1": 1,
        "tiers": list(tiers),
        **more,
    }


def open_backend(config: HiCacheStorageConfig, pool: Any, sidecars: Mapping[str, Any] | None = None) -> TieredKVHiCache:
    """Make a backend as SGLang does; the wrapper of its failure injection may be around it."""
    backend: TieredKVHiCache = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, "kv")
    for name, sidecar in (sidecars or {}).items():
        backend.register_mem_host_pool_v2(sidecar, name)
    backend.on_host_pools_registered()
    return backend


def hashes(pages: int, start: int = 0) -> list[str]:
    return [f"{start + page:064x}" for page in range(pages)]


def slots(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def tensors(pool: Any) -> list[torch.Tensor]:
    """Return the pool's memory."""
    buffers = pool.kv_buffer
    return list(buffers) if isinstance(buffers, (list, tuple)) else [buffers]


def fill(pool: Any, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 255, flat.shape, dtype=torch.uint8, generator=generator))


def erase(pool: Any) -> None:
    for tensor in tensors(pool):
        tensor.zero_()


def overwrite(pool: Any, pages: Sequence[int]) -> None:
    """Fill pages with a pattern that none has after `fill`."""
    import ctypes

    for address, size in zip(*pool.get_page_buffer_meta(slots(pool, pages)), strict=True):
        ctypes.memset(address, 0xFF, size)


def pages_of(pool: Any, pages: Sequence[int]) -> list[list[bytes]]:
    """Return the bytes of pages, read by SGLang's own words for places."""
    import ctypes

    addresses, sizes = pool.get_page_buffer_meta(slots(pool, pages))
    count = len(addresses) // len(pages)
    runs = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
    return [runs[at : at + count] for at in range(0, len(runs), count)]
