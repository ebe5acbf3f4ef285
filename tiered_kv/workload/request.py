"""A request of a workload: the ids of its prompt's blocks, and their keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.errors import ConfigError

HASH_ID_MAX = 2**64 - 1

_KEY_PERSON = b"tiered-kv replay"
_KEY_HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Args:
        timestamp_ms: Arrival, in milliseconds since the workload began.
        input_length: Tokens in the prompt.
        output_length: Tokens that were generated.
        hash_ids: One id for each block of the prompt, in order. An id identifies the block and all blocks
            before it, so no id occurs twice.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def block_key(hash_id: int) -> OffloadKey:
    """Return the key of a block: the same in every process and on every machine."""
    digest = hashlib.blake2b(hash_id.to_bytes(8, "little"), digest_size=_KEY_HASH_BYTES, person=_KEY_PERSON).digest()
    return make_offload_key(digest, 0)


def require_at_least(least: int, settings: object, *names: str) -> None:
    """Raise ConfigError for the first of the named settings that is below `least`."""
    for name in names:
        if getattr(settings, name) < least:
            raise ConfigError(f"expected at least {least}, found {getattr(settings, name)}", location=name)
