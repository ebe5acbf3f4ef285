"""Throughput and CPU time of the redis tier beside raw RESP and LMCache's `resp`, on one redis-server: a JSON object.

    python tests/performance/redis_rates.py --block-bytes 65536 --blocks 4096 --rounds 5 --peers PEERS

A redis-server is started on loopback; it is emptied before each side, and the sides take turns within a round. Ours is
driven as the tiering manager drives it: all jobs of 32 blocks are submitted at once, then polled, and every block
that is loaded is compared. It runs twice: over one connection, beside `redis_limit.py` (what one connection can move
for a client that copies and checks nothing), and as the tier is by default, beside `lmcache_l2.py` with LMCache's C++
client (`resp`; with --peers, the folder that `setup_peers.sh` made). Both scripts are in --bench. The better of two
loads counts where LMCache's does.

`redis_limit.py` sends one buffer of 32 blocks again and again and receives into another, and neither leaves the
processor's caches. `spread` is the same without that help: one raw connection, every block from and to a place of its
own, nothing checked. The server's allocator keeps what is freed, as in a server that is full and evicts.

Ratios are medians of the rounds' own ratios, with the lowest and highest. GB = 1e9 bytes. CPU time is the client's,
without its start: for the other scripts, what passes between their own calls of `time.perf_counter`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.performance.bench import BlockRows, Sample, Taken, command_line, sample, summary, timed
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

# The scripts of others read the clock before and after each phase and nowhere else; so this tells what CPU each took.
_WITH_CPU_TIMES = """
import json, runpy, sys, time
clock, cpu = time.perf_counter, []
time.perf_counter = lambda: (cpu.append(time.process_time()), clock())[1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(json.dumps([end - begin for begin, end in zip(cpu[::2], cpu[1::2])]))
"""


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

    def spread(self) -> Sample:
        """Store and load over one raw connection, each block from and to its own place, without checks."""
        self._server.empty()
        names = [b"$%d\r\n%b\r\n" % (len(name), name) for name in (b"spread:%d" % row for row in range(self._blocks))]
        opening, size = b"$%d\r\n" % self._block_bytes, self._block_bytes
        reply_bytes = len(opening) + size + 2
        received = np.ones(self._blocks * reply_bytes, dtype=np.uint8).data  # ones: written, so that memory is there
        rows = [row.data for row in self._rows.region.array]
        with socket.create_connection(("127.0.0.1", self._server.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def store(first: int, end: int) -> None:
                parts: list[bytes | memoryview] = []
                for name, row in zip(names[first:end], rows[first:end], strict=True):
                    parts += [b"*3\r\n$3\r\nSET\r\n%b%b" % (name, opening), row, b"\r\n"]
                _send_all(connection, parts)
                _receive_all(connection, memoryview(bytearray(len(b"+OK\r\n") * (end - first))))

            def load(first: int, end: int) -> None:
                connection.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n%b" % name for name in names[first:end]))
                _receive_all(connection, received[first * reply_bytes : end * reply_bytes])

            return sample(self._gigabytes, self._in_batches(store), self._in_batches(load))

    def raw(self, bench: Path) -> Sample:
        """Run the script of the raw limit."""
        total = ("--total-bytes", str(self._blocks * self._block_bytes))
        rates, cpu = self._other([sys.executable], bench / "redis_limit.py", "--port", str(self._server.port), *total)
        return self._theirs(rates["set_gb_per_s"], rates["get_gb_per_s"], cpu[0], cpu[1])

    def resp(self, bench: Path, peers: Path) -> Sample:
        """Run the script of LMCache's client."""
        adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": self._server.port})
        blocks = ("--blocks", str(self._blocks))
        rates, cpu = self._other([str(peers / "lmcache/run")], bench / "lmcache_l2.py", adapter, *blocks)
        return self._theirs(rates["store_gb_per_s"], rates["load_gb_per_s"], cpu[0], min(cpu[1:]))

    def _in_batches(self, step: Callable[[int, int], None]) -> Taken:
        def work() -> None:
            for first in range(0, self._blocks, BATCH):
                step(first, min(first + BATCH, self._blocks))

        return timed(work)

    def _other(self, python: Sequence[str], script: Path, *arguments: str) -> tuple[dict[str, float], list[float]]:
        self._server.empty()
        size = ("--block-bytes", str(self._block_bytes), "--batch", str(BATCH))
        command = [*python, "-c", _WITH_CPU_TIMES, str(script), *arguments, *size]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        rates, cpu = map(json.loads, output.strip().splitlines()[-2:])
        return rates, cpu

    def _theirs(self, store: float, load: float, store_cpu_s: float, load_cpu_s: float) -> Sample:
        size = self._gigabytes
        return sample(size, Taken(size / store, store_cpu_s), Taken(size / load, load_cpu_s))


def _send_all(connection: socket.socket, parts: list[bytes | memoryview]) -> None:
    sent = connection.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connection.sendall(memoryview(part)[sent:])
        sent = max(0, sent - len(part))


def _receive_all(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        assert count, "the server closed the connection"
        buffer = buffer[count:]


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
                samples["spread"].append(bench.spread())
                samples["default"].append(bench.ours(loads=2))
                if arguments.peers is not None:
                    samples["resp"].append(bench.resp(arguments.bench, arguments.peers))
        finally:
            bench.close()
    counted = {side: taken[WARM_ROUNDS:] for side, taken in samples.items()}
    pairs = [("one_connection", "raw"), ("one_connection", "spread"), ("default", "resp")]
    about = {"block_bytes": arguments.block_bytes, "rounds": arguments.rounds}
    print(json.dumps({**about, **summary(counted, pairs)}))


if __name__ == "__main__":
    main()
