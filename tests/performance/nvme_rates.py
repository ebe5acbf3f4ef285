"""Store and load throughput of the nvme tier, into an empty directory and into a full one: one JSON object.

    python tests/performance/nvme_rates.py DIRECTORY --block-bytes 65536 --blocks 16384 --batch 32
    python tests/performance/nvme_rates.py DIRECTORY --capacity-blocks 8192 --blocks 32768 --batch 32
    python tests/performance/nvme_rates.py DIRECTORY --codec aes-256-gcm

The tier is driven as the tiering manager drives it: all jobs of `batch` blocks are submitted at once, then polled. With
`--capacity-blocks` the tier holds only so many blocks: stores are timed until it is full, and from then on, when
each of them makes the tier reclaim the oldest ones. Every loaded block is compared. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import tempfile
import time
from collections.abc import Callable

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.base import JobMetadata, SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

REGION_BYTES_MAX = 1 << 30


class Driver:
    """Jobs over a region whose rows hold distinct blocks."""

    def __init__(self, path: str, block_bytes: int, rows: int, batch: int, capacity_bytes: int, codec: str) -> None:
        self.block_bytes, self.rows, self.batch = block_bytes, rows, batch
        self.region = PrimaryRegion(rows, block_bytes, prefault=True)
        pattern = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
        self.region.array[:] = pattern
        self.region.array[:, :8] = np.arange(rows, dtype="<u8").view(np.uint8).reshape(rows, 8)
        settings: dict[str, object] = {"type": "nvme", "path": path, "capacity": capacity_bytes, "codec": codec}
        if codec.endswith("aes-256-gcm"):
            settings["encryption"] = {"keys": {1: secrets.token_hex(32)}}
        self.tier: SecondaryTierManager = SecondaryTierFactory.create(
            TierSpec("nvme", block_bytes), self.region.kv_view, settings
        )
        self._job_ids = iter(range(1 << 40))

    def store(self, first: int, count: int) -> float:
        """Store blocks `first` to `first + count`, from row number modulo rows; return GB/s."""
        return self._run(self.tier.submit_store, first, count, is_promotion=False)

    def load(self, first: int, count: int) -> float:
        """Load them back into the same rows, cleared before, and compare; return GB/s."""
        rows = np.arange(first, first + count) % self.rows
        self.region.array[rows] = 0
        rate = self._run(self.tier.submit_load, first, count, is_promotion=True)
        found = self.region.array[rows, :8].copy().view("<u8").ravel()
        if not (found == rows).all():
            raise AssertionError("wrong bytes")
        return rate

    def close(self) -> None:
        self.tier.shutdown()
        self.region.close()

    def _run(self, submit: Callable[[JobMetadata], None], first: int, count: int, *, is_promotion: bool) -> float:
        context = ReqContext("rates")
        numbers = range(first, first + count)
        all_keys = [block_key(number) for number in numbers]
        pending = set()
        start = time.perf_counter()
        for begin in range(0, count, self.batch):
            keys = all_keys[begin : begin + self.batch]
            rows = np.arange(first + begin, first + begin + len(keys), dtype=np.int64) % self.rows
            job = JobMetadata(next(self._job_ids), keys, rows, is_promotion, context)
            pending.add(job.job_id)
            submit(job)
        while pending:
            for result in self.tier.get_finished():
                if not result.success:
                    raise AssertionError(f"a job failed: {result.reason}")
                pending.discard(result.job_id)
            time.sleep(0.0002)
        return count * self.block_bytes / 1e9 / (time.perf_counter() - start)


def block_key(number: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def measure_empty(directory: str, codec: str, block_bytes: int, blocks: int, batch: int) -> dict[str, object]:
    """Return store and load rates of a directory with room for everything."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        capacity_bytes = 2 * blocks * block_bytes + (1 << 26)
        driver = Driver(f"{path}/nvme", block_bytes, blocks, batch, capacity_bytes, codec)
        try:
            store = driver.store(0, blocks)
            load = max(driver.load(0, blocks) for _ in range(2))
        finally:
            driver.close()
    return {"store_gb_per_s": round(store, 3), "load_gb_per_s": round(load, 3)}


def measure_full(
    directory: str, codec: str, block_bytes: int, blocks: int, batch: int, capacity_blocks: int
) -> dict[str, object]:
    """Return store rates until the tier is full, and from then on."""
    rows = min(blocks, REGION_BYTES_MAX // block_bytes) // batch * batch
    with tempfile.TemporaryDirectory(dir=directory) as path:
        driver = Driver(f"{path}/nvme", block_bytes, rows, batch, capacity_blocks * block_bytes, codec)
        try:
            until = capacity_blocks * 8 // 10 // batch * batch
            empty = _store_in_turns(driver, 0, until)
            _store_in_turns(driver, until, capacity_blocks)  # fills it up, and begins to reclaim
            full = _store_in_turns(driver, until + capacity_blocks, blocks)
        finally:
            driver.close()
    return {
        "empty_store_gb_per_s": round(empty, 3),
        "full_store_gb_per_s": round(full, 3),
        "full_over_empty": round(full / empty, 3),
    }


def _store_in_turns(driver: Driver, first: int, count: int) -> float:
    """Store more blocks than the region has rows; return the rate over all turns."""
    seconds = 0.0
    for begin in range(first, first + count, driver.rows):
        size = min(driver.rows, first + count - begin)
        seconds += size * driver.block_bytes / 1e9 / driver.store(begin, size)
    return count * driver.block_bytes / 1e9 / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--capacity-blocks", type=int)
    parser.add_argument("--codec", default="raw")
    arguments = parser.parse_args()
    sizes = (arguments.directory, arguments.codec, arguments.block_bytes, arguments.blocks, arguments.batch)
    capacity_blocks: int | None = arguments.capacity_blocks
    rates = measure_full(*sizes, capacity_blocks) if capacity_blocks else measure_empty(*sizes)
    print(
        json.dumps({"codec": arguments.codec, "block_bytes": arguments.block_bytes, "batch": arguments.batch, **rates})
    )


if __name__ == "__main__":
    main()
