"""Administration of a tier's storage without a stack: look at its namespaces and blocks, and delete for good.

    administration = tier_type.administration()(settings)
    with closing(administration):
        for stored in administration.survey(deadline).namespaces:
            administration.purge(stored.digest, deadline)

A purge is not a reset of the cache: a reset makes blocks unreachable at once and leaves their bytes to be written
over. A purge deletes the bytes, may take long, and checks afterwards whether any are left.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.config.namespace import NamespaceIdentity
from tiered_kv.toolkit.status import UNREADABLE, RecordStatus

DIGEST_HEX = re.compile(r"[0-9a-f]{32}")
"""The form of a namespace's digest in paths and names."""

DESCRIPTION_BYTES_MAX = 1 << 20
"""Limit of a readable form that is read from storage; a longer one is ignored."""


@dataclass(frozen=True, slots=True)
class Ages:
    """How long ago something happened to each of many blocks, in seconds. The median is an estimate."""

    oldest_s: float
    median_s: float
    newest_s: float


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace of which a tier's storage holds data; None is what the storage does not know.

    Args:
        digest: Its digest, 32 hexadecimal digits.
        described: Its readable form; empty if there is none that matches the digest.
        blocks: How many blocks.
        size_bytes: What they occupy, with marks and readable forms.
        written: How long ago its blocks were written.
        used: How long ago they were last used, or written.
        used_again: The share of its blocks, 0 to 1, that were used again after they were written.
    """

    digest: str
    described: Mapping[str, object] = field(default_factory=dict)
    blocks: int | None = None
    size_bytes: int | None = None
    written: Ages | None = None
    used: Ages | None = None
    used_again: float | None = None

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


@dataclass(frozen=True, slots=True)
class SurveyedSegments:
    """The large files that blocks lie in.

    Args:
        files: How many there are.
        free: How many of them hold no block.
        unusable: How many have no sound header; the tier deletes these when it opens.
        size_bytes: Their size.
        filled_bytes: How much of that has been written.
    """

    files: int
    free: int
    unusable: int
    size_bytes: int
    filled_bytes: int


@dataclass(frozen=True, slots=True)
class SurveyedForeign:
    """What lies in the storage and is not this tier's: entries, their bytes, and the names of a few."""

    entries: int
    size_bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """What a tier's storage holds; None is what the storage does not know, or has none of.

    Args:
        namespaces: Every namespace with data, by digest.
        segments: The large files that blocks lie in.
        foreign: What is not this tier's.
        notes: Hints for the user.
    """

    namespaces: tuple[StoredNamespace, ...] = ()
    segments: SurveyedSegments | None = None
    foreign: SurveyedForeign | None = None
    notes: tuple[str, ...] = ()


@dataclass(eq=False)
class Verification:
    """The check of one namespace's blocks: what is wanted, and what was found so far, also if it is interrupted.

    Args:
        block_bytes: Size of the namespace's blocks; None if it is unknown.
        repairs: Whether damaged blocks are deleted.
        on_block: Called after each block with its bytes. It may sleep, to bound the rate, or raise, to end the check.

    Attributes:
        blocks: Blocks that were read, whatever was found.
        size_bytes: Their bytes.
        damaged: Blocks that no process can load, by reason.
        unreadable: Blocks that cannot be judged here, by reason; they may be sound, and are never deleted.
        repaired: Damaged blocks that were deleted.
        checks_tags: Whether the tags of encrypted blocks are verified, and not their checksums alone.
        notes: Hints for the user.
        error: Why the check was not finished; empty if it was. The caller sets it.
    """

    block_bytes: int | None
    repairs: bool = False
    on_block: Callable[[int], None] = lambda size_bytes: None
    blocks: int = 0
    size_bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    checks_tags: bool = False
    notes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check was finished and no damage is left."""
        return not self.error and self.damaged.total() == self.repaired

    def note(self, found: RecordStatus | str, size_bytes: int) -> bool:
        """Count a block, and return whether to delete it; then count it in `repaired`.

        Args:
            found: The result of reading it, or a word for why it could not be read.
            size_bytes: How many bytes were read.
        """
        self.blocks += 1
        self.size_bytes += size_bytes
        is_damaged = isinstance(found, RecordStatus) and found is not RecordStatus.OK and found not in _SOUND
        if is_damaged or found is not RecordStatus.OK:
            reasons = self.damaged if is_damaged else self.unreadable
            reasons[found.value if isinstance(found, RecordStatus) else found] += 1
        self.on_block(size_bytes)
        return is_damaged and self.repairs


_SOUND = UNREADABLE | {RecordStatus.UNENCRYPTED}
"""Sound records that are not loaded here. Other processes may load them."""


class TierAdministration(ABC):
    """One tier's storage, without a stack. A subclass is constructed with the tier's settings; one thread uses it.

    Every method raises `TierError` if the storage cannot be reached, another process owns it, or it belongs to no such
    tier. All of them end by their deadlines, in seconds of `time.monotonic()`. A digest has 32 hexadecimal digits.
    """

    @abstractmethod
    def __init__(self, settings: Any) -> None:  # Any: each tier's own model
        raise NotImplementedError

    @abstractmethod
    def purge(self, digest: str, deadline: float) -> Purged:
        """Delete all stored data of the namespace with this digest, and check that none is left.

        Blocks that other processes store meanwhile may be left. The processes continue; their lookups are misses.
        """

    @abstractmethod
    def survey(self, deadline: float, only: str | None = None) -> Survey:
        """Count what the storage holds, and change nothing, also while processes use it.

        With `only`, a digest, no other namespace is counted.
        """

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        """Read all blocks of one namespace, and `note` each; delete the damaged ones if that says so. Optional.

        Memory is bounded by a few blocks, whatever the storage says of their sizes. The result is in `verification`,
        also if this raises.

        Raises:
            NotImplementedError: Tiers of this type cannot be verified.
        """
        raise NotImplementedError

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
