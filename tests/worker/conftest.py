"""Starts the GPU's driver before the first test of copies; names in shared memory."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tiered_kv.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from tiered_kv.cpu.region import SHARED_MEMORY_DIRECTORY, PrimaryRegion
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.worker import open_handlers

BLOCK_BYTES = 512


@pytest.fixture
def name() -> Iterator[str]:
    """A name in shared memory, of which nothing may be left."""
    name = f"tiered-kv-test-{uuid.uuid4().hex}"
    yield name
    assert not list(SHARED_MEMORY_DIRECTORY.glob(f"*{name}*"))


def start_device(device: str) -> None:
    """Store and load one block of a device's memory, so that its driver has opened all that transfers use."""
    torch = importlib.import_module("torch")
    region = PrimaryRegion(1, BLOCK_BYTES)
    cache = torch.ones((1, BLOCK_BYTES), dtype=torch.uint8, device=device)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(cache, BLOCK_BYTES)], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]])
    handlers = open_handlers(caches, region)
    try:
        handlers.store.transfer_async(1, (GPULoadStoreSpec([0], [1]), CPULoadStoreSpec([0])))
        handlers.store.wait([1])
        handlers.load.transfer_async(2, (CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1])))
        handlers.load.wait([2])
        assert region.array.all()
    finally:
        handlers.shutdown()
        region.close()


@pytest.fixture(scope="session", autouse=True)
def _driver_is_started() -> None:
    """Let the driver open what it keeps open for the whole process before the descriptors of a test are counted.

    A fixture of the session runs before those of a test, and so before the check for leaks.
    """
    with suppress(ImportError):
        if importlib.import_module("torch").cuda.is_available():
            start_device("cuda")
