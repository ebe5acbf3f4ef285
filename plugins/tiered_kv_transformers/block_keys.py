"""The keys of a prompt's blocks: a chain of hashes over the token ids.

`PrefixCache` computes them, on the program's threads. What must stay true: two prompts have the same key for a block
only if they have the same tokens up to the end of the block.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

ALGORITHM = "blake2b-256-int64le-v1"
"""The name of the algorithm of `block_keys`, for the namespace. Another algorithm gets another name."""

_DIGEST_BYTES = 32
_PERSON = b"tiered-kv-tok-v1"
_ID_BYTES = 8


def block_keys(token_ids: np.ndarray[Any, np.dtype[Any]], block_tokens: int, seed: str = "") -> list[bytes]:
    """Return the keys of a prompt's full blocks; tokens of a partial last block have none.

    They are a chain of hashes over the ids, which `transformers.md` defines. The hash is cryptographic, with 32 bytes,
    because users are not trusted: two prompts with one hash would be answered from each other's keys and values.

    Args:
        token_ids: Integers, of shape (tokens,).
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
        keys.append(digest)
    return keys
