"""What the tier's objects are called.

    PREFIX/NAMESPACE/namespace.json             the namespace in readable form
    PREFIX/NAMESPACE/epoch                      the epoch of what is valid; absent before the first reset
    PREFIX/NAMESPACE/blocks/EPOCH/FF/KEY        a block's record; FF is the first byte of KEY
    PREFIX/NAMESPACE/grants/...                 what each process may yet store, see grants.py

NAMESPACE is the namespace's digest, KEY the digest of the block's key that stands in its record too, EPOCH 8 random
bytes, or zeros before the first reset; all in hex.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.record import digest_of

FIRST_EPOCH = "0" * 16


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of one namespace's objects.

    Args:
        prefix: What all names begin with, without a slash at its ends.
        namespace_digest: 16 bytes.
    """

    prefix: str
    namespace_digest: bytes

    @property
    def root(self) -> str:
        """What the names of everything of the namespace begin with."""
        return f"{self._root}/"

    @property
    def namespace(self) -> str:
        return f"{self._root}/namespace.json"

    @property
    def epoch(self) -> str:
        return f"{self._root}/epoch"

    @property
    def blocks(self) -> str:
        """What the names of all blocks, of whatever epoch, begin with."""
        return f"{self._root}/blocks/"

    @property
    def grants(self) -> str:
        """What the names of all grants begin with."""
        return f"{self._root}/grants/"

    def blocks_of(self, epoch: str) -> str:
        """What the names of an epoch's blocks begin with."""
        return f"{self._root}/blocks/{epoch}/"

    def block(self, epoch: str, key: OffloadKey) -> str:
        digest = digest_of(key).hex()
        return f"{self._root}/blocks/{epoch}/{digest[:2]}/{digest}"

    @property
    def _root(self) -> str:
        return f"{self.prefix}/{self.namespace_digest.hex()}"
