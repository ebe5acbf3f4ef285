"""The fs tier for `tiered-kv simulate`: a directory whose files take whole allocation units.

The simulation calls it on its one thread. It has sizes and keys, and no bytes.
"""

from __future__ import annotations

from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_fs.allocation import round_up


class FsKeys(KeyStore):
    """A directory without bytes, for `tiered-kv simulate`. A file takes whole allocation units of 4 KiB."""

    load_steps = 4

    def room_bytes(self, record_bytes: int) -> int:
        return round_up(record_bytes)
