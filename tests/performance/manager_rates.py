"""Keys per second that the tiering manager handles: one JSON object.

    python tests/performance/manager_rates.py --policy lru --blocks 20000

The calls that a scheduler makes for requests of 512 keys, in its order, over one tier that keeps its keys in a
dictionary and finishes every job at once, so that what is measured is the manager.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.manager import CPUOffloadingManager
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from tiered_kv.tiering.manager import TieringOffloadingManager

REQUEST_KEYS = 512
BLOCK_BYTES = 4096


class InstantTier(SecondaryTierManager):
    """Remembers keys, moves nothing, and ends every job at once."""

    is_nonblocking = True

    def __init__(self, view: memoryview) -> None:
        super().__init__(None, view, "instant")
        self._keys: set[OffloadKey] = set()
        self._finished: list[JobResult] = []

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self._keys

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._keys.update(job_metadata.keys)
        self._finished.append(JobResult(job_metadata.job_id, True))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._finished.append(JobResult(job_metadata.job_id, True))

    def get_finished(self) -> Iterable[JobResult]:
        finished, self._finished = self._finished, []
        return finished


class Workload:
    """The four patterns over a primary tier of `count` blocks."""

    def __init__(self, policy: str, count: int) -> None:
        self.count = count
        region = PrimaryRegion(count, BLOCK_BYTES)
        primary = CPUOffloadingManager(CPUBackend(region), policy)
        self.manager = TieringOffloadingManager(primary, [InstantTier(region.kv_view)])
        self.keys = [make_offload_key(hashlib.sha256(i.to_bytes(8, "big")).digest(), 0) for i in range(4 * count)]
        self._request_ids = itertools.count()

    def requests(self, first: int, last: int) -> Iterator[tuple[list[OffloadKey], ReqContext]]:
        for start in range(_round_up(first), last - REQUEST_KEYS, REQUEST_KEYS):
            context = ReqContext(str(next(self._request_ids)))
            self.manager.on_new_request(context)
            yield self.keys[start : start + REQUEST_KEYS], context
            self.manager.on_request_finished(context)
            self.manager.on_schedule_end()

    def store(self) -> int:
        """Store twice what fits: the second half evicts."""
        done = 0
        for batch, context in self.requests(0, 2 * self.count):
            output = self.manager.prepare_store(batch, context)
            assert output is not None
            self.manager.complete_store(output.keys_to_store, context)
            done += len(batch)
        return done

    def lookup_hit(self) -> int:
        """Look up what the primary tier has."""
        return self._look_up(self.count + REQUEST_KEYS, 2 * self.count, expected=True)

    def lookup_miss(self) -> int:
        """Look up what no tier has."""
        return self._look_up(2 * self.count, 4 * self.count, expected=False)

    def load(self) -> int:
        """Look up, pin and release what the primary tier has."""
        done = 0
        for batch, context in self.requests(self.count + 2 * REQUEST_KEYS, 2 * self.count - REQUEST_KEYS):
            assert all([self.manager.lookup(key, context) for key in batch])  # noqa: C419  # all keys, as an engine does
            self.manager.prepare_load(batch, context)
            self.manager.complete_load(batch, context)
            done += len(batch)
        return done

    def _look_up(self, first: int, last: int, *, expected: bool) -> int:
        done = 0
        lookup = self.manager.lookup
        for batch, context in self.requests(first, last):
            for key in batch:
                if lookup(key, context) is not expected:
                    raise AssertionError(f"a lookup was not {expected}")
            done += len(batch)
        return done


def _round_up(number: int) -> int:
    """To whole requests, so that every pattern asks for the requests that were stored."""
    return -(-number // REQUEST_KEYS) * REQUEST_KEYS


def measure(policy: str, count: int) -> dict[str, int]:
    """Return keys per second by pattern."""
    workload = Workload(policy, count)
    patterns: dict[str, Callable[[], int]] = {
        "store": workload.store,
        "lookup_hit": workload.lookup_hit,
        "lookup_miss": workload.lookup_miss,
        "load": workload.load,
    }
    rates = {}
    for name, pattern in patterns.items():
        start = time.perf_counter()
        done = pattern()
        rates[f"{name}_keys_per_s"] = round(done / (time.perf_counter() - start))
    workload.manager.shutdown()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--blocks", type=int, default=20_000)
    arguments = parser.parse_args()
    print(json.dumps({"policy": arguments.policy, **measure(arguments.policy, arguments.blocks)}))


if __name__ == "__main__":
    main()
