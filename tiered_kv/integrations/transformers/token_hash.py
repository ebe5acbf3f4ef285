"""The keys of a prompt's blocks: a chain of BLAKE2b hashes over its token ids.

    root   = BLAKE2b-256(seed in UTF-8)
    hash 0 = BLAKE2b-256(root     followed by the ids of block 0)
    hash n = BLAKE2b-256(hash n-1 followed by the ids of block n)

each personalised with `b"tiered-kv-tok-v1"`, an id being eight bytes, little-endian, two's complement. A cryptographic
hash, and 32 bytes of it, because prompts are written by strangers: whoever could make two prompts with one
hash could have a prompt answered from another's keys and values.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tiered_kv.base import OffloadKey, make_offload_key

ALGORITHM = "blake2b-256-int64le-v1"
"""What the namespace calls this definition; a change of it gets a new name."""

_DIGEST_BYTES = 32
_PERSON = b"tiered-kv-tok-v1"
_ID_BYTES = 8
_GROUP = 0


def block_keys(token_ids: np.ndarray[Any, np.dtype[Any]], block_tokens: int, seed: str = "") -> list[OffloadKey]:
    """Return the keys of the full blocks of a prompt; tokens of a partial last block have none.

    Args:
        token_ids: Integers, of shape (tokens,).
        block_tokens: Tokens of a block.
        seed: The namespace's `hash_seed`.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i8").tobytes()
    block_bytes = block_tokens * _ID_BYTES
    digest = hashlib.blake2b(seed.encode(), digest_size=_DIGEST_BYTES, person=_PERSON).digest()
    keys = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        state = hashlib.blake2b(digest, digest_size=_DIGEST_BYTES, person=_PERSON)
        state.update(data[start : start + block_bytes])
        digest = state.digest()
        keys.append(make_offload_key(digest, _GROUP))
    return keys
