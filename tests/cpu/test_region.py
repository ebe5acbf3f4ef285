"""The primary tier's memory."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiered_kv.cpu import region as region_module
from tiered_kv.cpu.geometry import ROWS_OFFSET
from tiered_kv.cpu.region import SHARED_MEMORY_DIRECTORY, PrimaryRegion
from tiered_kv.errors import ConfigError


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"tiered-kv-test-{uuid.uuid4().hex}"
    yield name
    assert not (SHARED_MEMORY_DIRECTORY / name).exists()


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


def test_workers_map_the_same_bytes_and_the_name_goes_when_all_have(shared_name: str) -> None:
    region = PrimaryRegion(4, 4096, name=shared_name)
    path = region.path
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == ROWS_OFFSET + 4 * 4096
    code = (
        "import sys; from tiered_kv.cpu.region import PrimaryRegion\n"
        "region = PrimaryRegion.attach(sys.argv[1], 4, 4096); region.array[2, :] = 7; region.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert (region.array[2] == 7).all()
    region.unlink()
    assert not path.exists()
    region.array[3, 0] = 1  # the mapping outlives its name
    region.close()


def test_closing_removes_the_name(shared_name: str) -> None:
    PrimaryRegion(1, 4096, name=shared_name).close()


def test_a_name_in_use_is_an_error(shared_name: str) -> None:
    region = PrimaryRegion(1, 4096, name=shared_name)
    with pytest.raises(ConfigError, match="exists"):
        PrimaryRegion(1, 4096, name=shared_name)
    region.close()


def test_more_than_the_shared_memory_has_is_an_error_that_leaves_nothing(shared_name: str) -> None:
    status = os.statvfs(SHARED_MEMORY_DIRECTORY)
    blocks = status.f_blocks * status.f_frsize // 4096 + 1
    with pytest.raises(ConfigError, match=r"free and the region needs"):
        PrimaryRegion(blocks, 4096, name=shared_name)


@pytest.mark.parametrize("name", ["", "a/b", "..", "."])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="plain name"):
        PrimaryRegion(1, 4096, name=name)


def test_attaching_checks_the_rows(shared_name: str, tmp_path: Path) -> None:
    region = PrimaryRegion(2, 4096, name=shared_name)
    assert region.path is not None
    with pytest.raises(ConfigError, match=r"expected rows 3 in the region .*, found rows 2"):
        PrimaryRegion.attach(region.path, 3, 4096)
    with pytest.raises(ConfigError, match=r"expected rows 1, row_bytes 8192, .* found rows 2, row_bytes 4096"):
        PrimaryRegion.attach(region.path, 1, 8192)
    with pytest.raises(ConfigError, match="cannot attach"):
        PrimaryRegion.attach(tmp_path / "none", 3, 4096)
    region.close()


def test_a_file_that_is_no_region_is_not_attached_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    os.truncate(path, ROWS_OFFSET + 2 * 4096)
    with pytest.raises(ConfigError, match="has no header of a region; expected format 1, rows 2, row_bytes 4096"):
        PrimaryRegion.attach(path, 2, 4096)


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


def test_a_region_is_pinned_where_torch_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    region = PrimaryRegion(2, 4096)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not region.pin()
    runtime = FakeCudaRuntime()
    monkeypatch.setitem(sys.modules, "torch", fake_torch(runtime))
    assert region.pin()
    assert region.pin(), "once is enough"
    assert runtime.registered == {region.array.ctypes.data: 8192}
    region.close()
    assert not runtime.registered


def test_a_region_that_cuda_refuses_to_pin_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    region = PrimaryRegion(2, 4096)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(FakeCudaRuntime(code=2)))
    with pytest.raises(ConfigError, match="error 2"):
        region.pin()
    region.close()


def test_shared_memory_is_bound_to_its_node_before_it_has_pages(
    shared_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []

    def bind(address: int, size_bytes: int, node: int) -> None:
        allocated.append((SHARED_MEMORY_DIRECTORY / shared_name).stat().st_blocks)

    monkeypatch.setattr(region_module, "_bind_to_node", bind)
    region = PrimaryRegion(4, 4096, name=shared_name, numa_node=0)
    assert region.path is not None
    allocated.append(region.path.stat().st_blocks)
    assert allocated == [0, (1 + 4) * 4096 // 512], "the header and the rows"
    region.close()


def test_shared_memory_that_cannot_be_bound_leaves_nothing(shared_name: str) -> None:
    with pytest.raises(ConfigError, match=r"numa_node|NUMA"):
        PrimaryRegion(1, 4096, name=shared_name, numa_node=1000)


def test_a_numa_node_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"numa_node|NUMA"):
        PrimaryRegion(1, 4096, numa_node=1000)
