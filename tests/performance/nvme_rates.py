"""Store and load throughput of the nvme tier, into an empty directory and into a full one: one JSON object.

    python tests/performance/nvme_rates.py DIRECTORY --block-bytes 65536 --blocks 16384 --batch 32
    python tests/performance/nvme_rates.py DIRECTORY --capacity-blocks 8192 --blocks 32768 --batch 32

The tier is driven as the tiering manager drives it: all jobs of `batch` blocks are submitted at once, then polled. With
`--capacity-blocks` the tier holds only so many blocks: stores are timed until it is full, and from then on, when
each of them makes the tier reclaim the oldest ones. Every loaded block is compared. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.performance.bench import BlockRows, command_line
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

REGION_BYTES_MAX = 1 << 30


@contextmanager
def open_tier(directory: Path, codec: str, rows: BlockRows, capacity_bytes: int) -> Iterator[SecondaryTierManager]:
    """Yield a tier over a new directory."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        settings: dict[str, object] = {"path": f"{path}/nvme", "capacity": capacity_bytes, "codec": codec}
        if codec.endswith("aes-256-gcm"):
            settings["encryption"] = {"keys": {1: secrets.token_hex(32)}}
        spec = TierSpec("nvme", rows.block_bytes)
        tier = SecondaryTierFactory.create(spec, rows.region.kv_view, {"type": "nvme", **settings})
        try:
            yield tier
        finally:
            tier.shutdown()
            rows.region.close()


def measure_empty(directory: Path, codec: str, block_bytes: int, blocks: int, batch: int) -> dict[str, float]:
    """Return store and load rates of a directory with room for everything."""
    rows, gigabytes = BlockRows(block_bytes, blocks), blocks * block_bytes / 1e9
    with open_tier(directory, codec, rows, 2 * blocks * block_bytes + (1 << 26)) as tier:
        store_s = rows.store(tier, 0, blocks, batch).wall_s
        load_s = min(rows.load(tier, 0, blocks, batch).wall_s for _ in range(2))
    return {"store_gb_per_s": round(gigabytes / store_s, 3), "load_gb_per_s": round(gigabytes / load_s, 3)}


def measure_full(directory: Path, block_bytes: int, blocks: int, batch: int, capacity_blocks: int) -> dict[str, float]:
    """Return store rates until the tier is full, and from then on."""
    rows = BlockRows(block_bytes, min(blocks, REGION_BYTES_MAX // block_bytes) // batch * batch)
    with open_tier(directory, "raw", rows, capacity_blocks * block_bytes) as tier:
        until = capacity_blocks * 8 // 10 // batch * batch
        empty_s = rows.store(tier, 0, until, batch).wall_s
        rows.store(tier, until, capacity_blocks, batch)  # fills it up, and begins to reclaim
        full_s = rows.store(tier, until + capacity_blocks, blocks, batch).wall_s
    empty, full = until * block_bytes / 1e9 / empty_s, blocks * block_bytes / 1e9 / full_s
    return {
        "empty_store_gb_per_s": round(empty, 3),
        "full_store_gb_per_s": round(full, 3),
        "full_over_empty": round(full / empty, 3),
    }


def main() -> None:
    options = {"block_bytes": 65536, "blocks": 16384, "batch": 32, "capacity_blocks": int}
    arguments = command_line(__doc__, "directory", **options).parse_args()
    sizes = (arguments.block_bytes, arguments.blocks, arguments.batch)
    if arguments.capacity_blocks:
        rates = measure_full(arguments.directory, *sizes, arguments.capacity_blocks)
    else:
        rates = measure_empty(arguments.directory, "raw", *sizes)
    print(json.dumps({"block_bytes": arguments.block_bytes, "batch": arguments.batch, **rates}))


if __name__ == "__main__":
    main()
