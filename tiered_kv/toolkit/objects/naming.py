"""The names of an object tier's objects.

    PREFIX/NAMESPACE/namespace.json             the namespace in readable form
    PREFIX/NAMESPACE/epoch                      the mark of the epoch that later processes join
    PREFIX/NAMESPACE/sweep                      who sweeps, and when it last did
    PREFIX/NAMESPACE/blocks/EPOCH/FF/KEY        a block's record; FF is the first byte of KEY

NAMESPACE is the namespace's digest, KEY the digest of the block's key (as in its record), EPOCH the epoch's value; all
in hex. Other objects under `PREFIX/NAMESPACE/` are foreign, and never deleted. The tier's workers, the sweeper and the
commands use these names.
"""

from __future__ import annotations

import re
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.record import digest_of

_BLOCK: Final = re.compile(r"[0-9a-f]{16}/([0-9a-f]{2})/\1[0-9a-f]{30}")
"""The form of a block's name after `Naming.blocks`."""


class Naming:
    """The names of one namespace's objects."""

    def __init__(self, prefix: str, namespace_digest: bytes) -> None:
        self.digest = namespace_digest.hex()
        self.root = f"{prefix}/{self.digest}/"
        """The beginning of all names."""
        self.namespace = f"{self.root}namespace.json"
        self.epoch = f"{self.root}epoch"
        self.sweep = f"{self.root}sweep"
        self.blocks = f"{self.root}blocks/"
        """The beginning of the names of all blocks, of any epoch."""
        self.no_block = f"{self.blocks}{'0' * 16}/00/{'0' * 32}"  # the name of no block: no epoch has this value

    def block(self, epoch: str, key: OffloadKey) -> str:
        digest = digest_of(key).hex()
        return f"{self.blocks}{epoch}/{digest[:2]}/{digest}"

    def is_block(self, name: str) -> bool:
        """Return whether this is the name of a block of this namespace, in any epoch."""
        return name.startswith(self.blocks) and _BLOCK.fullmatch(name, len(self.blocks)) is not None

    def owns(self, name: str) -> bool:
        """Return whether a name belongs to the layout above; other names are foreign."""
        return name in (self.namespace, self.epoch, self.sweep) or self.is_block(name)
