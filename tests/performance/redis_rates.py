"""Throughput and CPU time of the redis tier beside raw RESP and LMCache's `resp`, on one redis-server: a JSON object.

    python tests/performance/redis_rates.py --block-bytes 65536 --blocks 4096 --rounds 5 --peers PEERS

A redis-server is started on loopback; it is emptied before each side, and the sides take turns within a round. Ours is
driven as the tiering manager drives it: all jobs of `batch` blocks are submitted at once, then polled, and every block
that is loaded is compared. It runs twice: over one connection, beside `redis_limit.py` (what one connection can move
for a client that copies and checks nothing), and as the tier is by default, beside `lmcache_l2.py` with LMCache's C++
client (`resp`; with --peers, the folder that `setup_peers.sh` made). Both scripts are in --bench. The better of two
loads counts where LMCache's does.

`redis_limit.py` sends one buffer of `batch` blocks again and again and receives into another, and neither leaves the
processor's caches. `spread` is the same without that help: one raw connection, every block from and to a place of its
own, nothing checked. The server's CPU time, from its own INFO, is given for the sides that this program drives.

The server's allocator keeps what is freed, as in a server that is full and evicts. With --fresh-memory each side meets
a server that has just given all its memory back to the kernel, and grows.

Ratios are medians of the rounds' own ratios, with the lowest and highest. GB = 1e9 bytes. CPU time is the client's,
without its start: for the other scripts, what passes between their own calls of `time.perf_counter`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.testing.redis_servers import RedisServer
from tiered_kv.tiering.base import JobMetadata, TierSpec
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier

BENCH = Path(__file__).parents[2].parent / "shared" / "bench"
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


@dataclass(frozen=True, slots=True)
class Sample:
    """What one side did in one round."""

    store_gb_per_s: float
    load_gb_per_s: float
    store_cpu_s_per_gb: float
    load_cpu_s_per_gb: float
    store_server_s_per_gb: float = math.nan
    load_server_s_per_gb: float = math.nan


@dataclass(frozen=True, slots=True)
class Phase:
    """The seconds that one direction took: by the clock, of the client's CPU, and of the server's."""

    wall: float
    cpu: float
    server: float


class Bench:
    """Blocks in a region, moved by tiers and by other clients.

    Args:
        server: Where to.
        block_bytes: Bytes of a block.
        blocks: How many.
        batch: Blocks of one job.
        fresh_memory: Whether an empty server shall have no memory.
    """

    def __init__(self, server: RedisServer, block_bytes: int, blocks: int, batch: int, *, fresh_memory: bool) -> None:
        self._server = server
        self._fresh_memory = fresh_memory
        self._block_bytes, self._blocks, self._batch = block_bytes, blocks, batch
        self._gigabytes = blocks * block_bytes / 1e9
        self._region = PrimaryRegion(blocks, block_bytes, prefault=True)
        self._region.array[:] = np.random.default_rng(0).integers(0, 256, block_bytes, dtype=np.uint8)
        self._region.array[:, :8] = np.arange(blocks, dtype="<u8").view(np.uint8).reshape(blocks, 8)
        self._expected = self._region.array[0, 8:].copy()
        self._keys = [_block_key(row) for row in range(blocks)]
        self._job_ids = iter(range(1 << 40))

    def close(self) -> None:
        self._region.close()

    def ours(self, *, loads: int, **settings: object) -> Sample:
        """Store all blocks once and load them `loads` times; the fastest load counts."""
        self._empty()
        checked = RedisSettings.model_validate({"url": self._server.url, **settings})
        tier = RedisTier(TierSpec("redis", self._block_bytes), self._region.kv_view, "redis", checked)
        try:
            store = self._run(tier, is_promotion=False)
            taken = []
            for _ in range(loads):
                self._region.array[:] = 0
                taken.append(self._run(tier, is_promotion=True))
                self._compare()
        finally:
            tier.shutdown()
        return self._sample(store, min(taken, key=lambda phase: phase.wall))

    def spread(self) -> Sample:
        """Store and load over one raw connection, every block from and to a place of its own, checking nothing."""
        self._empty()
        names = [b"$%d\r\n%b\r\n" % (len(name), name) for name in (b"spread:%d" % row for row in range(self._blocks))]
        opening, size = b"$%d\r\n" % self._block_bytes, self._block_bytes
        reply_bytes = len(opening) + size + 2
        replies = np.ones(
            self._blocks * reply_bytes, dtype=np.uint8
        )  # ones: the kernel gives memory when it is written
        received = replies.data
        rows = [row.data for row in self._region.array]
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

            return self._sample(
                self._timed(lambda: self._in_batches(store)), self._timed(lambda: self._in_batches(load))
            )

    def raw(self, bench: Path) -> Sample:
        """Run the script of the raw limit."""
        total = ("--total-bytes", str(self._blocks * self._block_bytes))
        rates, cpu = self._other([sys.executable], bench / "redis_limit.py", "--port", str(self._server.port), *total)
        return self._foreign_sample(rates["set_gb_per_s"], rates["get_gb_per_s"], cpu[0], cpu[1])

    def resp(self, bench: Path, peers: Path) -> Sample:
        """Run the script of LMCache's client."""
        adapter = json.dumps({"type": "resp", "host": "127.0.0.1", "port": self._server.port})
        blocks = ("--blocks", str(self._blocks))
        rates, cpu = self._other([str(peers / "lmcache/run")], bench / "lmcache_l2.py", adapter, *blocks)
        return self._foreign_sample(rates["store_gb_per_s"], rates["load_gb_per_s"], cpu[0], min(cpu[1:]))

    def _run(self, tier: RedisTier, *, is_promotion: bool) -> Phase:
        """Run all jobs of one direction."""
        return self._timed(lambda: self._finish_jobs(tier, is_promotion=is_promotion))

    def _timed(self, work: Callable[[], None]) -> Phase:
        server, cpu, begin = self._server_cpu_s(), time.process_time(), time.perf_counter()
        work()
        wall, own = time.perf_counter() - begin, time.process_time() - cpu
        return Phase(wall, own, self._server_cpu_s() - server)

    def _server_cpu_s(self) -> float:
        lines = (line.partition(b":") for line in self._server.call("INFO", "cpu").splitlines())
        return sum(float(value) for name, _, value in lines if name in (b"used_cpu_sys", b"used_cpu_user"))

    def _in_batches(self, step: Callable[[int, int], None]) -> None:
        for first in range(0, self._blocks, self._batch):
            step(first, min(first + self._batch, self._blocks))

    def _finish_jobs(self, tier: RedisTier, *, is_promotion: bool) -> None:
        submit = tier.submit_load if is_promotion else tier.submit_store
        context = ReqContext("rates")
        pending = set()
        for first in range(0, self._blocks, self._batch):
            keys = self._keys[first : first + self._batch]
            rows = np.arange(first, first + len(keys), dtype=np.int64)
            job = JobMetadata(next(self._job_ids), keys, rows, is_promotion, context)
            pending.add(job.job_id)
            submit(job)
        while pending:
            for result in tier.get_finished():
                if not result.success:
                    raise AssertionError(f"a job failed: {result.reason}")
                pending.discard(result.job_id)
            time.sleep(0.0005)

    def _compare(self) -> None:
        array = self._region.array
        numbers = array[:, :8].copy().view("<u8").ravel()
        if not ((numbers == np.arange(self._blocks)).all() and (array[:, 8:] == self._expected).all()):
            raise AssertionError("wrong bytes")

    def _other(self, python: Sequence[str], script: Path, *arguments: str) -> tuple[dict[str, float], list[float]]:
        self._empty()
        size = ("--block-bytes", str(self._block_bytes), "--batch", str(self._batch))
        command = [*python, "-c", _WITH_CPU_TIMES, str(script), *arguments, *size]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
        rates, cpu = map(json.loads, output.strip().splitlines()[-2:])
        return rates, cpu

    def _empty(self) -> None:
        if self._fresh_memory:
            self._server.call("FLUSHALL", "SYNC")
            return
        # FLUSHALL would give the memory back to the kernel, or free it on another thread than the one that allocates.
        script = "local all = redis.call('KEYS', '*') for _, key in ipairs(all) do redis.call('DEL', key) end"
        self._server.call("EVAL", script, "0")

    def _sample(self, store: Phase, load: Phase) -> Sample:
        rates = [self._gigabytes / phase.wall for phase in (store, load)]
        costs = [seconds / self._gigabytes for seconds in (store.cpu, load.cpu, store.server, load.server)]
        return Sample(*rates, *costs)

    def _foreign_sample(self, store: float, load: float, store_cpu_s: float, load_cpu_s: float) -> Sample:
        return Sample(store, load, store_cpu_s / self._gigabytes, load_cpu_s / self._gigabytes)


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


def _block_key(row: int) -> OffloadKey:
    return make_offload_key(hashlib.sha256(row.to_bytes(8, "big")).digest(), 0)


def summary(samples: dict[str, list[Sample]]) -> dict[str, object]:
    """Return the medians of each side, and the ratios of those that belong together."""
    result: dict[str, object] = {}
    for side, taken in samples.items():
        for name in Sample.__slots__:
            values = [getattr(sample, name) for sample in taken]
            if not math.isnan(values[0]):
                result[f"{side}_{name}"] = round(statistics.median(values), 3)
    for ours, theirs in (("one_connection", "raw"), ("one_connection", "spread"), ("default", "resp")):
        for name in ("store_gb_per_s", "load_gb_per_s") if theirs in samples else ():
            pairs = zip(samples[ours], samples[theirs], strict=True)
            ratios = [getattr(mine, name) / getattr(other, name) for mine, other in pairs]
            what = f"{ours}_{name.removesuffix('_gb_per_s')}_over_{theirs}"
            result[what] = round(statistics.median(ratios), 3)
            result[f"{what}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--blocks", type=int, default=4096, help="redis_limit.py writes over its own beyond 4096")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="after those that warm the server up")
    parser.add_argument("--connections", type=int, help="of the default tier, instead of its default")
    parser.add_argument("--pipeline", help="instead of the default")
    parser.add_argument("--fresh-memory", action="store_true", help="empty the server's memory before each side")
    parser.add_argument("--bench", type=Path, default=BENCH, help="folder of redis_limit.py and lmcache_l2.py")
    parser.add_argument("--peers", type=Path, help="folder of the peers; without it LMCache is left out")
    arguments = parser.parse_args()
    pipeline = {} if arguments.pipeline is None else {"pipeline": arguments.pipeline}
    many = {} if arguments.connections is None else {"connections": arguments.connections}
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        size = (arguments.block_bytes, arguments.blocks, arguments.batch)
        bench = Bench(server, *size, fresh_memory=arguments.fresh_memory)
        try:
            os.environ.update({} if arguments.fresh_memory else KEEP_MEMORY)
            server.start()
            for _ in range(arguments.rounds + WARM_ROUNDS):
                samples["one_connection"].append(bench.ours(loads=1, connections=1, **pipeline))
                if (arguments.bench / "redis_limit.py").exists():
                    samples["raw"].append(bench.raw(arguments.bench))
                samples["spread"].append(bench.spread())
                samples["default"].append(bench.ours(loads=2, **many, **pipeline))
                if arguments.peers is not None:
                    samples["resp"].append(bench.resp(arguments.bench, arguments.peers))
        finally:
            server.kill()
            bench.close()
    counted = {side: taken[WARM_ROUNDS:] for side, taken in samples.items()}
    print(json.dumps({"block_bytes": arguments.block_bytes, "rounds": arguments.rounds, **summary(counted)}))


if __name__ == "__main__":
    main()
