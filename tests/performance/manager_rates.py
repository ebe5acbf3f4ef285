"""Keys per second that the tiering manager handles: one JSON object.

    python tests/performance/manager_rates.py --policy lru --blocks 20000

The calls that a scheduler makes for requests of 512 keys, in its order, over one tier that keeps its keys in a
dictionary and finishes every job at once, so that what is measured is the manager.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.performance.bench import Act, InstantTier, block_key, command_line, handle, load, store
from tiered_kv.base import OffloadingManager, OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.tiering.manager import TieringOffloadingManager

REQUEST_KEYS = 512
BLOCK_BYTES = 4096


@contextmanager
def opened(policy: str, count: int) -> Iterator[TieringOffloadingManager]:
    """Give a manager over a primary tier of `count` blocks."""
    region = PrimaryRegion(count, BLOCK_BYTES)
    primary = PrimaryRows(CPUBackend(region), policy)
    manager = TieringOffloadingManager(primary, [InstantTier(region.kv_view)])
    try:
        yield manager
    finally:
        manager.shutdown()


def rates(manager: TieringOffloadingManager, count: int) -> dict[str, int]:
    """Return keys per second by pattern; the primary tier has `count` blocks."""
    keys = [block_key(number) for number in range(4 * count)]

    def rate(act: Act, first: int, last: int) -> int:
        """Act for each request that lies between two keys; requests begin at multiples of `REQUEST_KEYS`."""
        starts = range(-(-first // REQUEST_KEYS) * REQUEST_KEYS, last - REQUEST_KEYS, REQUEST_KEYS)
        # Whether a full collection falls into a rate depends on how many objects were made before, and costs it a
        # fifth: a version without any change would be faster or slower. `step_latency.py` measures with collections.
        gc.collect()
        gc.disable()
        try:
            begin_s = time.perf_counter()
            for start in starts:
                handle(manager, keys[start : start + REQUEST_KEYS], (act,))
            return round(len(starts) * REQUEST_KEYS / (time.perf_counter() - begin_s))
        finally:
            gc.enable()

    return {
        "store_keys_per_s": rate(store, 0, 2 * count),  # twice what fits: the second half evicts
        "lookup_hit_keys_per_s": rate(partial(look_up, True), count + REQUEST_KEYS, 2 * count),
        "lookup_miss_keys_per_s": rate(partial(look_up, False), 2 * count, 4 * count),
        "load_keys_per_s": rate(look_up_and_load, count + 2 * REQUEST_KEYS, 2 * count - REQUEST_KEYS),
    }


def look_up(expected: bool, manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    lookup = manager.lookup
    for key in keys:
        if lookup(key, context) is not expected:
            raise AssertionError(f"a lookup was not {expected}")


def look_up_and_load(manager: OffloadingManager, keys: list[OffloadKey], context: ReqContext) -> None:
    look_up(True, manager, keys, context)
    load(manager, keys, context)


def main() -> None:
    arguments = command_line(__doc__, policy="lru", blocks=20_000).parse_args()
    with opened(arguments.policy, arguments.blocks) as manager:
        print(json.dumps({"policy": arguments.policy, **rates(manager, arguments.blocks)}))


if __name__ == "__main__":
    main()
