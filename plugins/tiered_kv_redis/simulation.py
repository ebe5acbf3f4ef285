"""The redis tier for `tiered-kv simulate`: a server whose allocator rounds sizes up.

The simulation calls it on its one thread. It has sizes and keys, and no bytes.
"""

from __future__ import annotations

from tiered_kv.toolkit.keys_only import KeyStore


class RedisKeys(KeyStore):
    """The keys of a simulated server, for `tiered-kv simulate`. It evicts as the policy `allkeys-lru` does."""

    load_steps = 4

    @staticmethod
    def room_bytes(record_bytes: int) -> int:
        """Return what Redis's allocator, jemalloc, takes: it has four sizes between two powers of two."""
        step = 1 << max(4, (record_bytes - 1).bit_length() - 3)
        return -(-record_bytes // step) * step
