"""Handlers copy the same bytes as a plain loop over slices, in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.conftest import start_device
from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import WorkerHandlers, open_handlers

torch = pytest.importorskip("torch")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]
DTYPES = [torch.int8, torch.bfloat16, torch.float32]
NUM_ROWS = 24


@dataclass
class TensorShape:
    """A tensor in a buffer of bytes: block b begins at `start + b * (page + gap)`."""

    num_blocks: int
    page_bytes: int
    gap_bytes: int
    start: int
    dtype: Any
    form: str

    @property
    def stride_bytes(self) -> int:
        return self.page_bytes + self.gap_bytes

    @property
    def buffer_bytes(self) -> int:
        return self.start + self.num_blocks * self.stride_bytes

    def view(self, buffer: Any) -> Any:
        """Return the tensor over `buffer`, uint8 of `buffer_bytes`."""
        items = buffer[self.start :].view(self.dtype)
        size = items.element_size()
        page, stride = self.page_bytes // size, self.stride_bytes // size
        if self.form == "halves":  # (blocks, 2, ...), as attention backends have it
            return items.as_strided((self.num_blocks, 2, page // 2), (stride, page // 2, 1))
        if self.form == "pieces" and not self.gap_bytes:  # more entries than blocks
            return items.reshape(self.num_blocks * 2, page // 2)
        return items.as_strided((self.num_blocks, page), (stride, 1))


@dataclass
class Case:
    tensors: list[TensorShape]
    groups: list[list[tuple[int, int]]]
    """For each group its refs: a tensor, and how many bytes of its pages are used."""
    factor: int
    part_offset: int
    slack: int
    """Bytes of a row behind the worker's part."""
    block_ids: list[list[int]]
    firsts: list[int]
    rows: list[int]
    as_numpy: bool

    @property
    def part_bytes(self) -> int:
        return max(self.factor * sum(used for _, used in refs) for refs in self.groups)

    @property
    def row_bytes(self) -> int:
        return self.part_offset + self.part_bytes + self.slack

    @property
    def has_whole_rows(self) -> bool:
        return not any(
            ids and (first % self.factor or len(ids) % self.factor)
            for ids, first in zip(self.block_ids, self.firsts, strict=True)
        )

    def device_spec(self) -> GPULoadStoreSpec:
        ids = [block for group in self.block_ids for block in group]
        given = np.array(ids, dtype=np.int32) if self.as_numpy else ids
        return GPULoadStoreSpec(given, [len(group) for group in self.block_ids], self.firsts)  # type: ignore[arg-type]

    def region_spec(self) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(self.rows)

    def copy_by_slices(self, buffers: list[Bytes], region: Bytes, *, is_store: bool) -> None:
        """The reference: one slice after the other, as the documentation of the layout says."""
        rows = iter(self.rows)
        for refs, blocks, first in zip(self.groups, self.block_ids, self.firsts, strict=True):
            row = -1
            for number, block in enumerate(blocks):
                page = (first + number) % self.factor
                if number == 0 or page == 0:
                    row = next(rows)
                at = self.part_offset
                for tensor, used in refs:
                    shape = self.tensors[tensor]
                    begin = shape.start + block * shape.stride_bytes
                    device = buffers[tensor][begin : begin + used]
                    place = region[row, at + page * used : at + (page + 1) * used]
                    if is_store:
                        place[:] = device
                    else:
                        device[:] = place
                    at += self.factor * used
        assert next(rows, None) is None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors = [
        TensorShape(
            num_blocks=draw(st.integers(1, 9)),
            page_bytes=8 * draw(st.integers(1, 5)),
            gap_bytes=draw(st.sampled_from([0, 0, 8, 24])),
            start=8 * draw(st.integers(0, 2)),
            dtype=draw(st.sampled_from(DTYPES)),
            form=draw(st.sampled_from(["rows", "halves", "pieces"])),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    groups: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.integers(0, len(tensors) - 1), min_size=0 if groups else 1, max_size=3, unique=True))
        # Whole pages more often than not, since only those can be copied as one with their neighbours.
        groups.append(
            [
                (index, draw(st.sampled_from([tensors[index].page_bytes] * 2 + [1, tensors[index].page_bytes - 3])))
                for index in chosen
            ]
        )
    factor = draw(st.integers(1, 4))
    has_whole_rows = draw(st.booleans())  # all of them do
    firsts = [draw(st.integers(0, 9)) * (factor if has_whole_rows else 1) for _ in groups]
    block_ids = []
    taken: set[tuple[int, int]] = set()  # no page is loaded twice: runs are copied in any order
    for refs in groups:
        # A group without a ref has no layer in this worker: its blocks are named, and nothing is copied.
        blocks = range(min(tensors[index].num_blocks for index, _ in refs or enumerate(tensors)))
        free = [block for block in blocks if taken.isdisjoint((index, block) for index, _ in refs)]
        ids = draw(st.one_of(st.permutations(free), st.just(free)))
        count = draw(st.integers(0, len(free)))
        block_ids.append(list(ids)[: count - (count % factor if has_whole_rows else 0)])
        taken.update((index, block) for index, _ in refs for block in block_ids[-1])
    touched = sum(
        -(-(first % factor + len(ids)) // factor) if ids else 0 for first, ids in zip(firsts, block_ids, strict=True)
    )
    begin = draw(st.integers(0, NUM_ROWS - touched)) if touched <= NUM_ROWS else 0
    in_order = list(range(begin, begin + touched))
    rows = draw(st.one_of(st.just(in_order), st.permutations(range(max(NUM_ROWS, touched))).map(lambda p: p[:touched])))
    return Case(
        tensors,
        groups,
        factor,
        draw(st.integers(0, 50)),
        draw(st.sampled_from([0, 0, 7])),
        block_ids,
        firsts,
        list(rows),
        draw(st.booleans()),
    )


def finish(handlers: WorkerHandlers, job_id: int, spec: tuple[object, object], *, is_store: bool) -> int:
    """Run one job to its end, and return its bytes."""
    handler = handlers.store if is_store else handlers.load
    assert handler.transfer_async(job_id, spec)
    handler.wait([job_id])
    (result,) = handler.get_finished()
    assert result.job_id == job_id
    assert result.success
    assert result.transfer_type == (("GPU", "CPU") if is_store else ("CPU", "GPU"))
    assert result.transfer_time is not None
    assert result.transfer_time >= 0
    assert result.transfer_size is not None
    return result.transfer_size


def test_the_driver_is_started_before_descriptors_are_counted(request: pytest.FixtureRequest) -> None:
    names = request.fixturenames
    assert names.index("_driver_is_started") < names.index("_nothing_left_behind")
    start_device("cpu")


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases(), seed=st.integers(0, 1 << 16))
def test_a_transfer_copies_what_a_loop_over_slices_copies(device: str, case: Case, seed: int) -> None:
    random = np.random.default_rng(seed)
    region = PrimaryRegion(max(NUM_ROWS, len(case.rows)), case.row_bytes)
    buffers = [random.integers(0, 256, shape.buffer_bytes, dtype=np.uint8) for shape in case.tensors]
    on_device = [torch.from_numpy(buffer.copy()).to(device) for buffer in buffers]
    handlers = open_handlers(
        CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(shape.view(buffer), shape.page_bytes)
                for shape, buffer in zip(case.tensors, on_device, strict=True)
            ],
            [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in case.groups],
        ),
        region,
        block_size_factor=case.factor,
        part_offset=case.part_offset,
        part_bytes=case.part_bytes,
    )
    try:
        wanted_bytes = sum(
            len(ids) * sum(used for _, used in refs) for ids, refs in zip(case.block_ids, case.groups, strict=True)
        )
        region.array[:] = random.integers(0, 256, region.array.shape, dtype=np.uint8)
        expected = region.array.copy()
        if case.has_whole_rows:
            case.copy_by_slices(buffers, expected, is_store=True)
            assert finish(handlers, 1, (case.device_spec(), case.region_spec()), is_store=True) == wanted_bytes
        else:
            with pytest.raises(ValueError, match="expected a store of whole offloaded blocks"):
                handlers.store.transfer_async(1, (case.device_spec(), case.region_spec()))
        assert np.array_equal(region.array, expected)

        region.array[:] = random.integers(0, 256, region.array.shape, dtype=np.uint8)
        case.copy_by_slices(buffers, region.array, is_store=False)
        before = region.array.copy()
        assert finish(handlers, 2, (case.region_spec(), case.device_spec()), is_store=False) == wanted_bytes
        for buffer, loaded in zip(buffers, on_device, strict=True):
            assert np.array_equal(loaded.cpu().numpy(), buffer)
        assert np.array_equal(region.array, before), "a load only reads the region"
    finally:
        handlers.shutdown()
        assert region.close()
