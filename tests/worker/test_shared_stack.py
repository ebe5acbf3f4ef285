"""One stack opened from several sides, here all in one process; test_three_processes.py has them apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import stacks
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from tiered_kv.cpu import region as region_module
from tiered_kv.cpu.region import Geometry
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.stack.facade import rows_of
from tiered_kv.stack.open import EngineStack
from tiered_kv.system.collapse import huge_bytes, refusal
from tiered_kv.system.limits import Limits
from tiered_kv.testing.control import wait_until
from tiered_kv.worker import SharedStack, TieredOffloadingSpec, WorkerHandlers
from tiered_kv.worker.shared import SharedRegion
from tiered_kv.worker.shared_file import SharedFile

torch = pytest.importorskip("torch")

PAGE_BYTES = 2048
PAGE = Limits().collapsed_size() or 2 << 20
KEYS = [make_offload_key(bytes([number]) * 16, 0) for number in range(6)]


def stack_of(*, block_bytes: int = 2 * PAGE_BYTES, shared: str | None = None) -> dict[str, object]:
    return stacks.stack_of(blocks=4, block_bytes=block_bytes, block={"tokens": 16}, primary={"shared": shared})


def shared_stack(name: str | None, **settings: Any) -> SharedStack:
    return SharedStack(stack_of(**settings), name=name, bytes_per_worker=PAGE_BYTES, num_workers=2)


class Cache:
    """A worker's cache of four blocks of one page."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.tensor = torch.zeros((4, page_bytes), dtype=torch.uint8)
        self.canonical = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self.tensor, page_bytes)], [[CanonicalKVCacheRef(0, page_bytes)]]
        )


def transfer(handlers: WorkerHandlers, blocks: list[int], rows: list[int], *, is_store: bool) -> None:
    spec = (GPULoadStoreSpec(blocks, [len(blocks)]), CPULoadStoreSpec(rows))
    handler = handlers.store if is_store else handlers.load
    handler.transfer_async(1, spec if is_store else spec[::-1])
    handler.wait([1])
    assert [result.success for result in handler.get_finished()] == [True]


def prepare_store(stack: EngineStack, keys: list[OffloadKey]) -> list[int] | None:
    output = stack.manager.prepare_store(keys, ReqContext(req_id="r"))
    return None if output is None else rows_of(output.store_spec)


@pytest.mark.skipif(bool(refusal(PAGE)), reason="this kernel makes no huge pages on request")
def test_the_memory_of_an_engine_s_processes_is_on_huge_pages_behind_the_start(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shared = SharedStack(stack_of(block_bytes=PAGE), name=name, bytes_per_worker=PAGE)
    handlers = shared.open_handlers(Cache(PAGE).canonical)
    stack = shared.open_engine_stack()
    region = stack.region
    assert isinstance(region, SharedRegion)
    wait_until(lambda: not region.is_collapsing)
    assert region.huge_bytes == stack.counters()["cpu"]["huge_page_bytes"] == 4 * PAGE
    assert huge_bytes(region.array.ctypes.data, 4 * PAGE) == 4 * PAGE
    assert any(each.getMessage().endswith("are on huge pages") for each in caplog.records)
    handlers.shutdown()
    stack.close()


@pytest.mark.skipif(bool(refusal(PAGE)), reason="this kernel makes no huge pages on request")
def test_a_worker_with_a_gpu_pins_huge_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned pages do not move any more."""
    pinned = list[int]()

    def register(address: int, size_bytes: int, flags: int) -> int:
        pinned.append(huge_bytes(address, size_bytes))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(region_module, "_cuda_runtime", lambda: runtime)
    file = SharedFile(name, "worker 0", ["scheduler", "worker 0"])
    region = SharedRegion.join(file, Geometry(4, PAGE), for_gpu=True)
    assert region.pin()
    assert pinned == [4 * PAGE]
    region.close()


def test_huge_pages_may_be_turned_off(name: str) -> None:
    source = {**stack_of(), "primary": {"capacity": 4 * PAGE, "huge_pages": "off"}, "block": {"bytes": PAGE}}
    shared = SharedStack(source, name=name, bytes_per_worker=PAGE)
    stack = shared.open_engine_stack()
    assert isinstance(stack.region, SharedRegion)
    assert not stack.region.is_collapsing
    assert stack.counters()["cpu"]["huge_page_bytes"] == 0
    stack.close()


def test_workers_of_different_sizes_do_not_share_bytes(name: str) -> None:
    sizes = [PAGE_BYTES, PAGE_BYTES // 2]  # of the last pipeline stage, say, with fewer layers
    sides = [SharedStack(stack_of(), name=name, bytes_per_worker=size, num_workers=2) for size in sizes]
    caches = [Cache(size) for size in sizes]
    handlers = [side.open_handlers(caches[rank].canonical, rank) for rank, side in enumerate(sides)]
    stack = sides[0].open_engine_stack()
    for rank, cache in enumerate(caches):
        cache.tensor[:] = 10 + rank
        transfer(handlers[rank], [0], [0], is_store=True)
    for rank, cache in enumerate(caches):
        cache.tensor[:] = 0
        transfer(handlers[rank], [0], [0], is_store=False)
        assert (cache.tensor[0] == 10 + rank).all()
    for each in handlers:
        each.shutdown()
    stack.close()


def test_workers_with_the_same_bytes_share_one_part(name: str) -> None:
    settings: dict[str, Any] = {"name": name, "bytes_per_worker": PAGE_BYTES, "num_workers": 2, "num_parts": 1}
    shared = SharedStack(stack_of(block_bytes=PAGE_BYTES), **settings)
    caches = [Cache(), Cache()]
    handlers = [shared.open_handlers(cache.canonical, rank) for rank, cache in enumerate(caches)]
    stack = shared.open_engine_stack()
    caches[0].tensor[:] = 7
    transfer(handlers[0], [0], [3], is_store=True)
    transfer(handlers[1], [2], [3], is_store=False)
    assert (caches[1].tensor[2] == 7).all()
    for each in handlers:
        each.shutdown()
    stack.close()
    with pytest.raises(ConfigError, match="expected 1 or 3 parts of a block, found 2"):
        SharedStack(stack_of(), name=name, bytes_per_worker=PAGE_BYTES, num_workers=3, num_parts=2)


def test_nothing_is_stored_or_copied_before_every_process_has_mapped_the_memory(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = shared_stack(name)
    stack = shared.open_engine_stack()
    first = shared.open_handlers(Cache().canonical, 0)
    assert prepare_store(stack, KEYS[:1]) is None
    assert [record.getMessage() for record in caplog.records] == [
        "nothing is stored or promoted until worker 1 has mapped the engine's memory"
    ]
    with pytest.raises(TieredKVError, match="worker 1 did not"):
        first.store.transfer_async(1, (GPULoadStoreSpec([0], [1]), CPULoadStoreSpec([0])))
    second = shared.open_handlers(Cache().canonical, 1)
    rows = prepare_store(stack, KEYS[:1])
    assert rows is not None
    transfer(first, [0], rows, is_store=True)
    stack.manager.complete_store(KEYS[:1], ReqContext(req_id="r"))
    first.shutdown()
    second.shutdown()
    stack.close()


def test_the_stack_can_name_the_memory(name: str) -> None:
    shared_stack(None, shared=name).open_engine_stack().close()
    with pytest.raises(ConfigError, match=r"primary\.shared: a stack of several processes needs a name"):
        shared_stack(None)


def test_blocks_that_do_not_hold_the_parts_of_all_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"block\.bytes: .*2 parts of 2KiB: expected at least 4KiB, found 4095B"):
        shared_stack("n", block_bytes=2 * PAGE_BYTES - 1)
    with pytest.raises(ConfigError, match="at least one worker"):
        SharedStack(stack_of(), name="n", bytes_per_worker=0)


def test_caches_that_do_not_fit_leave_nothing_open(name: str) -> None:
    shared = shared_stack(name)
    with pytest.raises(ValueError, match="this worker's part of a row is 2KiB"):
        shared.open_handlers(Cache(PAGE_BYTES + 1).canonical, 0)
    with pytest.raises(ValueError, match="no worker 2 among 2"):
        shared.open_handlers(Cache().canonical, 2)


def test_a_tier_that_cannot_be_opened_leaves_nothing_open(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = stack_of() | {"secondary": [{"type": "nvme", "path": str(tmp_path / "file"), "capacity": "64MiB"}]}
    with pytest.raises(TieredKVError):
        SharedStack(config, name=name, bytes_per_worker=PAGE_BYTES).open_engine_stack()


def engine_configs(name: str, rank: int, stack: object, **extra: object) -> tuple[Any, Any]:
    """Return what an engine of two workers passes, with blocks of two tensors and 16 tokens."""
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=name, kv_connector_extra_config={"stack": stack, "block_size": 32, **extra}
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=2, rank=rank
        ),
    )
    kv_cache_config = SimpleNamespace(
        num_blocks=4,
        kv_cache_tensors=[SimpleNamespace(size=4 * 256), SimpleNamespace(size=4 * 768)],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))],
    )
    return vllm_config, kv_cache_config


def test_the_spec_gives_a_manager_and_the_handlers_of_each_worker(name: str) -> None:
    specs = [TieredOffloadingSpec(*engine_configs(name, rank, stack_of())) for rank in (0, 1)]
    assert all(isinstance(spec, OffloadingSpec) and spec.block_size_factor == 2 for spec in specs)
    assert specs[0].shared.bytes_per_worker == 2 * (256 + 768)
    tensors = [torch.full((4, size), 5, dtype=torch.int8) for size in (256, 768)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(0, 256), CanonicalKVCacheRef(1, 768)]],
    )
    triples = [list(spec.get_handlers(caches)) for spec in specs]
    manager = specs[0].get_manager()
    assert specs[0].get_manager() is manager
    (gpu, cpu, store), (cpu_again, gpu_again, load) = triples[0]
    assert (gpu, cpu) == (gpu_again, cpu_again) == (GPULoadStoreSpec, CPULoadStoreSpec)
    output = manager.prepare_store(KEYS[:1], ReqContext(req_id="r"))
    assert output is not None
    store.transfer_async(1, (GPULoadStoreSpec([0, 1], [2], [0]), output.store_spec))
    store.wait([1])
    manager.complete_store(KEYS[:1], ReqContext(req_id="r"))
    load.transfer_async(2, (manager.prepare_load(KEYS[:1], ReqContext(req_id="s")), GPULoadStoreSpec([3], [1], [1])))
    load.wait([2])
    assert [result.success for result in (*store.get_finished(), *load.get_finished())] == [True, True]
    manager.complete_load(KEYS[:1], ReqContext(req_id="s"))
    for handlers in triples:
        for _, _, handler in handlers:
            handler.shutdown()
    manager.shutdown()


def test_a_spec_without_a_stack_says_what_it_wants() -> None:
    with pytest.raises(ConfigError, match="stack: expected the path"):
        TieredOffloadingSpec(*engine_configs("n", 0, None))
