"""A directory on a test bench: opened again and again, with known bytes under every key; and redis tiers."""

from __future__ import annotations

import contextlib
import mmap
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.disks import FaultyDisk
from tests.support.entries import OpenRig, rig_of
from tests.support.faulty import Gate
from tests.support.patient_nvme import waiting_until_closed
from tests.support.redis_servers import PATIENT, RedisServer
from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import DEFAULT_TENANT
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, block_content, make_keys
from tiered_kv.toolkit.claimed import Identity
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.jobs import Outcome
from tiered_kv_nvme.disk import Disk
from tiered_kv_nvme.pool import FREE_SEGMENTS
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.store import SegmentStore, StoreOptions

DIGEST = bytes(range(16))
WAIT_S = 60.0
"""Ends a test that fails; generous, because the machine may be busy."""


class StoreBench:
    """Opens segment stores on the directory `path`; stores and loads blocks of known content."""

    BATCHES = 60
    """Batches of `fill`: more than twice what the capacity holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.block_bytes = 4096
        self.capacity_bytes = 4 << 20
        self.segment_bytes: int | None = 256 << 10
        self.options: dict[str, object] = {"threads": 4, "room_timeout_s": WAIT_S}
        self.disk = FaultyDisk()
        """The disk of the store that was opened last without another `disk`."""
        self._opened: list[SegmentStore] = []

    @property
    def identity(self) -> Identity:
        return Identity(DIGEST, {"model": "bench"}, self.block_bytes)

    @property
    def segments(self) -> list[Path]:
        """The segment files, by slot."""
        return sorted(self.path.glob("segment-*.kv"))

    def open(self, disk: Disk | None = None, **options: object) -> SegmentStore:
        sizing = Sizing.of(self.capacity_bytes, self.block_bytes, self.segment_bytes)
        codecs = CodecSet(str(options.pop("codec", "raw")))
        chosen = StoreOptions(sizing, **{"codecs": codecs, **self.options, **options})  # type: ignore[arg-type]  # by name
        self.disk = FaultyDisk()
        store = SegmentStore(str(self.path), self.identity, chosen, disk=disk or self.disk)
        self._opened.append(store)
        return store

    def open_ready(self, disk: Disk | None = None, **options: object) -> SegmentStore:
        """Open a store and wait for its reclaimer, so that only stores and loads make system calls next."""
        store = self.open(disk, **options)
        self.wait_until_ready(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def crash(self) -> None:
        """Continue on a copy of the directory, before any store is closed."""
        self.path = shutil.copytree(self.path, self.path.with_name("crashed"))

    def put(
        self, store: SegmentStore, keys: Sequence[OffloadKey], epoch: int | None = None, tenant: str = DEFAULT_TENANT
    ) -> Outcome:
        blocks = self.memory(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            block[:] = block_content(key, self.block_bytes)
        return store.store(keys, blocks, epoch, tenant=tenant)

    def get(self, store: SegmentStore, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Load blocks, check the bytes of those that were loaded, and return their keys."""
        blocks = self.memory(len(keys))
        outcome = store.load(keys, blocks)
        loaded = set(keys if outcome.successful_keys is None else outcome.successful_keys)
        for key, block in zip(keys, blocks, strict=True):
            assert key not in loaded or block == block_content(key, self.block_bytes), "wrong bytes"
        return loaded

    def batch(self, number: int) -> list[OffloadKey]:
        return make_keys(40, f"batch {number}")

    def fill(self, store: SegmentStore, numbers: Iterable[int] = range(BATCHES)) -> None:
        """Store these batches."""
        for number in numbers:
            assert self.put(store, self.batch(number)).successful_keys is None

    @contextlib.contextmanager
    def held(self, gate: Gate, call: Callable[[], object]) -> Iterator[list[object]]:
        """Run `call` on a thread "held"; keep it at the gate during the `with` block. The list gets its result.

        The store's disk has a `hold(gate, "held")`.
        """
        results: list[object] = []
        gate.close()
        thread = threading.Thread(target=lambda: results.append(call()), name="held")
        thread.start()
        try:
            self.wait_until(lambda: gate.waiting)
            yield results
        finally:
            gate.open()
            thread.join()

    def memory(self, count: int) -> list[memoryview]:
        """Return page-aligned memory for `count` adjacent blocks."""
        flat = memoryview(mmap.mmap(-1, max(1, count) * self.block_bytes))
        return [flat[at : at + self.block_bytes] for at in range(0, count * self.block_bytes, self.block_bytes)]

    def wait_until(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        wait_until(condition, timeout_s, pause_s=0.001)

    def wait_until_ready(self, store: SegmentStore) -> None:
        """Return once the reclaimer has nothing to do."""
        self.wait_until(lambda: store.stats()["free_segments"] == FREE_SEGMENTS)

    def segment_sizes(self) -> set[int]:
        sizes = set()
        for path in self.segments:
            with contextlib.suppress(FileNotFoundError):  # the reclaimer may delete some
                sizes.add(path.stat().st_size)
        return sizes

    def occupied_bytes(self) -> int:
        """Return what `du` shows for the directory."""
        return sum(_blocks(path) * 512 for path in (self.path, *self.path.iterdir()))


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks
    except FileNotFoundError:
        return 0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[StoreBench]:
    """A bench on an empty directory. The end of the test closes its stores, however long the disk takes."""
    bench = StoreBench(tmp_path / "kv")
    with waiting_until_closed():
        yield bench
        bench.close()


OpenRedis = Callable[..., TierRig]


@pytest.fixture
def open_redis(closing: contextlib.ExitStack) -> OpenRedis:
    """Return a callable that opens a redis tier by its settings, closed at the end of the test."""

    def open_(block_bytes: int = 16 << 10, digest: bytes = DIGEST, **settings: object) -> TierRig:
        entry = {"type": "redis", **PATIENT, **settings}
        num_blocks = (8 << 20) // block_bytes
        rig = rig_of(entry, block_bytes=block_bytes, num_blocks=num_blocks, namespace=digest)
        return closing.enter_context(contextlib.closing(rig))

    return open_


def block_names(server: RedisServer) -> list[bytes]:
    return [name for name in server.keys("tkv1:*") if not name.endswith((b":epoch", b":namespace"))]


def calls(server: RedisServer, command: str) -> int:
    """Return how often the server was asked for a command."""
    found = re.search(rf"cmdstat_{command}:calls=(\d+)", server.call("INFO", "commandstats").decode())
    return int(found[1]) if found else 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of the test's fs tiers."""
    return tmp_path / "kv"


@pytest.fixture
def open_rig(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, closing: contextlib.ExitStack
) -> OpenRig:
    """Open fs tiers on the directory, with the module's block size and capacity; they are closed at the end."""
    # Or a test waits for a second after each refusal. It is longer than `_BUSY_PAUSE_S`, or stores never see it.
    monkeypatch.setattr("tiered_kv_fs.grants._REFUSAL_S", 0.2)
    # On a busy machine, stores find room later, and a client takes longer to return its grants.
    monkeypatch.setattr("tiered_kv_fs.tier._ROOM_TIMEOUT_MAX_S", WAIT_S)
    monkeypatch.setattr("tiered_kv_fs.tier._SHUTDOWN_TIMEOUT_S", WAIT_S)
    sizes = {"block_bytes": request.module.BLOCK_BYTES, "capacity": request.module.CAPACITY_BYTES}

    def open_one(namespace: bytes = DIGEST, **changes: int) -> TierRig:
        chosen = {**sizes, **changes}
        entry = {"type": "fs", "path": str(path), "capacity": chosen["capacity"], "threads": 4, "job_timeout": "120s"}
        rig = rig_of(entry, block_bytes=chosen["block_bytes"], num_blocks=256, namespace=namespace)
        return closing.enter_context(contextlib.closing(rig))

    return open_one
