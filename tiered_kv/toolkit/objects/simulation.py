"""An object tier for `tiered-kv simulate`: a bucket that deletes the oldest objects.

The simulation calls it on its one thread. It has sizes and keys, and no bytes.
"""

from __future__ import annotations

import math

from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv.toolkit.objects.presence import ASKED_AT_ONCE


class ObjectKeys(KeyStore):
    """A bucket without bytes, for `tiered-kv simulate`.

    A sweep deletes the oldest objects. A used object is renewed before it is that old.
    """

    renews = True
    load_steps = 4

    def note_lookup(self, count: int) -> None:
        rounds = math.ceil(math.log(count + 1, ASKED_AT_ONCE + 1)) if count else 0
        self.lookup_requests += min(count, rounds * ASKED_AT_ONCE)
