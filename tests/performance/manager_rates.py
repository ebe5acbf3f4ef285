"""Keys per second that the tiering manager handles: one JSON object.

    python tests/performance/manager_rates.py --policy lru --blocks 20000

The calls that a scheduler makes for requests of 512 keys, in its order, over one tier that keeps its keys in a
dictionary and finishes every job at once, so that what is measured is the manager.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.performance.bench import InstantTier, block_key, command_line
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.manager import TieringOffloadingManager

REQUEST_KEYS = 512
BLOCK_BYTES = 4096


Act = Callable[[list[OffloadKey], ReqContext], None]


@contextmanager
def opened(policy: str, count: int) -> Iterator[TieringOffloadingManager]:
    """Give a manager over a primary tier of `count` blocks."""
    region = PrimaryRegion(count, BLOCK_BYTES)
    primary = CPUOffloadingManager(CPUBackend(region), policy)
    manager = TieringOffloadingManager(primary, [InstantTier(region.kv_view)])
    try:
        yield manager
    finally:
        manager.shutdown()


def rates(manager: TieringOffloadingManager, count: int) -> dict[str, int]:
    """Return keys per second by pattern; the primary tier has `count` blocks."""
    keys = [block_key(number) for number in range(4 * count)]
    request_ids = itertools.count()
    lookup = manager.lookup

    def rate(act: Act, first: int, last: int) -> int:
        """Act for each request; they begin where those that were stored do, so that the same ones are asked for."""
        whole, done = -(-first // REQUEST_KEYS) * REQUEST_KEYS, 0
        begin = time.perf_counter()
        for start in range(whole, last - REQUEST_KEYS, REQUEST_KEYS):
            context = ReqContext(str(next(request_ids)))
            manager.on_new_request(context)
            act(keys[start : start + REQUEST_KEYS], context)
            manager.on_request_finished(context)
            manager.on_schedule_end()
            done += REQUEST_KEYS
        return round(done / (time.perf_counter() - begin))

    def store(batch: list[OffloadKey], context: ReqContext) -> None:
        output = manager.prepare_store(batch, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)

    def look_up(expected: bool) -> Act:
        def act(batch: list[OffloadKey], context: ReqContext) -> None:
            for key in batch:
                if lookup(key, context) is not expected:
                    raise AssertionError(f"a lookup was not {expected}")

        return act

    def load(batch: list[OffloadKey], context: ReqContext) -> None:
        assert all([lookup(key, context) for key in batch])  # noqa: C419  # all keys, as an engine does
        manager.prepare_load(batch, context)
        manager.complete_load(batch, context)

    return {
        "store_keys_per_s": rate(store, 0, 2 * count),  # twice what fits: the second half evicts
        "lookup_hit_keys_per_s": rate(look_up(True), count + REQUEST_KEYS, 2 * count),
        "lookup_miss_keys_per_s": rate(look_up(False), 2 * count, 4 * count),
        "load_keys_per_s": rate(load, count + 2 * REQUEST_KEYS, 2 * count - REQUEST_KEYS),
    }


def main() -> None:
    arguments = command_line(__doc__, policy="lru", blocks=20_000).parse_args()
    with opened(arguments.policy, arguments.blocks) as manager:
        print(json.dumps({"policy": arguments.policy, **rates(manager, arguments.blocks)}))


if __name__ == "__main__":
    main()
