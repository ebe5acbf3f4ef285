"""Conversions between LMCache's keys and ours.

The group index of our key is LMCache's object group, and its hash is:

    length of the chunk's hash (1 byte) || hash || rank (8 bytes, big-endian) || salt (UTF-8)

The model's name is not in it: each model has its own tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey

from tiered_kv.base import OffloadKey, get_offload_block_hash, get_offload_group_idx, make_offload_key

_RANK_BYTES = 8


def offload_key(key: ObjectKey) -> OffloadKey:
    """Return the key of an LMCache object in the tiers of its model."""
    chunk_hash = key.chunk_hash
    rank = key.kv_rank.to_bytes(_RANK_BYTES, "big")
    return make_offload_key(
        bytes((len(chunk_hash),)) + chunk_hash + rank + key.cache_salt.encode(), key.object_group_id
    )


def object_key(key: OffloadKey, model: str) -> ObjectKey:
    """Return the key of LMCache from which `offload_key` made `key`."""
    text = get_offload_block_hash(key)
    rank_at = 1 + text[0]
    salt_at = rank_at + _RANK_BYTES
    return ObjectKey(
        chunk_hash=text[1:rank_at],
        model_name=model,
        kv_rank=int.from_bytes(text[rank_at:salt_at], "big"),
        object_group_id=get_offload_group_idx(key),
        cache_salt=text[salt_at:].decode(),
    )


def in_prefix_order(keys: Sequence[ObjectKey]) -> list[int]:
    """Return the places of `keys`, sorted by group and within a group by the prompt's chunks.

    LMCache looks up all chunks of one rank, then all of the next. A tier that searches a prefix by parts needs all
    ranks of a chunk before the next chunk.
    """
    chunks_before: Counter[tuple[int, int]] = Counter()
    order = []
    for place, key in enumerate(keys):
        row = (key.object_group_id, key.kv_rank)
        order.append((key.object_group_id, chunks_before[row], place))
        chunks_before[row] += 1
    return [place for _, _, place in sorted(order)]
