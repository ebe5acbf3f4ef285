"""Throughput of our tiers as an L2 adapter of LMCache, beside LMCache's own adapters, by its own interface.

    python tests/performance/lmcache_rates.py DIRECTORY --python ENVIRONMENT/lmcache/bin/python --rounds 5 >table.md

DIRECTORY is on the disk to measure; `.ci/engines` builds the ENVIRONMENT; --bench has `lmcache_l2.py`, which drives
each side, and compares all loaded blocks. nvme is compared with `fs_native` with O_DIRECT, redis with `resp`, both on
the same redis-server. The sides take turns, and the order alternates from round to round: a server that has just freed
memory stores faster. A row has the median of the rounds with the lowest and the highest, and the same of the ratio
within a round. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.performance.bench import Table, command_line, in_turn
from tests.support.lmcache_programs import adapter
from tests.support.redis_servers import RedisServer

ROOT = Path(__file__).parents[2]
BENCH = ROOT.parent / "shared" / "bench"
SIZES = (("64 KiB", 65536, 16384), ("1 MiB", 1 << 20, 1024))
BATCH = 32
TIMEOUT_S = 900
TARGETS = {
    ("nvme", "store", "64 KiB"): "3 x",
    ("nvme", "store", "1 MiB"): "1.2 x",
    ("nvme", "load", "64 KiB"): "1.2 x",
    ("nvme", "load", "1 MiB"): "1 x",
}
REDIS_TARGET = "0.9 x"


class Measurements:
    """Runs both sides of each tier, and adds their rates of this round to the table."""

    def __init__(self, directory: Path, python: str, bench: Path) -> None:
        self._directory, self._python, self._bench = directory, python, bench
        self.table = Table()

    def nvme(self, number: int, size: str, block_bytes: int, blocks: int) -> None:
        rates = {}
        for side in in_turn(number, ("ours", "fs_native")):
            with tempfile.TemporaryDirectory(dir=self._directory) as path:
                ours = adapter([{"type": "nvme", "path": f"{path}/ours", "capacity": "4GiB"}])
                theirs = {"type": "fs_native", "base_path": path, "num_workers": 8, "use_odirect": True}
                rates[side] = self._run(ours if side == "ours" else json.dumps(theirs), block_bytes, blocks)
        self._add("nvme", size, rates["ours"], "fs_native", rates["fs_native"])

    def redis(self, number: int, server: RedisServer, size: str, block_bytes: int, blocks: int) -> None:
        ours = adapter([{"type": "redis", "url": server.url}])
        theirs = json.dumps({"type": "resp", "host": "127.0.0.1", "port": server.port})
        rates = {}
        for side in in_turn(number, ("ours", "resp")):
            rates[side] = self._run(ours if side == "ours" else theirs, block_bytes, blocks // 2)
            server.empty()
        self._add("redis", size, rates["ours"], "resp", rates["resp"])

    def _add(self, tier: str, size: str, ours: dict[str, float], whom: str, theirs: dict[str, float]) -> None:
        for direction in ("store", "load"):
            name, target = f"{direction}_gb_per_s", TARGETS.get((tier, direction, size), REDIS_TARGET)
            self.table.add(f"{tier} {direction} {size} (GB/s)", ours[name], whom, theirs[name], target)

    def _run(self, config: str, block_bytes: int, blocks: int) -> dict[str, float]:
        sizes = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--batch", str(BATCH))
        done = subprocess.run(
            [self._python, str(self._bench / "lmcache_l2.py"), config, *sizes],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}",
                "LMCACHE_TRACK_USAGE": "false",
                "LMCACHE_LOG_LEVEL": "ERROR",
            },
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
        rates: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return rates


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=3, bench=BENCH)
    parser.add_argument("--python", required=True)
    arguments = parser.parse_args()
    measurements = Measurements(arguments.directory, arguments.python, arguments.bench)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for size in SIZES:
                measurements.nvme(number, *size)
                measurements.redis(number, server, *size)
    print(measurements.table)


if __name__ == "__main__":
    main()
