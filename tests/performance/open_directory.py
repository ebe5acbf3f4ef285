"""Time to open an nvme directory of many small blocks, with the page cache dropped: one JSON object.

    sudo python tests/performance/open_directory.py DIRECTORY --blocks 1000000

Fills a directory with blocks of 4 KiB, 32 to a batch, then opens it in fresh processes and times the tier's
constructor, which reads what is there and builds the index. Without root the cache stays, and `cache_dropped` says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.performance.bench import BlockRows, command_line
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

BLOCK_BYTES = 4096
BATCH = 32
ROWS = 8192


def open_tier(path: Path, region: PrimaryRegion, blocks: int) -> SecondaryTierManager:
    settings = {"type": "nvme", "path": str(path), "capacity": 2 * blocks * BLOCK_BYTES + (1 << 28)}
    return SecondaryTierFactory.create(TierSpec("nvme", BLOCK_BYTES), region.kv_view, settings)


def fill(path: Path, blocks: int) -> None:
    rows = BlockRows(BLOCK_BYTES, ROWS)
    tier = open_tier(path, rows.region, blocks)
    rows.store(tier, 0, blocks, BATCH)
    tier.shutdown()
    rows.region.close()


def time_opening(path: Path, blocks: int) -> None:
    region = PrimaryRegion(ROWS, BLOCK_BYTES)
    start = time.perf_counter()
    tier = open_tier(path, region, blocks)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": round(seconds, 3), "blocks": tier.stats()["blocks"]}))
    tier.shutdown()
    region.close()


def drop_page_cache() -> bool:
    try:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    except OSError:
        return False
    return True


def measure(directory: Path, blocks: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=directory) as parent:
        path = Path(parent) / "nvme"
        fill(path, blocks)
        seconds = []
        dropped = True
        for _ in range(rounds):
            dropped = drop_page_cache() and dropped
            command = [sys.executable, __file__, str(path), "--blocks", str(blocks), "--only-open"]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            opened = json.loads(answer.stdout)
            if opened["blocks"] != blocks:
                raise AssertionError(f"{opened['blocks']} of {blocks} blocks were found")
            seconds.append(opened["seconds"])
    return {"blocks": blocks, "cache_dropped": dropped, "open_seconds": seconds}


def main() -> None:
    parser = command_line(__doc__, "directory", blocks=1_000_000, rounds=3)
    parser.add_argument("--only-open", action="store_true", help="time one opening of DIRECTORY itself")
    arguments = parser.parse_args()
    if arguments.only_open:
        time_opening(arguments.directory, arguments.blocks)
    else:
        print(json.dumps(measure(arguments.directory, arguments.blocks, arguments.rounds)))


if __name__ == "__main__":
    main()
