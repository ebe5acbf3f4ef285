"""Lets SGLang run on a CPU: every interpreter with this directory on its path replaces what has no CPU build.

Missing kernels: their modules have a class for each name, and using one is an error. HiCache has no copies between a
host pool and a device pool in CPU memory: they are added when SGLang's modules are loaded. A build of torch for GPUs
brings NCCL, which SGLang would use between its ranks wherever it finds it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MISSING = (
    "sgl_kernel",
    "sglang.srt.configs.deepseek_ocr",
    "sglang.srt.multimodal.internvl_utils",
)  # two need torchvision


class Missing(type):
    """The type of all that is missing."""

    def __getattr__(cls, name: str) -> Any:
        return missing(name)

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no CPU build")


def missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules that are missing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if any(name == each or name.startswith(f"{each}.") for each in MISSING):
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = missing  # type: ignore[method-assign]  # of this module alone
        module.__version__ = "0.0"  # type: ignore[attr-defined]


def add_memory(module: Any) -> None:
    def allocate(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **_: object) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def add_copies(module: Any) -> None:
    def places(pool: Any, buffer: Any, layer: int, indices: Any) -> tuple[Any, Any]:
        """Return a tensor and an index into it for these tokens of a layer."""
        pages, slots = indices // pool.page_size, indices % pool.page_size
        if pool.layout == "layer_first":
            return buffer[layer], indices
        if pool.layout == "page_first":
            return buffer[:, layer], indices
        if pool.layout == "page_first_direct":
            return buffer[:, layer], (pages, slots)
        return buffer[..., layer, :].transpose(1, 2), (pages, slots)  # page_head

    def sides(pool: Any, layer: int) -> Sequence[tuple[Any, Any]]:
        return (pool.k_buffer, pool.device_k_buffers[layer]), (pool.v_buffer, pool.device_v_buffers[layer])

    def load(pool: Any, _: Any, host: Any, device: Any, layer: int, backend: str, *, is_draft: bool = False) -> None:
        for buffer, cache in sides(pool, layer):
            tensor, index = places(pool, buffer, layer, host.cpu())
            cache[device] = tensor[index]

    def back_up(pool: Any, _: Any, host: Any, device: Any, backend: str) -> None:
        for layer in range(pool.layer_num):
            for buffer, cache in sides(pool, layer):
                tensor, index = places(pool, buffer, layer, host.cpu())
                tensor[index] = cache[device]

    module.MHATokenToKVPoolHost.load_to_device_per_layer = load
    module.MHATokenToKVPoolHost.backup_from_device_all_layer = back_up


ADDITIONS: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.common": add_memory,
    "sglang.srt.mem_cache.pool_host.mha": add_copies,
}


class Completed(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        ADDITIONS[module.__name__](module)


class Completing(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in ADDITIONS else None
        if spec is not None and spec.origin is not None:
            spec.loader = Completed(name, spec.origin)
        return spec


os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/dev/null")
sys.meta_path[:0] = [StandIns(), Completing()]
