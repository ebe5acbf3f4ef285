"""A worker copies to and from the rows of a host's server, and of the server that replaces it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.host_server import BLOCK_BYTES, Engine, Served, keys_of, serving
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    ReqContext,
)
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import TieredKVError
from tiered_kv.server.attach import Attachment
from tiered_kv.server.engine_manager import AttachedEngineManager
from tiered_kv.server.protocol import Hello
from tiered_kv.server.worker import HostWorker
from tiered_kv.testing.control import wait_until
from tiered_kv.worker.handlers import WorkerHandlers, open_handlers

torch = pytest.importorskip("torch")

KEYS = keys_of(8)
NAME = "engine"
BLOCKS = 16


class Worker:
    """A worker with a KV cache in CPU memory, and the rows that it has mapped."""

    def __init__(self, address: str) -> None:
        self.cache = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.int8)
        self.regions: list[PrimaryRegion] = []
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self.cache, BLOCK_BYTES)], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]]
        )
        self.worker = HostWorker(Attachment(address, Hello(NAME, "worker")), partial(self._open, caches))
        self.handlers = self.worker.handlers
        self._job = 0

    def _open(self, caches: CanonicalKVCaches, region: PrimaryRegion) -> WorkerHandlers:
        self.regions.append(region)
        return open_handlers(caches, region)

    @property
    def mapped(self) -> list[bool]:
        """For each server in their order, whether its rows are still mapped."""
        return [region.array.size > 0 for region in self.regions]

    def copy(self, handler: OffloadingHandler, source: object, destination: object) -> None:
        self._job += 1
        handler.transfer_async(self._job, (source, destination))
        handler.wait({self._job})
        assert [(result.job_id, result.success) for result in handler.get_finished()] == [(self._job, True)]

    def store(self, blocks: Sequence[int], rows: object) -> None:
        self.copy(self.handlers.store, blocks_of(blocks), rows)

    def load(self, rows: object, blocks: Sequence[int]) -> None:
        self.copy(self.handlers.load, rows, blocks_of(blocks))


def blocks_of(numbers: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(numbers), group_sizes=[len(numbers)], block_indices=[0])


@contextmanager
def worker_of(served: Served) -> Iterator[Worker]:
    worker = Worker(served.address)
    try:
        yield worker
    finally:
        worker.handlers.shutdown()


def scheduler_of(served: Served) -> Engine:
    return served.engine(NAME, workers=1)


def store(scheduler: Engine, worker: Worker, keys: Sequence[OffloadKey], value: int) -> None:
    context = scheduler.begin()
    found: list[Any] = []

    def prepare() -> bool:
        found[:] = [scheduler.manager.prepare_store(keys, context)]
        return found[0] is not None and len(found[0].keys_to_store) > 0

    scheduler.step_until(prepare)
    worker.cache[: len(keys)] = value
    worker.store(range(len(keys)), copy.deepcopy(found[0].store_spec))
    scheduler.manager.complete_store(keys, context)
    scheduler.end(context)


def load(scheduler: Engine, worker: Worker, keys: Sequence[OffloadKey]) -> int:
    """Return the value that the worker has loaded; 0 if nothing was found."""
    context = scheduler.begin()
    found = scheduler.look_up(keys, context)
    worker.cache[:] = 0
    if found:
        worker.load(scheduler.manager.prepare_load(keys[:found], context), range(found))
        scheduler.manager.complete_load(keys[:found], context)
    scheduler.end(context)
    return int(worker.cache[0, 0])


def loading(served: Served, undo: ExitStack) -> tuple[Engine, Worker, ReqContext, LoadStoreSpec]:
    """Return an engine that the server's end does not close, its worker, and a load that was prepared."""
    scheduler, worker = scheduler_of(served), undo.enter_context(worker_of(served))
    undo.callback(scheduler.close)
    store(scheduler, worker, KEYS, 7)
    context = scheduler.begin()
    assert scheduler.look_up(KEYS, context) == len(KEYS)
    rows = scheduler.manager.prepare_load(KEYS, context)
    served.engines.clear()
    return scheduler, worker, context, rows


def test_a_worker_stores_and_loads_what_the_scheduler_tells(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        scheduler = scheduler_of(served)
        assert not scheduler.manager.is_attached
        with worker_of(served) as worker:
            store(scheduler, worker, KEYS, 7)
            assert load(scheduler, worker, KEYS) == 7
        scheduler.step_until(lambda: not scheduler.manager.is_attached)
        assert scheduler.load(KEYS) == 0


def test_the_rows_of_a_killed_server_stay_until_the_scheduler_needs_them_no_more(tmp_path: Path) -> None:
    with ExitStack() as undo:
        with serving(tmp_path) as served:
            scheduler, worker, context, rows = loading(served, undo)
        with serving(tmp_path) as served:
            wait_until(lambda: len(worker.regions) == 2)
            for _ in range(20):
                scheduler.manager.on_schedule_end()
            assert worker.mapped == [True, True]
            worker.load(rows, range(len(KEYS)))
            assert int(worker.cache[len(KEYS) - 1, 0]) == 7
            scheduler.manager.complete_load(KEYS, context)
            scheduler.end(context)
            scheduler.step_until(lambda: scheduler.manager.is_attached)
            wait_until(lambda: worker.mapped == [False, True])
            assert load(scheduler, worker, KEYS) == 0
            store(scheduler, worker, KEYS, 9)
            assert load(scheduler, worker, KEYS) == 9
            with pytest.raises(TieredKVError, match="not mapped"):
                worker.load(rows, range(len(KEYS)))


def test_an_engine_lets_the_memory_of_a_killed_server_go_once_no_copy_runs(tmp_path: Path) -> None:
    """The next server may need it to start."""
    with ExitStack() as undo:
        with serving(tmp_path) as served:
            scheduler, worker, context, _ = loading(served, undo)
        scheduler.step_until(lambda: scheduler.manager.link is None)
        scheduler.manager.on_schedule_end()
        assert worker.mapped == [True]
        scheduler.manager.complete_load(KEYS, context)
        scheduler.step_until(lambda: worker.mapped == [False])
        scheduler.end(context)


@pytest.mark.slow
def test_an_engine_without_requests_notices_that_its_server_has_gone(tmp_path: Path) -> None:
    with ExitStack() as undo:
        with serving(tmp_path) as served:
            manager = AttachedEngineManager(
                Attachment(served.address, Hello(NAME, "scheduler", workers=1), maps_rows=False)
            )
            undo.callback(manager.shutdown)
            worker = undo.enter_context(worker_of(served))
            wait_until(lambda: manager.is_attached)
        wait_until(lambda: worker.mapped == [False])
        with serving(tmp_path):
            wait_until(lambda: manager.is_attached)
            assert worker.mapped == [False, True]


def test_a_worker_starts_though_its_connection_is_lost_while_it_maps_the_rows(tmp_path: Path) -> None:
    with serving(tmp_path) as served:

        def lose(_: PrimaryRegion) -> WorkerHandlers:
            served.disconnect("worker")
            served.count(lambda _: 0)  # it is lost
            return WorkerHandlers(mock.Mock(), mock.Mock())

        worker = HostWorker(Attachment(served.address, Hello(NAME, "worker")), lose)
        scheduler = scheduler_of(served)
        scheduler.step_until(lambda: scheduler.manager.is_attached)
        worker.handlers.shutdown()


def test_a_worker_starts_without_a_server_and_maps_its_rows_later(tmp_path: Path) -> None:
    worker = Worker(f"unix:{tmp_path}/cache.sock")
    try:
        with serving(tmp_path) as served:
            store(scheduler_of(served), worker, KEYS, 7)
    finally:
        worker.handlers.shutdown()


def test_a_worker_whose_connection_is_lost_connects_again_and_keeps_the_rows(tmp_path: Path) -> None:
    with serving(tmp_path) as served, worker_of(served) as worker:
        scheduler = scheduler_of(served)
        store(scheduler, worker, KEYS, 7)
        served.disconnect("worker")
        scheduler.step_until(lambda: not scheduler.manager.is_attached)
        scheduler.step_until(lambda: scheduler.manager.is_attached)
        assert load(scheduler, worker, KEYS) == 7
        assert worker.mapped == [True]
