"""Throughput of tiers over a host's memory, beside the same tier driven as the tiering manager does: one JSON object.

    python tests/performance/direct_rates.py DIRECTORY --tier nvme --block-bytes 65536 --blocks 4096 --rounds 5
    python tests/performance/direct_rates.py DIRECTORY --tier redis

Each round stores all blocks and loads them again, in jobs of `batch` blocks, into an empty tier for each side. `jobs`
submits them all to the tier and polls it. `direct` hands them all to `DirectTiers`. `one_by_one` hands over the next
when one has been reported. Every block that is loaded is compared. redis is a server on loopback. Ratios are medians
of the rounds' own ratios, with the lowest and highest. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.performance.bench import BlockRows, Sample, Taken, block_key, command_line, sample, summary, timed
from tests.support.redis_servers import RedisServer
from tiered_kv.base import OffloadKey
from tiered_kv.config.namespace import Namespace
from tiered_kv.direct import DirectTiers
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory

Jobs = list[tuple[list[OffloadKey], list[int]]]


@contextmanager
def empty_tier(directory: str, tier: str, capacity_bytes: int) -> Iterator[Mapping[str, object]]:
    """Yield the settings of a tier that is empty."""
    with tempfile.TemporaryDirectory(dir=directory) as path:
        if tier == "redis":
            with RedisServer(Path(path)) as server:
                yield {"type": tier, "url": server.url}
        else:
            yield {"type": tier, "path": f"{path}/tier", "capacity": capacity_bytes}


def driven(rows: BlockRows, settings: Mapping[str, object], batch: int, gigabytes: float) -> Sample:
    """Let one tier do all jobs."""
    tier = SecondaryTierFactory.create(TierSpec("tier", rows.block_bytes), rows.region.kv_view, settings)
    try:
        store = rows.store(tier, 0, rows.rows, batch)
        return sample(gigabytes, store, rows.load(tier, 0, rows.rows, batch))
    finally:
        tier.shutdown()


def direct(rows: BlockRows, settings: Mapping[str, object], batch: int, gigabytes: float, *, at_once: bool) -> Sample:
    """Let `DirectTiers` do all jobs."""
    size, total = rows.block_bytes, rows.rows
    keys, offsets = [block_key(number) for number in range(total)], list(range(0, total * size, size))
    jobs = [(keys[first : first + batch], offsets[first : first + batch]) for first in range(0, total, batch)]
    with DirectTiers(
        rows.region.kv_view, block_bytes=size, tiers=[settings], namespace=Namespace(model="rates")
    ) as tiers:
        store = _taken(tiers.store, jobs, at_once)
        rows.region.array[:] = 0
        load = _taken(tiers.load, jobs, at_once)
        rows.compare(range(total))
        return sample(gigabytes, store, load)


def _taken(method: Callable[..., None], jobs: Jobs, at_once: bool) -> Taken:
    ended = threading.Semaphore(0)

    def note(answers: list[bool]) -> None:
        if not all(answers):
            raise AssertionError("a block failed")
        ended.release()

    def work() -> None:
        for keys, offsets in jobs:
            method(keys, offsets, note)
            if not at_once:
                ended.acquire(timeout=60)
        for _ in jobs if at_once else ():
            ended.acquire(timeout=60)

    return timed(work)


def main() -> None:
    parser = command_line(__doc__, "directory", block_bytes=65536, blocks=4096, batch=32, rounds=5)
    parser.add_argument("--tier", choices=["nvme", "fs", "redis"], default="nvme")
    arguments = parser.parse_args()
    rows = BlockRows(arguments.block_bytes, arguments.blocks)
    total_bytes = arguments.block_bytes * arguments.blocks
    sides: dict[str, Callable[[Mapping[str, object]], Sample]] = {
        "jobs": lambda settings: driven(rows, settings, arguments.batch, total_bytes / 1e9),
        "direct": lambda settings: direct(rows, settings, arguments.batch, total_bytes / 1e9, at_once=True),
        "one_by_one": lambda settings: direct(rows, settings, arguments.batch, total_bytes / 1e9, at_once=False),
    }
    samples: dict[str, list[Sample]] = defaultdict(list)
    with ExitStack() as closing:
        closing.callback(rows.region.close)
        for _ in range(arguments.rounds):
            for name, side in sides.items():
                with empty_tier(arguments.directory, arguments.tier, 2 * total_bytes + (1 << 26)) as settings:
                    samples[name].append(side(settings))
    print(json.dumps(summary(samples, [("direct", "jobs"), ("one_by_one", "jobs")])))


if __name__ == "__main__":
    main()
