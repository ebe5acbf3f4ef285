"""MLPerf Storage's KV-cache benchmark over this project's nvme tier, in place of the benchmark's own files.

The benchmark is the folder `kv_cache_benchmark` of https://github.com/mlcommons/storage. Nothing in it is changed: this
program replaces its class for the storage, and starts it. The benchmark's options follow the folder:

python examples/mlperf_storage.py kv_cache_benchmark --cache-dir /mnt/nvme/kv --gpu-mem-gb 0 --cpu-mem-gb 0

docs/how-to/mlperf-storage.md has the options and figures. For another tier, change `TIER`.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import itertools
import mmap
import sys
import threading
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv import DirectTiers, Namespace, make_offload_key
from tiered_kv.base import OffloadKey

TIER = {"type": "nvme", "capacity": "16GiB", "job_timeout": "60s"}
BLOCK_BYTES = 512 << 10
POOL_BYTES = 4 << 30  # of address space, for the values that are read or written at a time
WAIT_S = 120.0


class Pool:
    """Memory for values, in whole blocks side by side. Any thread may call."""

    def __init__(self, blocks: int) -> None:
        self.memory = mmap.mmap(-1, blocks * BLOCK_BYTES)
        self.memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel pins and fills fewer pages
        self._is_free = np.ones(blocks, bool)
        self._lock = threading.Lock()  # guards `_is_free`; who waits for blocks holds it, so that none overtakes
        self._released: deque[slice] = deque()

    def take(self, blocks: int) -> tuple[Any, int]:  # Any: an array of ctypes
        """Return memory of `blocks` blocks, and where it begins in the pool. It is free again once nobody refers to it.

        Raises:
            MemoryError: In `WAIT_S` there were never enough free blocks side by side.
        """
        end_s = time.monotonic() + WAIT_S
        with self._lock:
            while time.monotonic() < end_s:
                while self._released:
                    self._is_free[self._released.popleft()] = True
                taken = np.concatenate(([0], np.cumsum(~self._is_free)))  # blocks taken before each block
                starts = np.flatnonzero(taken[blocks:] == taken[:-blocks])
                if len(starts):
                    place = slice(int(starts[0]), int(starts[0]) + blocks)
                    self._is_free[place] = False
                    memory = (ctypes.c_ubyte * (blocks * BLOCK_BYTES)).from_buffer(
                        self.memory, place.start * BLOCK_BYTES
                    )
                    weakref.finalize(memory, self._released.append, place)  # takes no lock: it may run anywhere
                    return memory, place.start * BLOCK_BYTES
                time.sleep(0.001)
        raise MemoryError(f"no {blocks} blocks side by side became free in {WAIT_S:g} s; raise POOL_BYTES")


class TieredBackend:
    """What the benchmark asks of a storage: `write`, `read`, `delete` and `clear`, on any of its threads.

    `timing` makes the benchmark's record of a call from its seconds: `total`, `device` and `host`.
    """

    def __init__(self, timing: Any, base_path: str) -> None:  # Any: a class of the benchmark
        self.base_path = Path(base_path)  # the benchmark reads how much room its file system has
        self._timing = timing
        self._pool = Pool(POOL_BYTES // BLOCK_BYTES)
        self._tiers = DirectTiers(
            self._pool.memory,
            block_bytes=BLOCK_BYTES,
            tiers=[TIER | {"path": str(self.base_path / "blocks")}],
            namespace=Namespace(model="mlperf-storage"),
        )
        self._tiers.reset()  # blocks of earlier runs
        self._values: dict[str, tuple[list[OffloadKey], tuple[int, ...], np.dtype[Any]]] = {}  # Any: any element
        self._numbers = itertools.count()
        self._lost: list[str] = []
        atexit.register(self.close)

    def write(self, key: str, data: np.ndarray[Any, Any]) -> Any:
        """Store a value under keys of its own: a value that is written again has other bytes.

        Raises:
            OSError: The tier did not store it all. The benchmark goes on without the value.
        """
        start_s = time.perf_counter()
        blocks = -(-data.nbytes // BLOCK_BYTES)
        memory, offset = self._pool.take(blocks)
        np.frombuffer(memory, data.dtype, data.size)[:] = data.reshape(-1)
        number = next(self._numbers)
        keys = [make_offload_key(b"%d block %d" % (number, block), 0) for block in range(blocks)]
        copied_s = time.perf_counter()
        self._transfer("store", key, keys, offset)
        self._values[key] = keys, data.shape, data.dtype
        return self._timed(start_s, copied_s)

    def read(self, key: str) -> tuple[np.ndarray[Any, Any], Any]:
        """Load a value into memory of the pool, which stays the value's as long as anyone uses the array.

        Raises:
            KeyError: The benchmark wrote no such value.
            OSError: The tier has lost blocks of it. The benchmark would count this as a read of no time.
        """
        start_s = time.perf_counter()
        keys, shape, dtype = self._values[key]
        memory, offset = self._pool.take(len(keys))
        taken_s = time.perf_counter()
        self._transfer("load", key, keys, offset)
        data = np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)
        return data, self._timed(start_s, taken_s)

    def delete(self, key: str) -> None:
        """Forget a value. The tier evicts its blocks when it needs room."""
        self._values.pop(key, None)

    def clear(self) -> None:
        self._values.clear()
        self._tiers.reset()

    def close(self) -> None:
        """End the tiers. Figures of a run with lost values are worth nothing, so this says it."""
        atexit.unregister(self.close)
        self._tiers.close()
        print(f"tiered-kv: {next(self._numbers)} values written, {len(self._lost)} lost {self._lost[:4]}")

    def _transfer(self, method: Any, key: str, keys: list[OffloadKey], offset: int) -> None:  # Any: store or load
        offsets = range(offset, offset + len(keys) * BLOCK_BYTES, BLOCK_BYTES)
        if not all(self._tiers.wait(method, keys, list(offsets))):
            self._lost.append(f"{method} {key}")
            raise OSError(f"tiered-kv: {method} of '{key}' failed for a block")

    def _timed(self, start_s: float, host_end_s: float) -> Any:
        end_s = time.perf_counter()
        return self._timing(total=end_s - start_s, device=end_s - host_end_s, host=host_end_s - start_s)


def main() -> None:
    sys.path.insert(0, sys.argv.pop(1))
    timing = importlib.import_module("kv_cache.backends").StorageBackend.IOTiming
    setattr(importlib.import_module("kv_cache.cache"), "NVMeBackend", partial(TieredBackend, timing))  # noqa: B010
    importlib.import_module("kv_cache.cli").main()


if __name__ == "__main__":
    main()
