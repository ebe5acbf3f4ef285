"""Entries of a segment for tests that have no file."""

from __future__ import annotations

from collections.abc import Sequence

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import RAW_ID
from tiered_kv_nvme.layout import CHECKSUM_BYTES, PAGE_BYTES, encode_entries


def entries_of(keys: Sequence[OffloadKey]) -> bytes:
    """Return encoded entries of blocks of one page, one behind the other."""
    count = len(keys)
    offsets = [PAGE_BYTES * (1 + number) for number in range(count)]
    return encode_entries(keys, offsets, [PAGE_BYTES] * count, [RAW_ID] * count, [bytes(CHECKSUM_BYTES)] * count)
