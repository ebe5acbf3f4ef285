"""The redis tier without bytes, for `tiered-kv simulate`."""

from __future__ import annotations

from tiered_kv.toolkit.keys_only import KeyStore


class RedisKeys(KeyStore):
    """A server that evicts by `allkeys-lru`."""

    load_steps = 4

    @staticmethod
    def room_bytes(record_bytes: int) -> int:
        """Return what Redis's allocator, jemalloc, takes: it has four sizes between two powers of two."""
        step = 1 << max(4, (record_bytes - 1).bit_length() - 3)
        return -(-record_bytes // step) * step
