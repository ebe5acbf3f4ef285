"""Administration of a tier's storage without a stack: list the namespaces in it, and delete one for good.

    administration = tier_type.administration()(settings)
    with closing(administration):
        for stored in administration.namespaces(deadline):
            administration.purge(stored.digest, deadline)

A purge is not a reset of the cache: a reset makes blocks unreachable at once and leaves their bytes to be written
over. A purge deletes the bytes, may take long, and checks afterwards whether any are left.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config.namespace import NamespaceIdentity

DIGEST_HEX = re.compile(r"[0-9a-f]{32}")
"""The form of a namespace's digest in paths and names."""

DESCRIPTION_BYTES_MAX = 1 << 20
"""Limit of a readable form that is read from storage; a longer one is ignored."""


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace of which a tier's storage holds data.

    Args:
        digest: Its digest, 32 hexadecimal digits.
        described: Its readable form; empty if there is none that matches the digest.
        blocks: How many blocks; None if counting them is as much work as deleting them.
        size_bytes: Their size; None likewise.
    """

    digest: str
    described: Mapping[str, object] = field(default_factory=dict)
    blocks: int | None = None
    size_bytes: int | None = None

    @property
    def tenant(self) -> str | None:
        """Whose it is, None if that cannot be told."""
        namespace = self.described.get("namespace")
        tenant = namespace.get("tenant") if isinstance(namespace, Mapping) else None
        return tenant if isinstance(tenant, str) else None


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge of one namespace.

    Args:
        blocks: How many blocks were deleted. A tier that does not read its segments or versions of objects counts
            those. None if it is unknown.
        size_bytes: Bytes that were deleted.
        left: Data that should have been deleted and is left, and why; empty if none is.
        notes: Hints for the user.
    """

    blocks: int | None
    size_bytes: int
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TierAdministration(ABC):
    """One tier's storage, without a stack. A subclass is constructed with the tier's settings; one thread uses it.

    Every method raises `TierError` if the storage cannot be reached, another process owns it, or it belongs to no such
    tier. All of them end by their deadlines, in seconds of `time.monotonic()`. A digest has 32 hexadecimal digits.
    """

    @abstractmethod
    def __init__(self, settings: Any) -> None:  # Any: each tier's own model
        raise NotImplementedError

    @abstractmethod
    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        """Return the namespaces of which the storage holds data; with `only`, just the one with that digest."""

    @abstractmethod
    def purge(self, digest: str, deadline: float) -> Purged:
        """Delete all stored data of the namespace with this digest, and check that none is left.

        Blocks that other processes store meanwhile may be left. The processes continue; their lookups are misses.
        """

    def close(self) -> None:
        """Give up what was opened; by default nothing is kept open."""
        return


def believed(described: object, digest: str) -> Mapping[str, object]:
    """Return a readable form that was found beside the blocks of `digest`; an empty one if its digest is another.

    An attacker who can write there could put another tenant's name into it. The digest over the form shows that.
    """
    if not isinstance(described, Mapping):
        return {}
    try:
        is_sound = NamespaceIdentity(described).digest.hex() == digest
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError, of half a surrogate pair, is a ValueError
        return {}
    return described if is_sound else {}
