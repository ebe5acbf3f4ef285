"""Throughput of our tiers as an L2 adapter of LMCache, beside LMCache's own adapters, by its own interface.

    python tests/performance/lmcache_rates.py DIRECTORY --python ENVIRONMENT/lmcache/bin/python --rounds 5 >table.md

DIRECTORY is on the disk to measure; `.ci/engines` builds the ENVIRONMENT; --bench has `lmcache_l2.py`, which drives
each side, and compares all blocks that come back. Beside nvme stands `fs_native` with O_DIRECT, beside redis `resp`,
both on the same redis-server. The sides take turns, and each comes first in every other round: a server that has just
freed memory stores faster. A row has the median of the rounds with the lowest
and the highest, and the same of the ratio within a round. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.performance.bench import command_line, in_turn, shown
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


@dataclass
class Measurements:
    """Samples by tier, direction, size and side."""

    directory: Path
    python: str
    bench: Path
    samples: defaultdict[tuple[str, str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def nvme(self, number: int, size: str, block_bytes: int, blocks: int) -> None:
        for side in in_turn(number, "ours", "fs_native"):
            with tempfile.TemporaryDirectory(dir=self.directory) as path:
                ours = adapter([{"type": "nvme", "path": f"{path}/ours", "capacity": "4GiB"}])
                theirs = {"type": "fs_native", "base_path": path, "num_workers": 8, "use_odirect": True}
                self._side("nvme", side, size, block_bytes, blocks, ours if side == "ours" else json.dumps(theirs))

    def redis(self, number: int, server: RedisServer, size: str, block_bytes: int, blocks: int) -> None:
        ours = adapter([{"type": "redis", "url": server.url}])
        theirs = json.dumps({"type": "resp", "host": "127.0.0.1", "port": server.port})
        for side in in_turn(number, "ours", "resp"):
            told = ours if side == "ours" else theirs
            self._side("redis", side, size, block_bytes, blocks // 2, told)
            server.empty()

    def table(self) -> str:
        """Return the samples as Markdown."""
        lines = ["| what | ours | compared with | theirs | ratio | target |", "| --- | --- | --- | --- | --- | --- |"]
        for tier, direction, size, side in list(self.samples):
            if side == "ours":
                continue
            ours, theirs = (self.samples[tier, direction, size, each] for each in ("ours", side))
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            target = TARGETS.get((tier, direction, size), REDIS_TARGET)
            what = f"{tier} {direction} {size} (GB/s)"
            columns = (what, shown(ours), side, shown(theirs), shown(ratios), target)
            lines.append(f"| {' | '.join(columns)} |")
        return "\n".join(lines)

    def _side(self, tier: str, side: str, size: str, block_bytes: int, blocks: int, told: str) -> None:
        sizes = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--batch", str(BATCH))
        done = subprocess.run(
            [self.python, str(self.bench / "lmcache_l2.py"), told, *sizes],
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
        rates = json.loads(done.stdout.strip().splitlines()[-1])
        for direction in ("store", "load"):
            self.samples[tier, direction, size, side].append(rates[f"{direction}_gb_per_s"])


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", required=True)
    parser.add_argument("--bench", type=Path, default=BENCH)
    parser.add_argument("--parts", nargs="+", choices=("nvme", "redis"), default=("nvme", "redis"))
    arguments = parser.parse_args()
    measurements = Measurements(arguments.directory, arguments.python, arguments.bench)
    with ExitStack() as stack:
        if "redis" in arguments.parts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(RedisServer(folder))
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for size in SIZES:
                if "nvme" in arguments.parts:
                    measurements.nvme(number, *size)
                if "redis" in arguments.parts:
                    measurements.redis(number, server, *size)
    print(measurements.table())


if __name__ == "__main__":
    main()
