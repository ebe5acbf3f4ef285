"""Swap a model's weights under one namespace, and let the audit find out.

    python examples/audit/audit.py

The "model" is a few lines: a block's values are a function of its tokens and of the weights. The namespace names the
model's path, and new weights have been copied to that path. So the second process finds the blocks of the first.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from typing import Any

import numpy as np

import tiered_kv

BLOCK_VALUES, BLOCK_TOKENS, BLOCKS = 4096, 16, 8


def config(directory: str) -> dict[str, object]:
    return {
        "namespace": {"model": "/models/chat", "dtype": "float32"},
        "block": {"bytes": 4 * BLOCK_VALUES, "tokens": BLOCK_TOKENS},
        "primary": {"capacity": "4MiB"},
        "secondary": [{"type": "nvme", "path": directory, "capacity": "16MiB"}],
        "audit": 0.25,  # a server would take 0.001
        "audit_action": "stop",
    }


def keys_of(prompt: str) -> list[bytes]:
    return [hashlib.sha256(f"{prompt}, block {number}".encode()).digest() for number in range(BLOCKS)]


def compute(keys: list[bytes], weights: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    blocks = [np.random.default_rng([weights, *key]).normal(size=BLOCK_VALUES) for key in keys]
    return np.array(blocks, dtype=np.float32)


def serve(stack: tiered_kv.Stack, prompt: str, weights: int) -> int:
    """Load a prompt's blocks, compute and store the rest; return how many were found."""
    keys = keys_of(prompt)
    found = len(stack.get(keys))
    stack.put(keys[found:], compute(keys[found:], weights))
    stack.flush()
    return found


def main() -> None:
    logging.basicConfig(format="log: %(message)s")
    prompts = [f"prompt {number}" for number in range(12)]
    with tempfile.TemporaryDirectory() as directory:
        for weights in (1, 2):
            print(f"a process with weights {weights}")
            with tiered_kv.open_stack(config(directory)) as stack:
                for prompt in prompts:
                    print(f"  {prompt}: {serve(stack, prompt, weights)} of {BLOCKS} blocks found")
                counters = stack.counters()["nvme"]
            audited = counters.get("audited_blocks_total", {})
            print(f"  nvme: audited {audited}, stopped {counters.get('audit_stopped', 0)}")


if __name__ == "__main__":
    main()
