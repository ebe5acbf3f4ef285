"""Metrics and status of a stack, read over HTTP as Prometheus and an operator would.

In a clone:

    pip install '.[metrics]'
    python examples/metrics.py
"""

from __future__ import annotations

import json
import tempfile
from urllib.request import urlopen

import tiered_kv

BLOCK_BYTES = 64 << 10
SHOWN = ("tiered_kv_loaded_bytes_total", "tiered_kv_restored_tokens_total", "tiered_kv_tier_used_bytes")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "namespace": {"model": "example"},
            "block": {"bytes": BLOCK_BYTES, "tokens": 16},
            "primary": {"capacity": 16 * BLOCK_BYTES},
            "secondary": [{"type": "nvme", "path": f"{directory}/kv", "capacity": "64MiB"}],
            "metrics": {"listen": "127.0.0.1:0"},  # any free port; a server has one of its own
        }
        with tiered_kv.open_stack(config) as stack:
            keys = [number.to_bytes(32, "big") for number in range(64)]
            stack.put(keys, bytes(len(keys) * BLOCK_BYTES))
            stack.flush()
            stack.get(keys)

            assert stack.server is not None
            url = f"http://{stack.server.host}:{stack.server.port}"
            with urlopen(f"{url}/metrics", timeout=10) as answer:
                for line in answer.read().decode().splitlines():
                    if line.startswith(SHOWN):
                        print(line)
            with urlopen(f"{url}/status", timeout=10) as answer:
                status = json.load(answer)
            for tier in status["tiers"]:
                print(
                    f"{tier['name']}: {tier['used_bytes']} of {tier['capacity_bytes']} bytes, p99 {tier['p99_seconds']}"
                )


if __name__ == "__main__":
    main()
