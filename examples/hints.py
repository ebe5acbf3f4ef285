"""Requests that say what their blocks are worth: what nobody asks for again goes first, or is not stored at all.

python examples/hints.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import tiered_kv

BLOCK_BYTES = 4096
STACK = {
    "namespace": {"model": "example"},
    "block": {"bytes": BLOCK_BYTES},
    "primary": {"capacity": 16 * BLOCK_BYTES, "policy": "density"},
}


def prompt(name: str) -> list[bytes]:
    """Return the keys of a prompt's four blocks."""
    return [hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(4)]


def store(stack: tiered_kv.Stack, name: str, hints: Mapping[str, object] | None = None) -> None:
    stored = stack.put(prompt(name), bytes(4 * BLOCK_BYTES), hints=hints)
    print(f"{name}: {stored} blocks stored")


def ask(stack: tiered_kv.Stack, name: str, hints: Mapping[str, object] | None = None) -> None:
    found = stack.get(prompt(name), hints=hints)
    print(f"{name}: {len(found)} blocks found")


def main() -> None:
    with tiered_kv.open_stack(STACK) as stack:
        store(stack, "a document")
        store(stack, "a secret", {"skip": "store"})
        store(stack, "a summary that nobody asks for again", {"ttl": 0})
        store(stack, "an agent that calls a tool", {"expect_return": 5})
        store(stack, "a chat")
        store(stack, "another chat")  # for which there is no room
        ask(stack, "a summary that nobody asks for again")
        ask(stack, "a document")
        ask(stack, "a document", {"skip": "load"})  # as a benchmark does that measures prefill
        counters = stack.counters()["cpu"]
        print(f"{counters['hinted_requests_total']} requests with hints, {counters['refused_hints_total']} refused")


if __name__ == "__main__":
    main()
