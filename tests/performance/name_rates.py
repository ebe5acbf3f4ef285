"""Nanoseconds that a tier's keyed names cost for each block: one JSON object.

    python tests/performance/name_rates.py

The least of several rounds of calls for `KEYS` blocks, less the same calls to the tier without names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable

from tests.performance.bench import InstantTier
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.tiering.keyed_names import KeyedNames, NameMap

KEYS = 8192
ROUNDS = 15
CONTEXT = ReqContext("request")


def measure() -> dict[str, int]:
    """Return nanoseconds a block."""
    keys = [make_offload_key(os.urandom(32), 0) for _ in range(KEYS)]
    tier = InstantTier(memoryview(b""))
    keyed = KeyedNames(tier, os.urandom(32))
    names = keyed._name_of
    assert isinstance(names, NameMap)
    alone, together = _one_by_one(tier, keys), lambda: tier.lookup_many(keys, CONTEXT)
    keyed_alone, keyed_together = _one_by_one(keyed, keys), lambda: keyed.lookup_many(keys, CONTEXT)
    # The two MACs as the wrapper would use either: the state that has absorbed key and namespace is copied.
    return {
        "lookup_new_ns": _least_ns(keyed_alone, names.clear) - _least_ns(alone),
        "lookup_known_ns": _least_ns(keyed_alone) - _least_ns(alone),
        "lookup_many_new_ns": _least_ns(keyed_together, names.clear) - _least_ns(together),
        "lookup_many_known_ns": _least_ns(keyed_together) - _least_ns(together),
        "blake2b_ns": _least_ns(_macs(hashlib.blake2b(bytes(17), digest_size=32, key=os.urandom(32)).copy, keys)),
        "hmac_sha256_ns": _least_ns(_macs(hmac.new(os.urandom(32), bytes(17), "sha256").copy, keys)),
    }


def _one_by_one(tier: InstantTier | KeyedNames, keys: list[OffloadKey]) -> Callable[[], object]:
    def look_up() -> None:
        lookup = tier.lookup
        for key in keys:
            lookup(key, CONTEXT)

    return look_up


def _macs(new_mac: Callable[[], hashlib.blake2b | hmac.HMAC], keys: list[OffloadKey]) -> Callable[[], object]:
    def compute() -> None:
        for key in keys:
            mac = new_mac()
            mac.update(key)
            mac.digest()

    return compute


def _least_ns(call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> int:
    took_ns = []
    for _ in range(ROUNDS):
        prepare()
        begin = time.perf_counter_ns()
        call()
        took_ns.append(time.perf_counter_ns() - begin)
    return round(min(took_ns) / KEYS)


if __name__ == "__main__":
    print(json.dumps(measure()))
