"""The table of docs/explanation/performance.md: this project beside its peers and the machine's limits, in one run.

    python tests/performance/beside_peers.py DIRECTORY --bench ../shared/bench --peers PEERS --rounds 3 >table.md

DIRECTORY is on the disk to measure. PEERS holds the peers' environments, made by the bench folder's `setup_peers.sh`;
`fio`, `redis-server` and `nginx` must be installed. Every round runs each side once, in turn, so that what else the
machine does meets all of them alike. A row gives the median of the rounds with the lowest and the highest, and the same
of the ratio within a round: the machine's own speed may change between two rounds by more than a ratio does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # what a script prints

from tests.performance.bench import command_line, heading, ratios, row, shown

HERE = Path(__file__).parent
SIZES = ((65536, 16384), (1 << 20, 1024))
TIMEOUT_S = 900
PARTS = ("nvme", "open", "step", "manager", "redis", "s3")


@dataclass
class Measurements:
    """Samples by what was measured and of whom."""

    directory: Path
    bench: Path
    peers: Path
    samples: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def round(self, parts: Sequence[str]) -> None:
        """Run every side of `parts` once."""
        if "nvme" in parts:
            self._disk_limit()
            for block_bytes, blocks in SIZES:
                self._throughput(block_bytes, blocks)
        if "open" in parts:
            opened = self._ours("open_directory.py", "--rounds", "1")
            self._add("open 1,000,000 blocks (s)", "ours", opened["open_seconds"][0])
        if "step" in parts:
            steps = self._ours("step_latency.py", "--tiers", "nvme")["nvme"]
            for percentile in ("p50", "p99"):
                self._add(f"step {percentile} (us)", "ours", steps["busy_step_us"][percentile])
                self._add(f"step {percentile} (us)", "own idle step", steps["idle_step_us"][percentile])
        if "manager" in parts:
            self._manager()
        if "redis" in parts:
            for label, block_bytes, blocks in (("64 KiB", 65536, 4096), ("1 MiB", 1 << 20, 512)):
                self._redis(label, block_bytes, blocks)
        if "s3" in parts:
            self._s3()

    def table(self) -> str:
        lines = [heading("what", "ours", "beside", "theirs", "ratio", "to reach")]
        for what, whom, target in ROWS:
            ours, theirs = self.samples[what, "ours"], self.samples[what, whom]
            if ours:
                compared = ratios(ours, theirs) if theirs else []
                lines.append(row(what, shown(ours), whom, shown(theirs), shown(compared), target))
        return "\n".join(lines)

    def _throughput(self, block_bytes: int, blocks: int) -> None:
        label = "64 KiB" if block_bytes == 65536 else "1 MiB"
        size = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--batch", "32")
        ours = self._ours("nvme_rates.py", *size)
        with tempfile.TemporaryDirectory(dir=self.directory) as path:
            vllm = _run([str(self.peers / "vllm/run"), str(self.bench / "vllm_fs.py"), *size, f"{path}/fs"])
        with tempfile.TemporaryDirectory(dir=self.directory) as path:
            adapter = json.dumps({"type": "fs_native", "base_path": path, "num_workers": 8, "use_odirect": True})
            lmcache = _run([str(self.peers / "lmcache/run"), str(self.bench / "lmcache_l2.py"), *size, adapter])
        full = self._ours("nvme_rates.py", *size[:2], "--blocks", str(3 * blocks), "--capacity-blocks", str(blocks))
        for direction in ("store", "load"):
            what = f"{direction} {label} (GB/s)"
            for whom, rates in (("ours", ours), ("vLLM fs", vllm), ("LMCache fs_native", lmcache)):
                self._add(what, whom, rates[f"{direction}_gb_per_s"])
        what = f"store {label} while full (GB/s)"
        self._add(what, "ours", full["full_store_gb_per_s"])
        self._add(what, "own empty rate", full["empty_store_gb_per_s"])
        self._add(what, "vLLM fs", vllm["store_gb_per_s"])

    def _disk_limit(self) -> None:
        command = [str(self.bench / "disk_limit.sh"), str(self.directory)]
        for line in _output(command).splitlines():
            mode, rate, _ = line.split()
            for label in ("64 KiB", "1 MiB"):
                for what in [f"store {label}", f"store {label} while full"] if mode == "write" else [f"load {label}"]:
                    self._add(f"{what} (GB/s)", "fio", float(rate))

    def _manager(self) -> None:
        theirs = _run([str(self.peers / "vllm/run"), str(self.bench / "vllm_manager.py"), "--policy", "lru"])
        for policy in MANAGER_TARGETS:
            ours = self._ours("manager_rates.py", "--policy", policy, directory=False)
            for pattern in MANAGER:
                what = f"manager {pattern}, {policy} (keys/s)"
                self._add(what, "ours", ours[f"{pattern}_keys_per_s"])
                self._add(what, "vLLM manager", theirs[f"{pattern}_keys_per_s"])

    def _redis(self, label: str, block_bytes: int, blocks: int) -> None:
        size = ("--block-bytes", str(block_bytes), "--blocks", str(blocks), "--rounds", "1")
        others = ("--bench", str(self.bench), "--peers", str(self.peers))
        rates = self._ours("redis_rates.py", *size, *others, directory=False)
        for direction in ("store", "load"):
            for ours, whom, theirs in (
                ("one_connection", "raw RESP", "raw"),
                ("one_connection", "raw RESP, spread", "spread"),
                ("default", "LMCache resp", "resp"),
            ):
                what = f"redis {direction} {label}, {ours.replace('_', ' ')}"
                for unit, name in (("GB/s", "gb_per_s"), ("CPU-s/GB", "cpu_s_per_gb")):
                    if theirs != "spread":  # the same measurement as beside the other raw one
                        self._add(f"{what} ({unit})", "ours", rates[f"{ours}_{direction}_{name}"])
                    self._add(f"{what} ({unit})", whom, rates[f"{theirs}_{direction}_{name}"])

    def _s3(self) -> None:
        rates = self._ours("s3_rates.py", "--rounds", "1", directory=False)
        for direction in ("store", "load"):
            for unit, name in (("GB/s", "gb_per_s"), ("CPU-s/GB", "cpu_s_per_gb")):
                for whom in ("ours", "boto3"):
                    self._add(f"s3 {direction} 1 MiB ({unit})", whom, rates[f"{whom}_{direction}_{name}"])

    def _ours(self, script: str, *arguments: str, directory: bool = True) -> dict[str, Any]:
        where = [str(self.directory)] if directory else []
        return _run([sys.executable, str(HERE / script), *where, *arguments])

    def _add(self, what: str, whom: str, value: float) -> None:
        self.samples[what, whom].append(value)


DISK = ("store 64 KiB", "load 64 KiB", "store 1 MiB", "load 1 MiB")
DISK_TARGETS = {"vLLM fs": ("3 x", "1.3 x", "1.3 x", "1 x"), "fio": ("0.9 x",) * 4, "LMCache fs_native": ("",) * 4}
FULL_TARGETS = {"own empty rate": ("0.7 x", "0.7 x"), "vLLM fs": ("3 x", "1.3 x"), "fio": ("0.9 x", "0.9 x")}
MANAGER = ("store", "lookup_hit", "lookup_miss", "load")
MANAGER_TARGETS = {"lru": "3 x", "density": "1.5 x"}

ROWS = (
    *(
        (f"{what} (GB/s)", whom, target)
        for whom, targets in DISK_TARGETS.items()
        for what, target in zip(DISK, targets, strict=True)
    ),
    *(
        (f"{what} while full (GB/s)", whom, target)
        for whom, targets in FULL_TARGETS.items()
        for what, target in zip(DISK[::2], targets, strict=True)
    ),
    ("open 1,000,000 blocks (s)", "", "2 s"),
    *(
        (f"manager {what}, {policy} (keys/s)", "vLLM manager", target)
        for policy, target in MANAGER_TARGETS.items()
        for what in MANAGER
    ),
    ("step p50 (us)", "own idle step", ""),
    ("step p99 (us)", "own idle step", "at most 3 x"),
    *(
        (f"redis {direction} {size}, {ours} ({unit})", whom, target if unit == "GB/s" else "")
        for ours, whom, targets in (
            ("one connection", "raw RESP", {"store": "0.85 x", "load": "0.85 x"}),
            ("one connection", "raw RESP, spread", {"store": "", "load": ""}),
            ("default", "LMCache resp", {"store": "1.2 x", "load": "1 x"}),
        )
        for unit in ("GB/s", "CPU-s/GB")
        for size in ("64 KiB", "1 MiB")
        for direction, target in targets.items()
    ),
    ("s3 store 1 MiB (GB/s)", "boto3", "2 x"),
    ("s3 load 1 MiB (GB/s)", "boto3", "2 x"),
    ("s3 store 1 MiB (CPU-s/GB)", "boto3", "at most 0.5 x"),
    ("s3 load 1 MiB (CPU-s/GB)", "boto3", "at most 0.5 x"),
)


def _run(command: list[str]) -> dict[str, Any]:
    """Run a script that prints one JSON object, and return it."""
    answer = json.loads(_output(command).strip().splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def main() -> None:
    parser = command_line(__doc__, "directory", rounds=3)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; by default all")
    arguments = parser.parse_args()
    measurements = Measurements(arguments.directory, arguments.bench, arguments.peers)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        measurements.round(arguments.parts)
    print(measurements.table())


if __name__ == "__main__":
    main()
