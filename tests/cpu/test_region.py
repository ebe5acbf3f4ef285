"""The primary tier's memory."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest

from tests.support.stacks import ReplaceModule
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError


def test_a_region_is_page_aligned_and_its_views_show_the_same_bytes() -> None:
    region = PrimaryRegion(3, 5000)
    assert region.array.ctypes.data % mmap.PAGESIZE == 0
    assert region.kv_view.shape == (3, 5000)
    region.array[1, 7] = 42
    assert region.kv_view[1, 7] == 42
    assert region.flat[5007] == 42
    assert region.close()


def test_a_region_that_is_still_viewed_is_not_unmapped() -> None:
    region = PrimaryRegion(2, 4096)
    view = region.flat[4096:]
    assert not region.close()
    view[0] = 1  # would crash the process if it were
    view.release()
    assert region.close()
    assert region.close(), "closing twice does nothing"


def test_prefault_keeps_the_bytes_zero() -> None:
    region = PrimaryRegion(4, 4096, prefault=True, huge_pages=True)
    assert not region.array.any()
    region.close()


@pytest.mark.parametrize(("blocks", "size"), [(0, 4096), (1, 0)])
def test_an_empty_region_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        PrimaryRegion(blocks, size)


def test_an_impossible_size_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"primary\.capacity"):
        PrimaryRegion(1 << 50, 1 << 12)


class FakeCudaRuntime:
    """Stands in for torch's binding; whether it accepts is up to the test."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # CUDA's name
        if not self.code:
            self.registered[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        del self.registered[address]
        return 0


def fake_torch(runtime: FakeCudaRuntime) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, cudart=lambda: runtime))


def test_a_region_is_pinned_where_torch_has_a_gpu(replace_module: ReplaceModule) -> None:
    region = PrimaryRegion(2, 4096)
    replace_module("torch")
    assert not region.pin()
    runtime = FakeCudaRuntime()
    replace_module("torch", fake_torch(runtime))
    assert region.pin()
    assert region.pin(), "once is enough"
    assert runtime.registered == {region.array.ctypes.data: 8192}
    region.close()
    assert not runtime.registered


def test_a_region_that_cuda_refuses_to_pin_says_what_to_do(replace_module: ReplaceModule) -> None:
    region = PrimaryRegion(2, 4096)
    replace_module("torch", fake_torch(FakeCudaRuntime(code=2)))
    with pytest.raises(ConfigError, match="error 2"):
        region.pin()
    region.close()


def test_a_numa_node_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"numa_node|NUMA"):
        PrimaryRegion(1, 4096, numa_node=1000)
