"""An engine in a process of its own: `python -m tests.support.host_engine ADDRESS NAME SEED`.

It stores and loads until it is ended, checks each byte, and prints a line after each round.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

from tests.support.host_server import Engine, keys_of


def rounds(engine: Engine, seed: str) -> Iterator[int]:
    """Store and load for ever, and yield after each round how many blocks were loaded."""
    chosen, held = random.Random(seed), None
    while True:
        first, count = chosen.randrange(200), chosen.randrange(1, 16)
        context = engine.begin()
        keys = keys_of(count, first)
        engine.manager.prefetch(keys, context)
        loaded = engine.load(keys, context)
        engine.store(keys[loaded:], context)
        engine.end(context)
        if held is not None:
            engine.end(held)
        held = engine.begin()
        engine.look_up(keys, held)  # leases that a killed engine still has
        yield loaded


def main() -> None:
    address, name, seed = sys.argv[1:]
    for loaded in rounds(Engine(address, name), seed):
        print(loaded, flush=True)


if __name__ == "__main__":
    main()
