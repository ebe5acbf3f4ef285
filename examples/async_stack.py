"""Requests of an asyncio program, which share a prompt: python examples/async_stack.py"""

from __future__ import annotations

import asyncio
import hashlib

import tiered_kv

BLOCK_BYTES = 4096
STACK = {"namespace": {"model": "example"}, "block": {"bytes": BLOCK_BYTES}, "primary": {"capacity": "1MiB"}}


def keys_of(*parts: str) -> list[bytes]:
    """Return the keys of a prompt's blocks: each hash stands for the whole prefix up to its block."""
    return [hashlib.sha256("".join(parts[: end + 1]).encode()).digest() for end in range(len(parts))]


async def answer(stack: tiered_kv.AsyncStack, *prompt: str) -> str:
    keys = keys_of(*prompt)
    found = len(await stack.get(keys, timeout=1.0))
    await stack.put(keys[found:], bytes((len(keys) - found) * BLOCK_BYTES))  # what the model has computed
    return f"{prompt[-1]}: {found} of {len(keys)} blocks found"


async def main() -> None:
    async with tiered_kv.AsyncStack(tiered_kv.open_stack(STACK)) as stack:
        print(await answer(stack, "system", "document", "summary"))
        questions = ("who", "when", "where")
        for line in await asyncio.gather(*(answer(stack, "system", "document", each) for each in questions)):
            print(line)
        print("stored:", await stack.contains(keys_of("system", "document", "who", "why")))


if __name__ == "__main__":
    asyncio.run(main())
