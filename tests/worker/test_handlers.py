"""Handlers work in order, refuse impossible transfers, and stop at shutdown."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.faulty import Gate
from tests.support.shortages import Resource, outage
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ShutdownError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.testing.control import wait_until
from tiered_kv.worker import open_handlers
from tiered_kv.worker.cpu import CpuCopier, CpuCopy, copy_runs
from tiered_kv.worker.handlers import CopyHandler, WorkerHandlers
from tiered_kv.worker.plan import LOAD, STORE, CopyPlan, lay_out

torch = pytest.importorskip("torch")

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]
BLOCK_BYTES = 512


def caches_of(tensor: Any, page_bytes: int, refs: list[list[tuple[int, int]]] | None = None) -> CanonicalKVCaches:
    groups = [[(0, page_bytes)]] if refs is None else refs
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes)], [[CanonicalKVCacheRef(*ref) for ref in group] for group in groups]
    )


class Copying(CpuCopier):
    """Copies by a function of the test."""

    def __init__(self, copy: Callable[[CopyPlan], float]) -> None:
        super().__init__("tiered-kv-store")
        self._copy = copy

    def submit(self, plan: CopyPlan) -> CpuCopy:
        return CpuCopy(self._threads.submit(self._copy, plan))


class Rig:
    """A cache of 16 blocks of 512 bytes, and a region of 16 rows; `copy` does what the handler of stores shall do."""

    def __init__(self, device: str, copy: Callable[[CopyPlan], float] | None = None) -> None:
        self.region = PrimaryRegion(16, BLOCK_BYTES)
        self.cache = torch.zeros((16, BLOCK_BYTES), dtype=torch.uint8, device=device)
        caches = caches_of(self.cache, BLOCK_BYTES)
        if copy is None:
            self.handlers = open_handlers(caches, self.region)
        else:
            layout, memory = lay_out(caches, self.region), (caches, self.region.array)
            self.handlers = WorkerHandlers(
                *(
                    CopyHandler(layout, kind, Copying(copy), memory, check=lambda: None, on_shutdown=lambda: None)
                    for kind in (STORE, LOAD)
                )
            )

    def store(self, job_id: int, blocks: list[int], rows: list[int]) -> None:
        self.handlers.store.transfer_async(job_id, (GPULoadStoreSpec(blocks, [len(blocks)]), CPULoadStoreSpec(rows)))

    def load(self, job_id: int, rows: list[int], blocks: list[int]) -> None:
        self.handlers.load.transfer_async(job_id, (CPULoadStoreSpec(rows), GPULoadStoreSpec(blocks, [len(blocks)])))


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.handlers.shutdown()
    rig.region.close()


def test_jobs_of_a_direction_run_and_are_reported_in_the_order_of_their_submission(rig: Rig) -> None:
    for number in range(16):
        rig.cache[number] = number
    for number in range(16):
        rig.store(100 + number, [number], [3])  # all into one row: the last one's bytes stay
    rig.handlers.store.wait(range(100, 116))
    assert [result.job_id for result in rig.handlers.store.get_finished()] == list(range(100, 116))
    assert not rig.handlers.store.get_finished(), "each is reported once"
    assert (rig.region.array[3] == 15).all()


def test_a_transfer_for_which_there_is_no_thread_is_made_at_once_and_never_later(rig: Rig) -> None:
    rig.cache[5], rig.cache[3] = 5, 3
    with outage(Resource.THREAD):
        rig.store(1, [5], [0])
        rig.handlers.store.wait([1])
    assert [result.success for result in rig.handlers.store.get_finished()] == [True]
    assert (rig.region.array[0] == 5).all()
    rig.region.array[0] = 99  # the row belongs to another block now
    rig.store(2, [3], [1])
    rig.handlers.store.wait([2])
    assert (rig.region.array[0] == 99).all()
    assert (rig.region.array[1] == 3).all()


def test_a_store_sees_what_was_computed_before_it_was_submitted(rig: Rig) -> None:
    value = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=rig.cache.device)
    for _ in range(200):
        value += 1
    rig.cache[2] = value
    rig.store(1, [2], [0])
    rig.handlers.store.wait([1])
    assert (rig.region.array[0] == 200).all()


def test_waiting_for_a_job_that_is_unknown_or_reported_returns(rig: Rig) -> None:
    rig.store(1, [0], [0])
    rig.handlers.store.wait([1, 2])
    rig.handlers.store.get_finished()
    rig.handlers.store.wait({1})


def test_a_job_number_can_be_used_again_once_it_was_reported(rig: Rig) -> None:
    rig.store(1, [0], [0])
    with pytest.raises(ValueError, match="still to be reported"):
        rig.store(1, [0], [1])
    rig.handlers.store.wait([1])
    assert len(rig.handlers.store.get_finished()) == 1
    rig.store(1, [0], [1])


def test_nothing_is_copied_after_shutdown(rig: Rig) -> None:
    rig.store(1, [0], [0])
    rig.handlers.shutdown()
    rig.handlers.shutdown()
    assert [result.job_id for result in rig.handlers.store.get_finished()] == [1]
    with pytest.raises(ShutdownError):
        rig.store(2, [0], [0])
    with pytest.raises(ShutdownError):
        rig.load(2, [0], [0])
    assert rig.region.close(), "the memory is no longer used"


def test_copies_of_a_handler_that_is_dropped_do_not_outlive_their_memory(gate: Gate) -> None:
    def held_up(plan: CopyPlan) -> float:
        gate.pass_through()
        was_there.append(memory() is not None)
        return 0.0

    was_there: list[bool] = []
    rigs = [Rig("cpu", held_up)]
    memory = weakref.ref(rigs[0].cache)
    region = rigs[0].region
    gate.close()
    for number in range(2):
        rigs[0].store(number, [number], [number])
    wait_until(lambda: gate.waiting == 1)
    dropping = threading.Thread(target=rigs.clear)
    dropping.start()
    gate.open()
    dropping.join()
    assert was_there
    assert all(was_there)
    assert memory() is None
    assert region.close()


def test_shutdown_waits_for_the_copy_that_runs_and_drops_those_behind_it(gate: Gate) -> None:
    def held_up(plan: CopyPlan) -> float:
        gate.pass_through()
        return copy_runs(plan)

    rig = Rig("cpu", held_up)
    store = rig.handlers.store
    assert isinstance(store, CopyHandler)
    rig.cache[:] = 7
    gate.close()
    for number in range(3):
        rig.store(number, [number], [number])
    assert not store.get_finished(), "the calls returned before any copy had ended"
    copies = [copy for copy, _ in store._transfers.values()]
    wait_until(lambda: gate.waiting == 1)
    closing = threading.Thread(target=store.shutdown)
    closing.start()
    wait_until(lambda: [copy.has_ended() for copy in copies] == [False, True, True])
    assert closing.is_alive()
    gate.open()
    closing.join()
    store.wait(range(3))  # also for those that were dropped
    assert [result.success for result in store.get_finished()] == [True, False, False]
    assert rig.region.array[:3, 0].tolist() == [7, 0, 0]
    rig.handlers.shutdown()
    rig.region.close()


def test_a_copy_that_fails_is_reported_and_the_next_one_succeeds() -> None:
    def fail_once(plan: CopyPlan) -> float:
        if not copied:
            copied.append(plan)
            raise OSError(14, "copied 0 of 512 bytes")
        return copy_runs(plan)

    copied: list[CopyPlan] = []
    rig = Rig("cpu", fail_once)
    rig.store(1, [0], [0])
    rig.store(2, [0], [0])
    rig.handlers.store.wait([1, 2])
    failed, done = rig.handlers.store.get_finished()
    assert (failed.success, failed.transfer_time, done.success) == (False, None, True)
    rig.handlers.shutdown()
    rig.region.close()


@pytest.mark.parametrize(
    ("blocks", "sizes", "firsts", "rows", "message"),
    [
        ([16], [1], [0], [0], r"device block_ids of group 0 must be 0 to 15, found 16"),
        ([-1], [1], [0], [0], r"device block_ids of group 0 must be 0 to 15, found -1"),
        ([0], [1], [0], [16], r"region block_ids must be 0 to 15, found 16"),
        ([0, 1], [2], [0], [0], r"touch 2 offloaded blocks of 1, found 1 region block_ids"),
        ([0], [1], [0], [0, 1], r"touch 1 offloaded blocks of 1, found 2 region block_ids"),
        ([0, 1], [1, 1], [0, 0], [0, 1], r"of 1 groups, found 2 and 2"),
        ([0], [1], [-1], [0], r"do not describe 1 device block_ids"),
    ],
)
def test_impossible_blocks_are_refused_and_nothing_is_copied(
    rig: Rig, blocks: list[int], sizes: list[int], firsts: list[int], rows: list[int], message: str
) -> None:
    spec = (GPULoadStoreSpec(blocks, sizes, firsts), CPULoadStoreSpec(rows))
    with pytest.raises(ValueError, match=message):
        rig.handlers.store.transfer_async(1, spec)
    with pytest.raises(ValueError, match=message):
        rig.handlers.load.transfer_async(1, spec[::-1])
    assert not rig.handlers.store.get_finished()


class ForeignSpec:
    """A spec of an engine's class."""

    def __init__(self, block_ids: object, **attributes: object) -> None:
        self.block_ids = block_ids
        self.__dict__.update(attributes)


def test_specs_are_read_by_their_attributes(rig: Rig) -> None:
    rig.cache[4] = 9
    spec = (ForeignSpec([4], group_sizes=None, block_indices=None), ForeignSpec(np.array([6], dtype=np.int32)))
    rig.handlers.store.transfer_async(1, spec)
    rig.handlers.store.wait([1])
    assert (rig.region.array[6] == 9).all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("GPU", ForeignSpec([0])), "str is no spec of blocks"),
        ((ForeignSpec([[0]]), ForeignSpec([0])), r"device block_ids must be integers of shape \(n,\)"),
        ((ForeignSpec([0]), ForeignSpec([0.5])), r"region block_ids must be integers of shape \(n,\), found float64"),
    ],
)
def test_what_is_no_spec_is_refused(rig: Rig, spec: tuple[object, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rig.handlers.store.transfer_async(1, spec)


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (CanonicalKVCaches([], [[CanonicalKVCacheRef(0, 1)]]), "must be on one device, found none"),
        (caches_of(torch.zeros(4, 8), 32, []), "have no group with a tensor"),
        (caches_of(torch.zeros(4, 8), 32, [[]]), "have no group with a tensor"),
        (caches_of(torch.zeros(4, 8), 32, [[(1, 32)]]), "refers to tensor 1, and there are 1"),
        (caches_of(torch.zeros(4, 8), 32, [[(0, 33)]]), "uses 33 bytes of tensor 0, whose blocks have 32"),
        (caches_of(torch.zeros(4, 8)[:, :7], 32), "uses 32 bytes of tensor 0, whose blocks have 28"),
        (caches_of(torch.zeros(4, 8), 31), "cannot be cut into pages of 31 bytes"),
        (caches_of(torch.zeros(0, 8), 32), "has no block"),
        (caches_of(torch.zeros(8, 4).t(), 32), "a block of tensor 0 is not contiguous"),
        (caches_of(torch.zeros(1, 8).expand(4, 8), 32), "cannot be cut into pages"),
        (caches_of(torch.zeros(4, 8, device="meta"), 32), "on 'meta' cannot be offloaded"),
        (caches_of(torch.zeros(4, 256), 1024), "this worker's part of a row is 512B"),
    ],
)
def test_caches_that_cannot_be_offloaded_are_refused(caches: CanonicalKVCaches, message: str) -> None:
    region = PrimaryRegion(4, 512)
    with pytest.raises(ValueError, match=message):
        open_handlers(caches, region)
    assert region.close()


@pytest.mark.parametrize(("offset", "part_bytes"), [(-1, 8), (512, 8), (0, 513), (500, 13)])
def test_a_part_outside_of_the_row_is_refused(offset: int, part_bytes: int) -> None:
    region = PrimaryRegion(4, 512)
    with pytest.raises(ValueError, match="does not lie in a row of 512 bytes"):
        open_handlers(caches_of(torch.zeros(4, 2), 8), region, part_offset=offset, part_bytes=part_bytes)
    with pytest.raises(ValueError, match="at least 1"):
        open_handlers(caches_of(torch.zeros(4, 2), 8), region, block_size_factor=0)
    region.close()


def canonical_caches(page: Any, workers: int, rank: int) -> tuple[Any, CanonicalKVCaches]:
    """Return a worker's heads of `page` (blocks, two heads, bytes), and its caches, mapped to both heads' page."""
    heads = max(1, 2 // workers)
    first, replicas = rank * 2 // workers, max(1, workers // 2)
    tensor = page[:, first : first + heads].reshape(len(page), -1).clone()
    size, head_bytes = tensor.shape[1], page.shape[2]
    runs = (CopyRun(0, first * head_bytes, head_bytes, heads, head_bytes, head_bytes),)
    mapping = CanonicalPageMapping(2 * head_bytes, size, runs, replicas, rank % replicas, True)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, size)], [[CanonicalKVCacheRef(0, size, mapping)]])
    return tensor, caches


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 4), (4, 2)])
def test_canonical_pages_are_read_by_another_number_of_workers(writers: int, readers: int) -> None:
    page = torch.arange(64, dtype=torch.uint8).reshape(4, 2, 8)  # four workers have each head twice
    region = PrimaryRegion(4, 64)
    blocks, rows = GPULoadStoreSpec([3, 0, 1, 2], [4]), CPULoadStoreSpec([1, 2])
    stored_bytes = 0
    for rank in range(writers):
        _, caches = canonical_caches(page, writers, rank)
        handlers = open_handlers(caches, region, block_size_factor=2)
        handlers.store.transfer_async(1, (blocks, rows))
        handlers.store.wait([1])
        stored_bytes += sum(result.transfer_size or 0 for result in handlers.store.get_finished())
        handlers.shutdown()
    assert stored_bytes == page.numel(), "each byte once"
    assert region.array[1:3, :32].tolist() == page[[3, 0, 1, 2]].reshape(2, 32).tolist()
    for rank in range(readers):
        tensor, caches = canonical_caches(page, readers, rank)
        expected = tensor.clone()
        tensor.zero_()
        handlers = open_handlers(caches, region, block_size_factor=2)
        handlers.load.transfer_async(1, (rows, blocks))
        handlers.load.wait([1])
        handlers.shutdown()
        assert torch.equal(tensor, expected)
