"""What encryption costs the nvme tier: raw beside a codec, in turn, as one JSON object.

    chrt -r 10 python tests/performance/encryption_rates.py DIRECTORY --rounds 15

DIRECTORY is on the disk to measure. Every round runs `nvme_rates.py` once with each codec, the other one first in every
second round, so that what else the machine does meets both alike. `ratio` has the codec's rate over the raw one of
the same round: its median, least and greatest. GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
DIRECTIONS = ("store", "load")
TIMEOUT_S = 600


def measure(directory: str, codec: str, sizes: Sequence[str]) -> dict[str, float]:
    """Return the rates of one run, in GB/s."""
    command = [sys.executable, str(HERE / "nvme_rates.py"), directory, "--codec", codec, *sizes]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    rates = json.loads(output)
    return {direction: float(rates[f"{direction}_gb_per_s"]) for direction in DIRECTIONS}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--codec", default="aes-256-gcm")
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("block-bytes", "blocks", "batch")]
    rates: defaultdict[str, dict[str, list[float]]] = defaultdict(lambda: {name: [] for name in DIRECTIONS})
    for number in range(arguments.rounds):
        pair = ("raw", arguments.codec)
        for codec in pair if number % 2 == 0 else pair[::-1]:
            for direction, rate in measure(arguments.directory, codec, sizes).items():
                rates[codec][direction].append(rate)
    report: dict[str, object] = {"codec": arguments.codec, "block_bytes": arguments.block_bytes}
    for direction in DIRECTIONS:
        raw, encoded = rates["raw"][direction], rates[arguments.codec][direction]
        report[direction] = {
            "raw_gb_per_s": spread(raw),
            "codec_gb_per_s": spread(encoded),
            "ratio": spread([mine / plain for mine, plain in zip(encoded, raw, strict=True)]),
        }
    print(json.dumps({**report, "rounds": arguments.rounds}))


if __name__ == "__main__":
    main()
