"""Blocks that were not hit, and the stack's answer why: evicted, not admitted, reset, or never seen.

python examples/why_a_miss.py
"""

from __future__ import annotations

import hashlib

import tiered_kv

BLOCK_BYTES = 4096
STACK = {
    "namespace": {"model": "example"},
    "block": {"bytes": BLOCK_BYTES},
    "primary": {"capacity": 16 * BLOCK_BYTES},
    "secondary": [
        {"type": "memory", "name": "small", "capacity": 12 * (BLOCK_BYTES + 512)},
        {"type": "memory", "name": "picky", "capacity": "1MiB", "admit_after": 2},
    ],
}


def prompt(name: str, blocks: int = 4) -> list[bytes]:
    """Return the keys of a prompt's blocks."""
    return [hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(blocks)]


def store(stack: tiered_kv.Stack, keys: list[bytes]) -> None:
    stack.put(keys, bytes(len(keys) * BLOCK_BYTES))
    stack.flush()


def ask(stack: tiered_kv.Stack, name: str) -> None:
    """Ask for a prompt's blocks, and say why the first was a miss."""
    keys = prompt(name)
    found = len(stack.get(keys))
    stack.flush()  # a load is a use: it may be why a tier stores the block now
    (explanation,) = stack.explain(keys[:1])
    print(f"{name}: {found} of {len(keys)} blocks; the first: ", end="")
    print(", ".join(f"{tier.tier} {tier.fate}" for tier in explanation.tiers))


def main() -> None:
    with tiered_kv.open_stack(STACK) as stack:
        ask(stack, "a prompt that nobody has asked before")
        store(stack, prompt("an old prompt"))
        store(stack, prompt("others", 16))  # as much as the primary tier holds, and more than the small one
        ask(stack, "an old prompt")
        store(stack, prompt("a recent prompt"))
        ask(stack, "a recent prompt")
        stack.reset_cache()  # as after an update of the weights
        ask(stack, "a recent prompt")
        for tier, counters in stack.counters().items():
            print(f"{tier}: {counters['blocks_total']}, misses {counters.get('misses_total', {})}")


if __name__ == "__main__":
    main()
