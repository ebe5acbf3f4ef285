"""The kernel copies the same bytes as a loop over slices: in Triton's interpreter, and on a GPU if there is one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.worker.plan import LOAD, STORE, CopyPlan, lay_out
from tiered_kv.worker.short_runs import KernelCopies, choose_kernels, even_out

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

GUARD_BYTES = 48


@dataclass
class Runs:
    """Runs between two buffers, in bytes from their begin: no two overlap, and bytes lie before and behind each."""

    word_bytes: int
    sources: np.ndarray[Any, np.dtype[np.int64]]
    destinations: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def buffer_bytes(self) -> int:
        ends = [int((starts + self.lengths).max()) for starts in (self.sources, self.destinations)]
        return max(ends) + GUARD_BYTES

    def plan(self, source: int, destination: int) -> CopyPlan:
        """Return the plan for buffers at two addresses."""
        return CopyPlan(source + self.sources, destination + self.destinations, self.lengths)

    def copied(self, source: Any, destination: Any) -> Any:
        """Return what `destination` holds after the copy."""
        expected = destination.copy()
        for begin, end, length in zip(self.sources, self.destinations, self.lengths, strict=True):
            expected[end : end + length] = source[begin : begin + length]
        return expected


@st.composite
def runs(draw: st.DrawFn, num_max: int, bytes_max: int) -> Runs:
    """Draw runs of 1 byte to `bytes_max`, of equal or of mixed lengths, scattered on both sides."""
    word_bytes = draw(st.sampled_from([1, 2, 4, 8, 16]))
    words = st.integers(1, bytes_max // word_bytes)
    num_runs = draw(st.integers(1, num_max))
    some = draw(st.lists(words, min_size=1, max_size=4))
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    lengths = word_bytes * random.choice(some, num_runs)

    def scattered() -> Any:
        order = random.permutation(num_runs)
        ends = np.cumsum((lengths + word_bytes * random.integers(0, 4, num_runs))[order])
        starts = np.empty_like(ends)
        starts[order] = ends - lengths[order]
        return GUARD_BYTES + starts

    return Runs(word_bytes, scattered(), scattered(), lengths)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """The kernel's module, in which Triton's interpreter runs the kernel; it is chosen when the module is loaded."""
    (path,) = importlib.util.find_spec("tiered_kv.worker").submodule_search_locations  # type: ignore[union-attr,misc]
    spec = importlib.util.spec_from_file_location("interpreted_kernel", f"{path}/kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def check_interpreted(kernel: Any, some: Runs, seed: int, sizes: dict[str, int]) -> None:
    random = np.random.default_rng(seed)
    # Of whole words from an address that is aligned to 16 bytes, as both are.
    source, destination = (random.integers(0, 256, some.buffer_bytes, dtype=np.uint8) for _ in range(2))
    assert source.ctypes.data % 16 == destination.ctypes.data % 16 == 0
    expected, unchanged = some.copied(source, destination), source.copy()
    plan = some.plan(source.ctypes.data, destination.ctypes.data)
    columns = torch.from_numpy(np.stack([plan.sources, plan.destinations, plan.lengths]))
    kernel.launch(columns, int(plan.lengths.max()), some.word_bytes, **sizes)
    assert np.array_equal(destination, expected)
    assert np.array_equal(source, unchanged)


@given(
    some=runs(12, 300),
    seed=st.integers(0, 99),
    programs=st.integers(1, 5),
    piece=st.sampled_from([64, 256, 4096]),
    pieces=st.sampled_from([1, 2, 8]),
)
def test_it_copies_what_a_loop_over_slices_copies(
    interpreted: Any, some: Runs, seed: int, programs: int, piece: int, pieces: int
) -> None:
    check_interpreted(interpreted, some, seed, {"programs": programs, "piece_bytes": piece, "pieces": pieces})


@settings(max_examples=settings().max_examples // 5)
@given(some=runs(3, 2 << 20), seed=st.integers(0, 99))
def test_it_copies_long_runs(interpreted: Any, some: Runs, seed: int) -> None:
    check_interpreted(interpreted, some, seed, {})


def test_the_compiler_makes_accesses_of_whole_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a Hopper GPU, which need not be there."""
    triton = importlib.import_module("triton")
    compiler, backends = (importlib.import_module(f"triton.{name}") for name in ("compiler", "backends.compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = importlib.import_module("tiered_kv.worker.kernel")
    names = kernel._copy_runs.arg_names
    constants = {"WORD_BYTES": 16, "ITEM": triton.language.int32, "ITEM_BYTES": 4, "PIECE_ITEMS": 1024, "PIECES": 8}
    signature = dict.fromkeys(constants, "constexpr") | {"runs": "*i64", "num_runs": "i32", "pieces_per_run": "i32"}
    source = compiler.ASTSource(
        kernel._copy_runs,
        {name: signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": kernel.WARPS})
    assert compiled.metadata.shared == 0, "warps wait for each other"
    accesses = set(re.findall(r"(ld|st)\.global\S*\.v4\.b32", compiled.asm["ptx"]))
    assert accesses == {"ld", "st"}
    assert not re.search(r"st\.global\S*[^4]\.b(8|16|32)\b", compiled.asm["ptx"])


@given(some=runs(30, 3000))
def test_evened_out_runs_copy_the_same_bytes(some: Runs) -> None:
    random = np.random.default_rng(0)
    source, destination = (random.integers(0, 256, some.buffer_bytes, dtype=np.uint8) for _ in range(2))
    even = even_out(some.plan(0, 0))
    assert np.array_equal(
        Runs(some.word_bytes, even.sources, even.destinations, even.lengths).copied(source, destination),
        some.copied(source, destination),
    )
    assert even.total_bytes == some.lengths.sum()
    assert len(even.lengths) <= 2 * len(some.lengths)
    assert even.lengths.max() <= 2 * (some.lengths.mean() + 16)
    assert not any((each % some.word_bytes).any() for each in (even.sources, even.destinations, even.lengths))


def test_too_many_pieces_are_refused(interpreted: Any) -> None:
    many = torch.empty((3, 1 << 20), dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="1048576 runs of up to 2147483647 bytes are too many"):
        interpreted.launch(many, (1 << 31) - 1, 16)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def check_on_gpu(some: Runs, seed: int, *, is_store: bool) -> None:
    random = np.random.default_rng(seed)
    source, destination = (random.integers(0, 256, some.buffer_bytes, dtype=np.uint8) for _ in range(2))
    expected = some.copied(source, destination)
    given, found = (torch.from_numpy(each.copy()) for each in (source, destination))
    given, found = (given.cuda(), found.pin_memory()) if is_store else (given.pin_memory(), found.cuda())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    KernelCopies(torch.device("cuda"), some.word_bytes).copy(some.plan(given.data_ptr(), found.data_ptr()), stream)
    stream.synchronize()
    assert np.array_equal(found.cpu().numpy(), expected)
    assert np.array_equal(given.cpu().numpy(), source)


@needs_gpu
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
@given(some=st.one_of(runs(300, 5000), runs(3, 2 << 20)), seed=st.integers(0, 99))
def test_on_a_gpu_it_copies_what_a_loop_over_slices_copies(is_store: bool, some: Runs, seed: int) -> None:
    check_on_gpu(some, seed, is_store=is_store)


@needs_gpu
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_on_a_gpu_it_copies_millions_of_runs(is_store: bool) -> None:
    lengths = np.full(3 << 20, 16, dtype=np.int64)
    starts = GUARD_BYTES + 16 * np.arange(len(lengths), dtype=np.int64)
    some = Runs(16, starts, starts[::-1].copy(), lengths)
    check_on_gpu(some, 0, is_store=is_store)


@needs_gpu
def test_on_a_gpu_the_kernel_copies_small_pages_both_ways() -> None:
    page_bytes = 4096
    cache = torch.zeros((2, page_bytes), dtype=torch.uint8, device="cuda")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(cache, page_bytes)], [[CanonicalKVCacheRef(0, page_bytes)]])
    region = PrimaryRegion(2, page_bytes)
    try:
        assert region.pin()
        chosen = choose_kernels(cache.device, lay_out(caches, region), region.array.ctypes.data)
        assert chosen.keys() == {LOAD, STORE}
    finally:
        region.close()
