"""The fs tier without bytes, for `tiered-kv simulate`."""

from __future__ import annotations

from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_fs.files import round_up


class FsKeys(KeyStore):
    """A directory, whose files take whole blocks of the file system."""

    load_steps = 4

    @staticmethod
    def room_bytes(record_bytes: int) -> int:
        return round_up(record_bytes)
