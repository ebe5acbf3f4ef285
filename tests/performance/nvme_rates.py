"""Store and load throughput of the nvme tier, into an empty directory and into a full one: one JSON object.

    python tests/performance/nvme_rates.py DIRECTORY --block-bytes 65536 --blocks 16384 --batch 32
    python tests/performance/nvme_rates.py DIRECTORY --capacity-blocks 8192 --blocks 32768 --batch 32
    python tests/performance/nvme_rates.py DIRECTORY --block-bytes 4096 --blocks 1000000 --codec aes-256-gcm

The tier is driven as the tiering manager drives it: all jobs of `batch` blocks are submitted at once, then polled. With
`--capacity-blocks` the tier holds only so many blocks: stores are timed until it is full, and from then on, when
each of them makes the tier reclaim the oldest ones. Without, the filled directory is opened again, and that is timed
too (in the page cache lies what the stores left there). Every loaded block is compared. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time

from tests.performance.bench import BlockRows, command_line
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

REGION_BYTES_MAX = 1 << 30


class Directory:
    """A new directory of one tier, and rows for its blocks."""

    def __init__(self, path: str, codec: str, block_bytes: int, blocks: int, batch: int, capacity_bytes: int) -> None:
        self.rows = BlockRows(block_bytes, min(blocks, REGION_BYTES_MAX // block_bytes // batch * batch))
        self._entry: dict[str, object] = {"type": "nvme", "path": f"{path}/nvme", "capacity": capacity_bytes}
        self._entry["codec"] = codec
        if codec.endswith("aes-256-gcm"):
            self._entry["encryption"] = {"keys": {1: secrets.token_hex(32)}}

    def open(self) -> SecondaryTierManager:
        spec = TierSpec("nvme", self.rows.block_bytes, bytes(16))  # the namespace in which it is opened again
        return SecondaryTierFactory.create(spec, self.rows.region.kv_view, self._entry)


def measure_empty(path: str, codec: str, block_bytes: int, blocks: int, batch: int) -> dict[str, float]:
    """Return store and load rates of a directory with room for everything, and how long it takes to open it again."""
    directory = Directory(path, codec, block_bytes, blocks, batch, 2 * blocks * block_bytes + (1 << 28))
    rows, gigabytes = directory.rows, blocks * block_bytes / 1e9
    tier = directory.open()
    store_s = rows.store(tier, 0, blocks, batch).wall_s
    load_s = min(rows.load(tier, 0, blocks, batch).wall_s for _ in range(2))
    tier.shutdown()
    began_s = time.perf_counter()
    tier = directory.open()
    open_s = time.perf_counter() - began_s
    found = tier.stats()["blocks"]
    tier.shutdown()
    rows.region.close()
    if found != blocks:
        raise AssertionError(f"{found} of {blocks} blocks were found again")
    return {"store_gb_per_s": gigabytes / store_s, "load_gb_per_s": gigabytes / load_s, "open_s": open_s}


def measure_full(
    path: str, codec: str, block_bytes: int, blocks: int, batch: int, capacity_blocks: int
) -> dict[str, float]:
    """Return store rates until the tier is full, and from then on."""
    directory = Directory(path, codec, block_bytes, blocks, batch, capacity_blocks * block_bytes)
    rows, tier = directory.rows, directory.open()
    until = capacity_blocks * 8 // 10 // batch * batch
    empty_s = rows.store(tier, 0, until, batch).wall_s
    rows.store(tier, until, capacity_blocks, batch)  # fills it up, and begins to reclaim
    full_s = rows.store(tier, until + capacity_blocks, blocks, batch).wall_s
    tier.shutdown()
    rows.region.close()
    empty, full = until * block_bytes / 1e9 / empty_s, blocks * block_bytes / 1e9 / full_s
    return {"empty_store_gb_per_s": empty, "full_store_gb_per_s": full, "full_over_empty": full / empty}


def main() -> None:
    options = {"block_bytes": 65536, "blocks": 16384, "batch": 32, "capacity_blocks": int, "codec": "raw"}
    arguments = command_line(__doc__, "directory", **options).parse_args()
    sizes = (arguments.codec, arguments.block_bytes, arguments.blocks, arguments.batch)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
        if arguments.capacity_blocks:
            rates = measure_full(path, *sizes, arguments.capacity_blocks)
        else:
            rates = measure_empty(path, *sizes)
    about = {"block_bytes": arguments.block_bytes, "batch": arguments.batch, "codec": arguments.codec}
    print(json.dumps({**about, **{name: round(value, 3) for name, value in rates.items()}}))


if __name__ == "__main__":
    main()
