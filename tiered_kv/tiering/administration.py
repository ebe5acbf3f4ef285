"""What can be done to a tier's storage from outside of a stack: see whose blocks it holds, and remove them for good.

    administration = tier_type.administration()(settings)
    with closing(administration):
        for stored in administration.namespaces(deadline):
            administration.purge(stored.digest, deadline)

A purge is not a reset of the cache: a reset makes blocks unreachable at once and leaves their bytes to be written
over. A purge removes the bytes, takes its time, and looks afterwards whether any are left.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config.namespace import NamespaceIdentity

DIGEST_HEX = re.compile(r"[0-9a-f]{32}")
"""A namespace's digest as paths and names have it."""

DESCRIPTION_BYTES_MAX = 1 << 20
"""Of a readable form that is read from storage; one that is longer is not believed."""


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that a tier's storage holds something of.

    Args:
        digest: Its digest, 32 hexadecimal digits.
        described: Its readable form; empty where there is none that the digest bears out.
        blocks: How many blocks; None where counting them is as much work as removing them.
        size_bytes: What they take; None likewise.
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
    """What became of a namespace.

    Args:
        blocks: How many blocks were removed, segments or versions of objects that held them counted where the tier
            does not look inside; None where it cannot be told.
        size_bytes: What was removed.
        left: What is left and should not be, and why, in words; empty if all is gone.
        notes: What somebody who purges should know.
    """

    blocks: int | None
    size_bytes: int
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TierAdministration(ABC):
    """One tier's storage, without a stack. A subclass is constructed with the tier's settings; one thread uses it.

    Every method raises `TierError` where the storage cannot be reached, is another process's alone, or is not the
    tier's at all. All of them end by their deadlines.

    Args:
        settings: The tier's YAML entry.
    """

    @abstractmethod
    def __init__(self, settings: Any) -> None:  # Any: each tier's own model
        raise NotImplementedError

    @abstractmethod
    def namespaces(self, deadline: float, only: str | None = None) -> list[StoredNamespace]:
        """Return the namespaces that the storage holds something of.

        Args:
            deadline: When to give up, in seconds of `time.monotonic()`.
            only: Look for the namespace with this digest alone.
        """

    @abstractmethod
    def purge(self, digest: str, deadline: float) -> Purged:
        """Remove all that is stored of a namespace, and look whether it is gone.

        What other processes store meanwhile may be left. They go on: what they ask for is a miss.

        Args:
            digest: The namespace's digest, 32 hexadecimal digits.
            deadline: When to give up, in seconds of `time.monotonic()`.
        """

    def close(self) -> None:
        """Give up what was opened; by default nothing is kept open."""
        return


def believed(described: object, digest: str) -> Mapping[str, object]:
    """Return a readable form that was found beside the blocks of `digest`, or an empty one if it is another's.

    Whoever can write there could put another tenant's name into it; but a digest is taken over the readable form.
    """
    if not isinstance(described, Mapping):
        return {}
    try:
        is_sound = NamespaceIdentity(described).digest.hex() == digest
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError, of half a surrogate pair, is a ValueError
        return {}
    return described if is_sound else {}
