"""Throughput of the redis tier beside raw RESP and LMCache's `resp`, on one redis-server: a JSON object.

    python tests/performance/redis_rates.py --block-bytes 65536 --blocks 4096 --rounds 5 --peers PEERS

A redis-server is started on loopback; it is emptied before each side, and the sides take turns within a round. Ours is
driven as the tiering manager drives it: all jobs of 32 blocks are submitted at once, then polled, and every block
that is loaded is compared. It runs twice: over one connection, beside `redis_limit.py` (what one connection can move
for a client that copies and checks nothing), and as the tier is by default, beside `lmcache_l2.py` with LMCache's C++
client (`resp`; with --peers, the folder that `setup_peers.sh` made). Both scripts are in --bench. The better of two
loads counts where LMCache's does.

`redis_limit.py` sends one buffer of 32 blocks again and again and receives into another, and neither leaves the
processor's caches. The server's allocator keeps what is freed, as in a server that is full and evicts.

Ratios are medians of the rounds' own ratios, with the lowest and highest. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.performance.bench import BlockRows, Sample, command_line, sample, summary
from tests.support.redis_servers import RedisServer
from tiered_kv.tiering.base import TierSpec
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

BENCH = Path(__file__).parents[2].parent / "shared" / "bench"
BATCH = 32
TIMEOUT_S = 600
WARM_ROUNDS = 1
"""The first rounds touch the server's memory, and are not counted."""
KEEP_MEMORY = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:40"}
"""Has jemalloc give nothing back to the kernel, and cut up large pieces of what was freed for small values."""


class Bench:
    """Blocks in a region, moved by tiers and by other clients."""

    def __init__(self, server: RedisServer, block_bytes: int, blocks: int) -> None:
        self._server = server
        self._block_bytes, self._blocks = block_bytes, blocks
        self._gigabytes = blocks * block_bytes / 1e9
        self._rows = BlockRows(block_bytes, blocks)

    def close(self) -> None:
        self._rows.region.close()

    def ours(self, *, loads: int, **settings: object) -> Sample:
        """Store all blocks once and load them `loads` times; the fastest load counts."""
        self._server.empty()
        checked = RedisSettings.model_validate({"url": self._server.url, **settings})
        tier = RedisTier(TierSpec("redis", self._block_bytes), self._rows.region.kv_view, "redis", checked)
        try:
            store = self._rows.store(tier, 0, self._blocks, BATCH)
            taken = [self._rows.load(tier, 0, self._blocks, BATCH) for _ in range(loads)]
        finally:
            tier.shutdown()
        return sample(self._gigabytes, store, min(taken, key=lambda each: each.wall_s))

    def raw(self, bench: Path) -> Sample:
        """Run the script of the raw limit."""
        total = ("--total-bytes", str(self._blocks * self._block_bytes))
        rates = self._other([sys.executable], bench / "redis_limit.py", "--port", str(self._server.port), *total)
        return {"store_gb_per_s": rates["set_gb_per_s"], "load_gb_per_s": rates["get_gb_per_s"]}

    def resp(self, bench: Path, peers: Path) -> Sample:
        """Run the script of LMCache's client."""
        adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": self._server.port})
        rates = self._other(
            [str(peers / "lmcache/run")], bench / "lmcache_l2.py", adapter, "--blocks", str(self._blocks)
        )
        return {name: rates[name] for name in ("store_gb_per_s", "load_gb_per_s")}

    def _other(self, python: Sequence[str], script: Path, *arguments: str) -> dict[str, float]:
        self._server.empty()
        size = ("--block-bytes", str(self._block_bytes), "--batch", str(BATCH))
        command = [*python, str(script), *arguments, *size]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        rates: dict[str, float] = json.loads(output.strip().splitlines()[-1])
        return rates


def main() -> None:
    parser = command_line(__doc__, block_bytes=65536)
    parser.add_argument("--blocks", type=int, default=4096, help="redis_limit.py writes over its own beyond 4096")
    parser.add_argument("--rounds", type=int, default=5, help="after those that warm the server up")
    parser.add_argument("--bench", type=Path, default=BENCH, help="folder of redis_limit.py and lmcache_l2.py")
    parser.add_argument("--peers", type=Path, help="folder of the peers; without it LMCache is left out")
    arguments = parser.parse_args()
    os.environ.update(KEEP_MEMORY)
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        bench = Bench(server, arguments.block_bytes, arguments.blocks)
        try:
            for _ in range(arguments.rounds + WARM_ROUNDS):
                samples["one_connection"].append(bench.ours(loads=1, connections=1))
                if (arguments.bench / "redis_limit.py").exists():
                    samples["raw"].append(bench.raw(arguments.bench))
                samples["default"].append(bench.ours(loads=2))
                if arguments.peers is not None:
                    samples["resp"].append(bench.resp(arguments.bench, arguments.peers))
        finally:
            bench.close()
    counted = {side: taken[WARM_ROUNDS:] for side, taken in samples.items()}
    pairs = [("one_connection", "raw"), ("default", "resp")]
    about = {"block_bytes": arguments.block_bytes, "rounds": arguments.rounds}
    print(json.dumps({**about, **summary(counted, pairs)}))


if __name__ == "__main__":
    main()
