"""A server's rows are allocated before an engine gets them: where pages are refused, there are fewer rows."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tiered_kv
from tests.support.host_server import BLOCK_BYTES, WAIT_S, Engine, Served, keys_of, serving, stack_of
from tiered_kv.base import OffloadKey
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ResourceError
from tiered_kv.metrics.series import CounterView
from tiered_kv.server import allocation, memory
from tiered_kv.server.attach import Attachment
from tiered_kv.server.generations import Generations
from tiered_kv.server.memory import HostRegion
from tiered_kv.server.protocol import Hello
from tiered_kv.server.worker import HostWorker
from tiered_kv.system.limits import Limit, Limits
from tiered_kv.testing.control import wait_until
from tiered_kv.worker.handlers import WorkerHandlers

CHUNK_ROWS, ROWS = 16, 256
CHUNK_BYTES = CHUNK_ROWS * BLOCK_BYTES
_populate = allocation.populate


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(allocation, "FIRST_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(memory, "_LOOK_BYTES", CHUNK_BYTES)


class Pages:
    """Refuses pages, or lets their allocation wait. The first address that is touched is that of the first row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.refused_from = 1 << 62
        self.error = errno.EFAULT
        self.touched: list[int] = []
        self._lock = threading.Lock()
        monkeypatch.setattr(allocation, "populate", self._touch)

    def _touch(self, address: int, length: int) -> None:
        with self._lock:
            self.touched.append(address)
            offset = address - min(self.touched)
        if offset:
            assert self.may_go_on.wait(WAIT_S)
        if offset + length > self.refused_from:
            raise OSError(self.error, os.strerror(self.error))
        _populate(address, length)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    return Pages(monkeypatch)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def wait_for_rows(served: Served) -> int:
    region = served.host.region
    wait_until(lambda: not region.is_allocating)
    return region.ready_rows


def store_all(engine: Engine, count: int = 2 * ROWS) -> set[int]:
    """Store more blocks than there are rows, and return the rows that were written."""
    rows, region_row = set[int](), engine.region_row

    def noted(row: int) -> memoryview:
        rows.add(row)
        return region_row(row)

    engine.region_row = noted  # type: ignore[method-assign]
    for first in range(0, count, 4):
        engine.store(keys_of(4, first))
    return set(map(int, rows))


def test_only_rows_that_are_allocated_are_handed_out(tmp_path: Path, pages: Pages) -> None:
    pages.may_go_on.clear()
    with serving(tmp_path, stack_of(ROWS)) as served:
        engine, region = served.engine(), served.host.region
        assert region.is_allocating, "the server answers meanwhile"
        written = store_all(engine)
        assert written <= set(range(CHUNK_ROWS))
        assert allocated_bytes(region.fd) == CHUNK_BYTES, "no touch has allocated a page"
        pages.may_go_on.set()
        assert wait_for_rows(served) == ROWS
        assert max(store_all(engine)) == ROWS - 1
        assert allocated_bytes(region.fd) == ROWS * BLOCK_BYTES
        assert CounterView(served.host.observed().snapshot())["cpu"]["ready_bytes"] == ROWS * BLOCK_BYTES


@pytest.mark.parametrize("chunks", [1, 2, 7, 15])
def test_where_pages_are_refused_the_server_has_fewer_rows_and_says_so(
    chunks: int, tmp_path: Path, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    pages.refused_from = chunks * CHUNK_BYTES
    caplog.set_level(logging.INFO)
    with serving(tmp_path, stack_of(ROWS)) as served:
        engine = served.engine()
        rows = wait_for_rows(served)
        assert rows == chunks * CHUNK_ROWS
        assert store_all(engine) <= set(range(rows))
        assert engine.load(keys_of(4, 2 * ROWS - 4)) == 4
        counted = CounterView(served.host.observed().snapshot())["cpu"]
        assert counted["ready_bytes"] == rows * BLOCK_BYTES
        assert counted["used_blocks"] <= rows
    assert (
        f"the rows' memory cannot be allocated: Bad address; only the rows in {64 * chunks}KiB of 1MiB" in caplog.text
    )
    assert "100% of" not in caplog.text


def test_an_engine_stores_much_at_once_where_pages_are_refused_after_it_has_attached(
    tmp_path: Path, pages: Pages
) -> None:
    """It was told of more rows, and asks for more than there are: it attaches anew, and stores a part."""
    pages.refused_from = 2 * CHUNK_BYTES
    pages.may_go_on.clear()
    with serving(tmp_path, stack_of(ROWS)) as served:
        engine = served.engine()
        pages.may_go_on.set()
        rows = wait_for_rows(served)
        keys = keys_of(ROWS // 4)
        written: list[OffloadKey] = []

        def store() -> bool:
            written[:] = engine.store(keys)  # nothing, while it attaches anew
            return bool(written)

        wait_until(store)
        assert len(written) == rows // 4
        assert engine.load(written) == len(written)
        assert engine.manager.server.losses == 1, "it asks for no more from there on"


def test_few_rows_are_shared_as_all_of_them_would_be(tmp_path: Path, pages: Pages) -> None:
    pages.refused_from = 2 * CHUNK_BYTES
    with serving(tmp_path, stack_of(ROWS)) as served:
        rows, host = wait_for_rows(served), served.host
        for number, engine in enumerate([served.engine(), served.engine()]):
            for first in range(0, rows, 4):
                engine.store(keys_of(4, 100 * number + first))
        assert served.count(lambda host: host.leases_max) == rows // 2
        assert served.count(lambda host: host.lease_room) == rows * 3 // 4
        assert served.count(lambda host: host.granted) <= rows // 2
        assert host.manager._promotions.blocks_max == rows // 2


def test_a_server_whose_first_rows_are_refused_does_not_start(tmp_path: Path, pages: Pages) -> None:
    pages.refused_from = 0
    with pytest.raises(ResourceError, match="the rows' memory cannot be allocated: Bad address"), serving(tmp_path):
        pass


@pytest.mark.parametrize("refused_from", [5 * CHUNK_BYTES, 1 << 62])
def test_blocks_that_are_larger_than_what_the_start_waits_for(refused_from: int, tmp_path: Path, pages: Pages) -> None:
    pages.refused_from = refused_from
    pages.may_go_on.clear()
    stack = {
        "namespace": {"model": "m"},
        "block": {"bytes": 3 * CHUNK_BYTES},
        "primary": {"capacity": 12 * CHUNK_BYTES},
    }
    blocks, found = np.full((1, 3 * CHUNK_BYTES), 7, np.uint8), np.zeros((1, 3 * CHUNK_BYTES), np.uint8)
    with serving(tmp_path, stack) as served, tiered_kv.connect(served.address) as cache:
        assert served.host.region.ready_rows == 0
        assert cache.put([b"a"], blocks, timeout=0.0) == 0
        assert cache.get([b"a"], found, timeout=0.0) == 0
        pages.may_go_on.set()
        rows = wait_for_rows(served)
        assert rows == (1 if refused_from < 1 << 62 else 4)
        wait_until(lambda: rows == 1 or cache.put([b"a"], blocks) == 1)
        assert rows == 1 or cache.get([b"a"], found, WAIT_S) == 1
        assert rows == 1 or (found == 7).all()


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is free of the memory: the last number, once all others were asked for."""
    free = [ROWS * BLOCK_BYTES]
    monkeypatch.setattr(allocation, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(allocation, "LOOKS_MAX", 1 << 30)
    monkeypatch.setattr(
        Limits, "free_memory", lambda *_, **__: [Limit(free.pop(0) if len(free) > 1 else free[0], "memory.max")]
    )
    return free


SPARE_BYTES = ROWS * BLOCK_BYTES // memory.SPARE_SHARE


def test_rows_leave_memory_free_for_everything_else_until_there_is_more(
    tmp_path: Path, free_bytes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Other processes fill the memory meanwhile: to go on would let the kernel kill one of them, or the server."""
    free_bytes += [SPARE_BYTES + left * CHUNK_BYTES for left in (4, 3, 2, 1, 0)]
    with serving(tmp_path, stack_of(ROWS)) as served:
        region = served.host.region
        wait_until(lambda: "until more are free" in caplog.text)
        wait_until(lambda: region.ready_rows == 5 * CHUNK_ROWS)
        assert region.is_allocating
        assert store_all(served.engine()) <= set(range(5 * CHUNK_ROWS))
        assert allocated_bytes(region.fd) == 5 * CHUNK_BYTES
        free_bytes += [1 << 40]
        assert wait_for_rows(served) == ROWS
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert said == [
        "128KiB are free (memory.max), of which 128KiB are spared: "
        "the server uses the rows in 320KiB of 1MiB until more are free"
    ]


def test_a_server_that_waits_for_memory_ends_at_once(free_bytes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "LOOK_AGAIN_S", 3600.0)
    free_bytes += [SPARE_BYTES]
    region = HostRegion(ROWS, BLOCK_BYTES, prefault=True)
    assert region.ready_rows == CHUNK_ROWS
    region.close()


def test_without_a_thread_no_start_waits_for_memory(free_bytes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise ResourceError("no thread")

    monkeypatch.setattr(allocation, "start_thread", refuse)
    free_bytes += [SPARE_BYTES + CHUNK_BYTES, SPARE_BYTES]
    with closing(HostRegion(ROWS, BLOCK_BYTES, prefault=True)) as region:
        assert region.ready_rows == 2 * CHUNK_ROWS
        assert not region.is_allocating


@pytest.mark.parametrize("code", [0, errno.ENOSPC])
def test_an_older_kernel_allocates_the_file(
    code: int, tmp_path: Path, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no MADV_POPULATE_WRITE."""
    pages.refused_from, pages.error = 0, errno.EINVAL
    fallocate = os.posix_fallocate

    def allocate(fd: int, offset: int, length: int) -> None:
        if code and offset >= 3 * CHUNK_BYTES:
            raise OSError(code, os.strerror(code))
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with serving(tmp_path, stack_of(ROWS)) as served:
        rows = wait_for_rows(served)
        assert rows == (3 * CHUNK_ROWS if code else ROWS)
        assert allocated_bytes(served.host.region.fd) == rows * BLOCK_BYTES
        assert store_all(served.engine()) <= set(range(rows))


def test_all_rows_are_allocated_if_the_system_gives_no_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise ResourceError("no thread")

    monkeypatch.setattr(allocation, "start_thread", refuse)
    with closing(HostRegion(ROWS, BLOCK_BYTES, prefault=True)) as region:
        assert region.ready_rows == ROWS
        assert not region.is_allocating


def test_allocating_changes_no_byte_and_logs_its_progress(pages: Pages, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pages.may_go_on.clear()
    with closing(HostRegion(10 * CHUNK_ROWS, BLOCK_BYTES, prefault=True)) as region:
        region.flat[-1] = region.flat[0] = 42
        pages.may_go_on.set()
        wait_until(lambda: not region.is_allocating)
        assert allocated_bytes(region.fd) == 10 * CHUNK_BYTES
        assert region.flat[-1] == region.flat[0] == 42
        assert not any(region.flat[1:-1])
    assert "100% of the rows' 640KiB are allocated" in caplog.text


def test_closing_stops_it(pages: Pages) -> None:
    pages.may_go_on.clear()
    region = HostRegion(ROWS, BLOCK_BYTES, prefault=True)
    closer = threading.Thread(target=region.close)
    closer.start()
    wait_until(lambda: region._allocation is not None and not region._allocation._end)
    pages.may_go_on.set()
    closer.join(3 * WAIT_S)
    assert not closer.is_alive()
    assert len(pages.touched) <= 1 + 4, "one chunk that each thread has begun"


def test_the_numbers_beside_the_rows_are_allocated_by_the_server() -> None:
    with closing(Generations(ROWS * 1024)) as generations:
        assert allocated_bytes(generations.fd) == ROWS * 1024 * 4


@pytest.mark.parametrize("prefault", [None, True, False])
def test_a_program_hears_whether_rows_may_count_for_it(
    prefault: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stack = stack_of(ROWS)
    if prefault is not None:
        stack["primary"] = {"capacity": ROWS * BLOCK_BYTES, "prefault": prefault}
    found = [Limit(100 << 30, "memory.max of the cgroup /a"), Limit(1 << 40, "x")]
    monkeypatch.setattr(Limits, "memory", lambda *_: found)
    caplog.set_level(logging.INFO)
    with serving(tmp_path, stack) as served, tiered_kv.connect(served.address) as cache:
        assert cache.is_attached
        region = served.host.region
        wait_until(lambda: not region.is_allocating)
        assert allocated_bytes(region.fd) == (0 if prefault is False else ROWS * BLOCK_BYTES)
        assert region.ready_rows == ROWS
    warned = [each.getMessage() for each in caplog.records if "may count for this process" in each.getMessage()]
    assert len(warned) == (prefault is False)
    assert all("1MiB" in each and "100GiB (memory.max of the cgroup /a)" in each for each in warned)
    assert all("primary.prefault" in each for each in warned)
    assert ("the server allocates its rows" in caplog.text) is (prefault is not False)


@pytest.mark.parametrize("refused_from", [5 * CHUNK_BYTES, 1 << 62])
def test_who_pins_rows_has_those_that_are_allocated_and_no_other(
    refused_from: int, tmp_path: Path, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    """To pin a page allocates it, and counts for who pins it."""
    pinned: list[PrimaryRegion] = []

    def pin(region: PrimaryRegion) -> WorkerHandlers:
        region.array[:] = 1
        pinned.append(region)
        return WorkerHandlers(store=mock.Mock(), load=mock.Mock())

    pages.refused_from = refused_from
    pages.may_go_on.clear()
    with serving(tmp_path, stack_of(ROWS)) as served:
        worker = HostWorker(Attachment(served.address, Hello("engine", "worker"), pins_rows=True), pin)
        try:
            assert not pinned
            assert "still allocates its rows" in caplog.text
            assert allocated_bytes(served.host.region.fd) == CHUNK_BYTES
            pages.may_go_on.set()
            rows = wait_for_rows(served)
            wait_until(lambda: bool(pinned))
            assert pinned[0].num_blocks == rows == min(ROWS, refused_from // BLOCK_BYTES)
            assert served.host.region.ready_rows == rows
        finally:
            for handler in (worker.handlers.store, worker.handlers.load):
                handler.shutdown()


def test_a_server_waits_for_memory_for_a_bounded_time(
    free_bytes: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that pin the rows wait for its end."""
    monkeypatch.setattr(allocation, "LOOKS_MAX", 3)
    free_bytes += [SPARE_BYTES + CHUNK_BYTES, SPARE_BYTES]
    with closing(HostRegion(ROWS, BLOCK_BYTES, prefault=True)) as region:
        wait_until(lambda: not region.is_allocating)
        assert region.ready_rows == 2 * CHUNK_ROWS
    assert "only the rows in 128KiB of 1MiB are used" in caplog.text


def test_rows_of_two_namespaces_do_not_take_the_same_free_memory(
    free_bytes: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What one may take after it has looked, and has not taken yet, is not free for the other."""
    may_go_on = threading.Event()

    def touch(address: int, length: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_go_on.wait(WAIT_S)
        _populate(address, length)

    monkeypatch.setattr(allocation, "populate", touch)
    monkeypatch.setattr(memory, "_LOOK_BYTES", ROWS * BLOCK_BYTES)
    with closing(HostRegion(ROWS, BLOCK_BYTES, prefault=True)) as first:
        wait_until(lambda: first._allocation is not None and first._allocation._next == 5 * CHUNK_BYTES)
        assert not caplog.text
        with closing(HostRegion(ROWS, BLOCK_BYTES, prefault=True)) as second:
            try:
                wait_until(lambda: "until more are free" in caplog.text)
            finally:
                may_go_on.set()
            wait_until(lambda: not first.is_allocating and not second.is_allocating)
            assert first.ready_rows == second.ready_rows == ROWS
