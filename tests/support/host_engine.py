"""An engine in a process of its own: `python -m tests.support.host_engine ADDRESS NAME SEED`.

It stores and loads until it is ended, checks each byte, and prints a line after each round.
"""

from __future__ import annotations

import random
import sys

from tests.support.host_server import Engine, keys_of


def main() -> None:
    address, name, seed = sys.argv[1:]
    chosen = random.Random(seed)
    engine = Engine(address, name)
    while True:
        first, count = chosen.randrange(200), chosen.randrange(1, 16)
        context = engine.begin()
        keys = keys_of(count, first)
        engine.manager.prefetch(keys, context)
        loaded = engine.load(keys, context)
        engine.store(keys[loaded:], context)
        held = engine.begin()
        engine.look_up(keys, held)  # leases that only its end gives back
        if chosen.random() < 0.5:
            engine.end(held)
        engine.end(context)
        print(loaded, flush=True)


if __name__ == "__main__":
    main()
