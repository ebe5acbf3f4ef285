"""A thread, a descriptor or memory is refused at each point: nothing stays behind, and the next call works."""

from __future__ import annotations

import itertools
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from tests.support.figures import Figures, Profile
from tests.support.footprint import Footprint, left_behind
from tests.support.host_server import serving
from tests.support.host_server import stack_of as host_stack_of
from tests.support.places import PlaceOf
from tests.support.shortages import DescriptorsLeft, Resource, Shortage
from tests.support.stacks import manager_of, plugged, stack_of
from tiered_kv.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadKey,
    make_offload_key,
)
from tiered_kv.config.hooks import TierType
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.errors import TieredKVError
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.counters import count_of
from tiered_kv.server import allocation
from tiered_kv.server.connect import connect
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.worker import SharedStack
from tiered_kv_memory.settings import MemorySettings
from tiered_kv_memory.tier import MemoryTier

pytestmark = [pytest.mark.trust, pytest.mark.slow]

BLOCK_BYTES, ROWS, COUNT = 4096, 8, 4
QUICK = {"lookup_timeout": "500ms", "job_timeout": "1s", "breaker_cooldown": "20ms"}
OF_TYPES: dict[str, dict[str, object]] = {
    "redis": {"connect_timeout": "500ms", "timeout": "500ms"},
    "s3": {"attempts": 2, "request_timeout": "500ms"},
}
RECOVERY_S = 20.0
STEP_S = 0.5
"""For what a call waits for."""
LENGTHS = {"one {}": 1, "no {} any more": math.inf}
"""How many calls in a row are refused during a step."""


class Subject(Protocol):
    """What is opened, used and closed under a shortage."""

    def open(self) -> None: ...
    def store(self) -> None: ...
    def load(self) -> None: ...
    def lookup(self) -> None: ...
    def audit(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def works(self) -> bool: ...
    def held(self) -> str: ...


class StackSubject:
    """A stack over one tier, or with all of its threads and sockets."""

    def __init__(self, entry: dict[str, object], **top: Any) -> None:  # Any: as of `stack_of`
        self._config = stack_of(entry, blocks=ROWS, block_bytes=BLOCK_BYTES, **top)
        self._is_audited = "audit" in top
        self._numbers = itertools.count(1)
        self._stack: Stack | None = None
        self._stored: list[OffloadKey] = []

    @property
    def stack(self) -> Stack:
        assert self._stack is not None
        return self._stack

    def open(self) -> None:
        self._stack = open_stack(self._config)

    def store(self) -> None:
        keys = [make_offload_key(next(self._numbers).to_bytes(16, "big"), 0) for _ in range(COUNT)]
        self.stack.put(keys, blocks_of(keys), timeout=STEP_S)
        self.stack.flush(STEP_S)
        self._stored = keys

    def load(self) -> None:
        self._evict()
        self._get(self._stored, STEP_S)

    def lookup(self) -> None:
        self._get([make_offload_key(b"absent", 0)], STEP_S)

    def audit(self) -> None:
        self._get(self._stored, STEP_S)
        self.stack.put(self._stored, blocks_of(self._stored), timeout=STEP_S)
        self.stack.flush(STEP_S)

    def reset(self) -> None:
        manager_of(self.stack).reset_cache()
        time.sleep(0.01)  # for the background task that writes it

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()

    def works(self) -> bool:
        """Return whether the tier stores and loads, and an audit compares."""
        stored, compared = self._count("stored_blocks_total"), self._count("audited_blocks_total", "cpu")
        self.store()
        if self._is_audited:
            self.audit()
            return self._count("audited_blocks_total", "cpu") > compared
        self._evict()
        return self._count("stored_blocks_total") > stored and self._get(self._stored, STEP_S) == COUNT

    def held(self) -> str:
        """Return what a call has not given back."""
        self.stack.flush(RECOVERY_S)
        primary, counters = manager_of(self.stack).primary, self.stack.counters()
        pinned = [block.ref_cnt for block in primary.blocks.values() if block.ref_cnt]
        lost = ROWS - primary.backend.get_num_free_blocks() - len(primary.blocks)
        names = ("pinned_bytes", "jobs_in_flight", "promotion_blocks")
        held = [f"{tier} {name}" for tier, counted in counters.items() for name in names if counted.get(name)]
        for guarded in manager_of(self.stack)._tiers:
            reserved = guarded.stores.reserved_blocks + guarded.loads.reserved_blocks
            held += [f"{reserved} blocks reserved"] if reserved else []
        return "; ".join(held + [f"pins {pinned}"] * bool(pinned) + [f"{lost} rows lost"] * bool(lost))

    def _count(self, name: str, tier: str = "") -> int:
        return count_of(self.stack.counters(), tier or self.stack.tier_names[0], name)

    def _evict(self) -> None:
        """Fill the primary tier with other blocks."""
        others = [make_offload_key(next(self._numbers).to_bytes(16, "big"), 0) for _ in range(ROWS)]
        self.stack.put(others, blocks_of(others), timeout=STEP_S)
        self.stack.flush(STEP_S)

    def _get(self, keys: list[OffloadKey], timeout: float) -> int:
        out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
        count = self.stack.get(keys, out, timeout=timeout)
        assert (out[:count] == blocks_of(keys)[:count]).all(), "wrong bytes"
        return count


class DirectSubject:
    """The same over a caller's memory."""

    def __init__(self, entry: dict[str, object]) -> None:
        self._entry = entry
        self._memory = np.zeros((ROWS, BLOCK_BYTES), np.uint8)
        self._numbers = itertools.count(1)
        self._tiers: DirectTiers | None = None
        self._stored: list[OffloadKey] = []

    @property
    def tiers(self) -> DirectTiers:
        assert self._tiers is not None
        return self._tiers

    def open(self) -> None:
        self._tiers = DirectTiers(
            self._memory, block_bytes=BLOCK_BYTES, tiers=[self._entry], namespace=Namespace(model="m"), wait_s_max=2.0
        )

    def store(self) -> None:
        self._stored = [make_offload_key(next(self._numbers).to_bytes(16, "big"), 0) for _ in range(COUNT)]
        self._memory[:COUNT] = blocks_of(self._stored)
        self._answers = self.tiers.wait("store", self._stored, offsets(0), timeout_s=RECOVERY_S)

    def load(self) -> None:
        self._answers = self.tiers.wait("load", self._stored, offsets(COUNT), timeout_s=RECOVERY_S)
        loaded = [number for number, answer in enumerate(self._answers) if answer]
        assert (self._memory[COUNT:][loaded] == blocks_of(self._stored)[loaded]).all(), "wrong bytes"

    def lookup(self) -> None:
        self.tiers.wait("contains", self._stored, timeout_s=RECOVERY_S)

    audit = lookup

    def reset(self) -> None:
        self.tiers.reset()
        self.lookup()

    def close(self) -> None:
        if self._tiers is not None:
            assert self._tiers.close(), "a tier uses the memory"

    def works(self) -> bool:
        self.store()
        has_stored = all(self._answers)
        self.load()
        return has_stored and all(self._answers)

    def held(self) -> str:
        _, *of_tiers = self.tiers.counters().values()
        return str([each for each in of_tiers if each["jobs_in_flight"] or each["waiting_blocks"]] or "")


class WorkerSubject:
    """An engine's scheduler and its worker, in one process: their shared memory, and copies in both directions."""

    def __init__(self) -> None:
        import torch

        self._config = stack_of(blocks=ROWS, block_bytes=BLOCK_BYTES, block={"tokens": 16})
        self._cache = torch.zeros((ROWS, BLOCK_BYTES), dtype=torch.uint8)
        refs = [[CanonicalKVCacheRef(0, BLOCK_BYTES)]]
        self._caches = CanonicalKVCaches([CanonicalKVCacheTensor(self._cache, BLOCK_BYTES)], refs)
        self._numbers = itertools.count(1)
        self._opened = ExitStack()

    def open(self) -> None:
        name = f"tiered-kv-test-{uuid.uuid4().hex}"
        shared = SharedStack(self._config, name=name, bytes_per_worker=BLOCK_BYTES)
        with ExitStack() as opened:
            self._stack = shared.open_engine_stack()
            opened.callback(self._stack.close)
            self._handlers = shared.open_handlers(self._caches)
            opened.callback(self._handlers.shutdown)
            self._opened = opened.pop_all()

    def store(self) -> None:
        self._is_done = self._copy(self._handlers.store, GPULoadStoreSpec([1], [1]), CPULoadStoreSpec([2]))

    def load(self) -> None:
        self._is_done = self._copy(self._handlers.load, CPULoadStoreSpec([2]), GPULoadStoreSpec([3], [1]))

    lookup = audit = load

    def reset(self) -> None:
        self._stack.manager.reset_cache()

    def close(self) -> None:
        self._opened.close()

    def works(self) -> bool:
        number = next(self._numbers) % 251
        self._cache[1] = number
        self.store()
        has_stored = self._is_done
        self.load()
        return has_stored and self._is_done and bool((self._cache[3] == number).all())

    def held(self) -> str:
        return ""

    def _copy(self, handler: OffloadingHandler, source: LoadStoreSpec, destination: LoadStoreSpec) -> bool:
        job_id = next(self._numbers)
        handler.transfer_async(job_id, (source, destination))
        handler.wait([job_id])
        return [(result.job_id, result.success) for result in handler.get_finished()] == [(job_id, True)]


class ServerSubject:
    """A server of a host's cache on a thread, and a program that is attached to it."""

    ROWS, CHUNK_ROWS = 64, 8

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._numbers = itertools.count(1)
        self._stored: list[bytes] = []

    def open(self) -> None:
        memory = {"type": "memory", "capacity": "64MiB", **QUICK}
        with ExitStack() as opened:
            served = opened.enter_context(serving(self._folder, host_stack_of(self.ROWS, secondary=[memory])))
            wait_until(lambda: not served.host.region.is_allocating)
            self._host = served.host
            self._allocated_rows = os.fstat(self._host.region.fd).st_blocks * 512 // BLOCK_BYTES
            self._cache = opened.enter_context(connect(served.address))
            self._opened = opened.pop_all()

    def store(self) -> None:
        self._stored = [next(self._numbers).to_bytes(16, "big") for _ in range(COUNT)]
        self._count = self._cache.put(self._stored, blocks_of(self._stored), timeout=STEP_S)  # type: ignore[arg-type]

    def load(self) -> None:
        out = np.zeros((COUNT, BLOCK_BYTES), np.uint8)
        self._count = self._cache.get(self._stored, out, timeout=STEP_S)
        assert (out[: self._count] == blocks_of(self._stored)[: self._count]).all(), "wrong bytes"  # type: ignore[arg-type]

    lookup = audit = load

    def reset(self) -> None:
        self._cache.reset_cache()

    def close(self) -> None:
        self._opened.close()

    def works(self) -> bool:
        """Return whether blocks go through it, in rows that are allocated: a touch of another could be a signal."""
        for _ in range(self.ROWS // COUNT):
            self.store()
            has_stored = self._count == COUNT
            self.load()
            if not has_stored or self._count < COUNT:
                return False
        region, backend = self._host.region, self._host.manager.primary.backend
        assert len(backend.table) <= self._allocated_rows, "a row without memory was handed out"
        assert os.fstat(region.fd).st_blocks * 512 >= region.ready_rows * BLOCK_BYTES
        return True

    def held(self) -> str:
        return ""


def blocks_of(keys: list[OffloadKey]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    numbers = np.array([sum(key) % 251 + 1 for key in keys], np.uint8)
    return np.repeat(numbers[:, None], BLOCK_BYTES, axis=1)


def offsets(first_row: int) -> list[int]:
    return [(first_row + number) * BLOCK_BYTES for number in range(COUNT)]


STEPS = ("open", "store", "load", "lookup", "audit", "reset", "close")
ANEW = ("open", "store", "audit", "close")
"""Steps before which everything is opened anew: the first store, and the first audit, start threads."""
TIERS = ("memory", "nvme", "fs", "redis", "s3")
KINDS = (*TIERS, "isolated", "with-servers", "worker", "direct-memory", "direct-nvme", "direct-fs")
SHORTAGES: dict[str, Callable[[int], AbstractContextManager[object]]] = {
    **{
        name.format(kind.value): partial(Shortage, kind, count=count)
        for kind in Resource
        for name, count in LENGTHS.items()
    },
    "descriptors left": lambda number: DescriptorsLeft(number - 1),
}
"""By its name, what begins with the n-th call of a kind."""
OF_SERVERS = [name for name in SHORTAGES if Resource.PAGES.value in name]
"""Only servers allocate pages before they use them."""
CASES = [
    *((kind, name) for kind in KINDS for name in SHORTAGES if name not in OF_SERVERS),
    *(("server", name) for name in OF_SERVERS),
]
LEFT_MAX = 10
"""Of `descriptors left`: more than one call opens."""


class BlockingMemoryTier(MemoryTier):
    """A tier that runs on a thread of its own."""

    is_nonblocking = False


@pytest.fixture
def subject_of(
    place_of: PlaceOf, closing: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], Subject]:
    """Return a new subject over new storage, for one step."""
    for name in ("CHUNK_BYTES", "FIRST_BYTES"):
        monkeypatch.setattr(allocation, name, ServerSubject.CHUNK_ROWS * BLOCK_BYTES)

    def make(kind: str, step: str) -> Subject:
        top: dict[str, Any] = {"audit": 1.0} if step == "audit" else {}
        if kind == "server":
            return ServerSubject(tmp_path)
        if kind == "worker":
            pytest.importorskip("torch", reason="torch is not installed")
            return WorkerSubject()
        if kind == "isolated":
            closing.enter_context(plugged(TierType(kind, MemorySettings, lambda: BlockingMemoryTier)))
            return StackSubject({"type": kind, "capacity": "64MiB", **QUICK}, **top)
        if kind == "with-servers":
            top |= {"metrics": {"listen": "127.0.0.1:0"}, "events": {"publish": "tcp://127.0.0.1:*"}}
        tier = "memory" if kind == "with-servers" else kind.removeprefix("direct-")
        entry = {**place_of(tier).entry, **QUICK, **OF_TYPES.get(tier, {})}
        return DirectSubject(entry) if kind.startswith("direct-") else StackSubject(entry, **top)

    return make


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kind", "shortage"), CASES)
def test_whatever_is_refused_nothing_stays_behind_and_the_next_call_works(
    kind: str,
    step: str,
    shortage: str,
    subject_of: Callable[[str, str], Subject],
    profile: Profile,
    figures: Figures,
    tmp_path: Path,
) -> None:
    subject = subject_of(kind, step)
    tried = 0
    with ExitStack() as closing:
        for number in numbers(profile):
            before = Footprint.take(tmp_path / "none")
            if step != "open" and (step in ANEW or not tried):
                subject.open()
                closing.callback(subject.close)
            if step == "audit":
                subject.store()
            elif step not in ("open", "store"):
                assert until(subject.works), "it does not work without a shortage"
            with SHORTAGES[shortage](number) as entered:
                said = error_of(getattr(subject, step))
            assert not said or step == "open", said
            if said:
                assert not left_behind(before, tmp_path / "none"), said
                subject.open()
            if step == "open":
                closing.callback(subject.close)
            if step != "close":
                assert until(subject.works), f"it does not work after number {number}"
                assert not subject.held(), f"after number {number}"
            if step in ANEW:
                closing.close()
                assert not left_behind(before, tmp_path / "none"), f"after number {number}"
            if number > LEFT_MAX if not isinstance(entered, Shortage) else not entered.refused:
                break
            tried += 1
    figures.add("resources", tried, tried)


def numbers(profile: Profile) -> Iterator[int]:
    """Return which calls are refused, fewer and fewer: many that follow each other are alike."""
    number = 1
    while True:
        yield number
        number += max(1, number // profile.pick(1, 4))


def error_of(step: Callable[[], None]) -> str:
    """Make a step; return the text of its error, which must be one of this project."""
    try:
        step()
    except TieredKVError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def until(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + RECOVERY_S
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.01)
    return True
