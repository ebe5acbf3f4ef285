"""Stores or loads some blocks over a stack, and prints how many: `keyed_names_program.py store|load CONFIG`."""

from __future__ import annotations

import json
import sys

import numpy as np

from tiered_kv.stack import open_stack
from tiered_kv.testing.rig import make_keys

KEYS = 8


def main() -> None:
    action, config = sys.argv[1:]
    with open_stack(json.loads(config)) as stack:
        blocks = np.zeros((KEYS, stack.config.block.bytes), np.uint8)
        if action == "store":
            blocks[:] = np.arange(KEYS, dtype=np.uint8)[:, None]
            done = stack.put(make_keys(KEYS), blocks)
            assert stack.flush(60.0)
        else:
            done = stack.get(make_keys(KEYS), blocks, 60.0)
            assert all((blocks[number] == number).all() for number in range(done))
    print(done)


if __name__ == "__main__":
    main()
