"""The ratios of docs/explanation/performance.md: this project beside its peers and the machine's limits, in one run.

    python tests/performance/beside_peers.py DIRECTORY --bench ../shared/bench --peers PEERS --rounds 3 >table.md

DIRECTORY is on the disk to measure. PEERS holds the peers' environments, made by the bench folder's `setup_peers.sh`;
`fio`, `redis-server` and `nginx` must be installed. Every round runs each side once, in turn, so that what else the
machine does meets all of them alike. A row gives the median of the rounds with the lowest and the highest, and the same
of the ratio within a round: the machine's own speed may change between two rounds by more than a ratio does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any  # what a script prints

from tests.performance.bench import Table, command_line, in_turn
from tests.support.lmcache_programs import adapter
from tests.support.redis_servers import RedisServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 900
MANAGER_TARGETS = {"lru": "3 x", "density": "1.5 x"}
VLLM_TARGETS = {
    "store 64 KiB": "3 x",
    "load 64 KiB": "1.3 x",
    "store 1 MiB": "1.3 x",
    "load 1 MiB": "1 x",
}
REDIS_TARGETS = {
    ("raw RESP", "store"): "0.85 x",
    ("raw RESP", "load"): "0.85 x",
    ("LMCache resp", "store"): "1.2 x",
    ("LMCache resp", "load"): "1 x",
}
LMCACHE_TARGETS = {
    "nvme, 64 KiB: store": "3 x",
    "nvme, 64 KiB: load": "1.2 x",
    "nvme, 1 MiB: store": "1.2 x",
    "nvme, 1 MiB: load": "1 x",
}
DISK_SIZES = (("64 KiB", 65536, 16384), ("1 MiB", 1 << 20, 1024))


class Measurements:
    """Runs the sides of each part, and adds a value of this round to their rows."""

    def __init__(self, directory: Path, bench: Path, peers: Path) -> None:
        self._directory, self._bench, self._peers = directory, bench, peers
        self.table = Table()
        self.number = 0
        """Of the round."""

    def nvme(self) -> None:
        limits = [line.split() for line in _output([str(self._bench / "disk_limit.sh"), str(self._directory)])]
        fio = {{"write": "store", "read": "load"}[mode]: float(rate) for mode, rate, _ in limits}
        for size, block_bytes, blocks in DISK_SIZES:
            self._disk(fio, size, block_bytes, blocks)

    def _disk(self, fio: dict[str, float], size: str, block_bytes: int, blocks: int) -> None:
        sizes = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--batch", "32")
        ours = self._ours("nvme_rates.py", *sizes)
        with tempfile.TemporaryDirectory(dir=self._directory) as path:
            vllm = self._peer("vllm", "vllm_fs.py", *sizes, f"{path}/fs")
        with tempfile.TemporaryDirectory(dir=self._directory) as path:
            lmcache = self._peer("lmcache", "lmcache_l2.py", *sizes, fs_native(path))
        for direction in ("store", "load"):
            what, name = f"{direction} {size}", f"{direction}_gb_per_s"
            self.table.add(f"{what} (GB/s)", ours[name], "vLLM fs", vllm[name], VLLM_TARGETS[what])
            self.table.add(f"{what} (GB/s)", ours[name], "fio", fio[direction], "0.9 x")
            self.table.add(f"{what} (GB/s)", ours[name], "LMCache fs_native", lmcache[name])
        full_sizes = (*sizes[:2], "--blocks", str(3 * blocks), "--capacity-blocks", str(blocks))
        full = self._ours("nvme_rates.py", *full_sizes)
        what, rate = f"store {size} while full (GB/s)", full["full_store_gb_per_s"]
        self.table.add(what, rate, "own empty rate", full["empty_store_gb_per_s"], "0.7 x")
        self.table.add(what, rate, "vLLM fs", vllm["store_gb_per_s"], VLLM_TARGETS[f"store {size}"])
        self.table.add(what, rate, "fio", fio["store"], "0.9 x")

    def open(self) -> None:
        opened = self._ours("nvme_rates.py", "--block-bytes", "4096", "--blocks", "1000000")
        self.table.add("open 1,000,000 blocks (s)", opened["open_s"], target="2 s")

    def step(self) -> None:
        steps = self._ours("step_latency.py", "--tiers", "nvme")["nvme"]
        for percentile, target in (("p50", ""), ("p99", "at most 3 x")):
            busy, idle = (steps[f"{phase}_step_us"][percentile] for phase in ("busy", "idle"))
            self.table.add(f"step {percentile} (us)", busy, "own idle step", idle, target)

    def manager(self) -> None:
        theirs = self._peer("vllm", "vllm_manager.py", "--policy", "lru")
        for policy, target in MANAGER_TARGETS.items():
            ours = self._ours("manager_rates.py", "--policy", policy, has_directory=False)
            for pattern in ("store", "lookup_hit", "lookup_miss", "load"):
                what, name = f"manager {pattern}, {policy} (keys/s)", f"{pattern}_keys_per_s"
                self.table.add(what, ours[name], "vLLM manager", theirs[name], target)

    def redis(self) -> None:
        for size, block_bytes, blocks in (("64 KiB", 65536, 4096), ("1 MiB", 1 << 20, 512)):
            sizes = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--rounds", "1")
            peers = ("--bench", str(self._bench), "--peers", str(self._peers))
            rates = self._ours("redis_rates.py", *sizes, *peers, has_directory=False)
            for ours, whom, theirs in (("one_connection", "raw RESP", "raw"), ("default", "LMCache resp", "resp")):
                for direction in ("store", "load"):
                    what, name = f"redis {direction} {size}, {ours.replace('_', ' ')} (GB/s)", f"{direction}_gb_per_s"
                    mine, other = rates[f"{ours}_{name}"], rates[f"{theirs}_{name}"]
                    self.table.add(what, mine, whom, other, REDIS_TARGETS[whom, direction])

    def s3(self) -> None:
        rates = self._ours("s3_rates.py", "--rounds", "1", has_directory=False)
        for direction in ("store", "load"):
            for unit, name, target in (("GB/s", "gb_per_s", "2 x"), ("CPU-s/GB", "cpu_s_per_gb", "at most 0.5 x")):
                mine, other = (rates[f"{side}_{direction}_{name}"] for side in ("ours", "boto3"))
                self.table.add(f"s3 {direction} 1 MiB ({unit})", mine, "boto3", other, target)

    def lmcache(self) -> None:
        """Measure our tiers as an L2 adapter of LMCache, beside its own adapters."""
        with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
            resp = json.dumps({"type": "resp", "host": "127.0.0.1", "port": server.port})
            redis = {"ours": adapter([{"type": "redis", "url": server.url}]), "resp": resp}
            for size, block_bytes, blocks in DISK_SIZES:
                with tempfile.TemporaryDirectory(dir=self._directory) as path:
                    ours = adapter([{"type": "nvme", "path": f"{path}/ours", "capacity": "4GiB"}])
                    nvme = {"ours": ours, "fs_native": fs_native(path)}
                    self._adapters(f"nvme, {size}", nvme, block_bytes, blocks, lambda: None)
                self._adapters(f"redis, {size}", redis, block_bytes, blocks // 2, server.empty)

    def _adapters(
        self, over: str, configs: dict[str, str], block_bytes: int, blocks: int, empty: Callable[[], None]
    ) -> None:
        """Measure both sides in turn: a server that has just freed memory stores faster."""
        sizes, rates = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--batch", "32"), {}
        for side in in_turn(self.number, configs):
            rates[side] = self._peer("lmcache", "lmcache_l2.py", configs[side], *sizes)
            empty()
        whom = list(configs)[1]
        for direction in ("store", "load"):
            name, target = f"{direction}_gb_per_s", LMCACHE_TARGETS.get(f"{over}: {direction}", "0.9 x")
            what = f"LMCache over {over}: {direction} (GB/s)"
            self.table.add(what, rates["ours"][name], whom, rates[whom][name], target)

    def _ours(self, script: str, *arguments: str, has_directory: bool = True) -> dict[str, Any]:
        where = [str(self._directory)] if has_directory else []
        return _printed([sys.executable, str(HERE / script), *where, *arguments])

    def _peer(self, peer: str, script: str, *arguments: str) -> dict[str, Any]:
        return _printed([str(self._peers / peer / "run"), str(self._bench / script), *arguments])


PARTS = {
    "nvme": Measurements.nvme,
    "open": Measurements.open,
    "step": Measurements.step,
    "manager": Measurements.manager,
    "redis": Measurements.redis,
    "s3": Measurements.s3,
    "lmcache": Measurements.lmcache,
}


def fs_native(path: str) -> str:
    """Return LMCache's option for its own adapter."""
    return json.dumps({"type": "fs_native", "base_path": path, "num_workers": 8, "use_odirect": True})


def _printed(command: list[str]) -> dict[str, Any]:
    """Return the JSON object that a script prints last."""
    printed: dict[str, Any] = json.loads(_output(command)[-1])
    return printed


def _output(command: list[str]) -> list[str]:
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables)
    return done.stdout.strip().splitlines()


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=3)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to measure; by default all")
    arguments = parser.parse_args()
    measurements = Measurements(arguments.directory, arguments.bench, arguments.peers)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        measurements.number = number
        for part in arguments.parts:
            PARTS[part](measurements)
    print(measurements.table)


if __name__ == "__main__":
    main()
