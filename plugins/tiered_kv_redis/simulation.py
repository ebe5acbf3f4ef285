"""The redis tier for `tiered-kv simulate`: a server whose allocator rounds sizes up.

The simulation calls it on its one thread. It has sizes and keys, and no bytes.
"""

from __future__ import annotations

from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_redis.allocators import DEFAULT, room_bytes
from tiered_kv_redis.settings import RedisSettings


class RedisKeys(KeyStore):
    """The keys of a simulated server, for `tiered-kv simulate`. It evicts as the policy `allkeys-lru` does."""

    load_steps = 4

    def room_bytes(self, record_bytes: int) -> int:
        """Return what the server's allocator takes: there is no server here, and the settings say which it has."""
        allocator = self.settings.allocator if isinstance(self.settings, RedisSettings) else None
        return room_bytes(record_bytes, allocator or DEFAULT) or record_bytes
