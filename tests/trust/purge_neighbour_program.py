"""A tenant's stack in a process of its own: stores and loads, checks every byte, until its input ends; then reports."""

from __future__ import annotations

import json
import select
import sys
import time

from tests.support.tenants import Stored
from tiered_kv.stack import open_stack

ROUND_BLOCKS = 16
"""Stored in each round; the stack's memory holds four rounds of them."""


def main() -> None:
    stored = Stored(sys.argv[1])
    rounds = wrong = came = 0
    with open_stack(sys.argv[2]) as stack:
        while True:
            stored.put(stack, stored.keys(ROUND_BLOCKS, rounds * ROUND_BLOCKS))
            old = stored.keys(ROUND_BLOCKS, max(0, rounds - 6) * ROUND_BLOCKS)
            new_came, new_wrong = stored.wrong(stack, old)
            came, wrong, rounds = came + new_came, wrong + new_wrong, rounds + 1
            report = {"at_s": time.monotonic(), "rounds": rounds, "came": came, "wrong": wrong}
            print(json.dumps(report), flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    print(json.dumps({"ended": True}), flush=True)


main()
