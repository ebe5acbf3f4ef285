"""The s3 tier without bytes, for `tiered-kv simulate`."""

from __future__ import annotations

import math

from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_s3.presence import ASKED_AT_ONCE


class S3Keys(KeyStore):
    """A bucket: a sweep deletes the oldest objects, and used ones are renewed before their `ttl` ends."""

    evicts_by_use = False
    renews = True
    load_steps = 4

    def note_lookup(self, count: int) -> None:
        rounds = math.ceil(math.log(count + 1, ASKED_AT_ONCE + 1)) if count else 0
        self.lookup_requests += min(count, rounds * ASKED_AT_ONCE)
