"""Administration of a tier's storage without a stack: survey, verify and purge its namespaces.

    administration = tier_type.administration()(settings)
    with closing(administration):
        for stored in administration.survey(deadline).namespaces:
            administration.purge(stored.digest, deadline)

A reset of the cache makes blocks unreachable at once, and leaves their bytes to be overwritten. A purge deletes the
bytes, may take long, and checks afterwards whether any are left.

`tiered_kv.toolkit.listed` does all three for a storage whose entries can be listed and deleted.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tiered_kv.config.namespace import NamespaceIdentity
from tiered_kv.errors import TierUnavailableError
from tiered_kv.reasons import UNREADABLE, RecordStatus
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.record import record_bytes_max, verify_record

DIGEST_HEX = re.compile(r"[0-9a-f]{32}")
"""The form of a namespace's digest in paths and names."""

DESCRIPTION_BYTES_MAX = 1 << 20
"""Longer readable forms in storage are ignored."""
NAMESPACES_MAX: Final = 1024
"""Namespaces in one survey; blocks of further namespaces count as foreign."""
FOREIGN_NAMED_MAX: Final = 8
DAMAGED_NAMED_MAX: Final = 32
_NAME_CHARACTERS_MAX: Final = 1024
_UNKNOWN_BLOCK_BYTES_MAX: Final = 256 << 20
"""The longest block that is read if the readable form does not say how long blocks are."""


@dataclass(frozen=True, slots=True)
class Ages:
    """The ages of many blocks: the extremes."""

    oldest_s: float
    newest_s: float


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace with data in a tier's storage; None means unknown.

    Args:
        digest: 32 hexadecimal digits.
        described: Its readable form; empty if the storage has none that matches the digest.
        blocks: Number of blocks.
        size_bytes: Their size in the storage, including marks and readable forms.
        written: Ages since the blocks were written.
        used: Ages since the blocks were last used or written.
    """

    digest: str
    described: Mapping[str, object] = field(default_factory=dict)
    blocks: int | None = None
    size_bytes: int | None = None
    written: Ages | None = None
    used: Ages | None = None

    @property
    def tenant(self) -> str | None:
        """The tenant of the readable form; None if unknown."""
        namespace = self.described.get("namespace")
        tenant = namespace.get("tenant") if isinstance(namespace, Mapping) else None
        return tenant if isinstance(tenant, str) else None


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge of one namespace.

    Args:
        blocks: Blocks that were deleted; None if unknown.
        size_bytes: Bytes that were deleted; None if unknown.
        left: Data that could not be deleted, and why.
        notes: Hints for the user.
    """

    blocks: int | None
    size_bytes: int | None
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SurveyedSegments:
    """The large files that contain blocks.

    Args:
        files: Number of files.
        free: Files without a block.
        unusable: Files without a valid header; the tier deletes them when it opens.
        size_bytes: Size of all files.
        filled_bytes: The part of it that has been written.
    """

    files: int
    free: int
    unusable: int
    size_bytes: int
    filled_bytes: int


@dataclass(frozen=True, slots=True)
class SurveyedForeign:
    """Entries of the storage that are not this tier's, and the names of a few."""

    entries: int
    size_bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """The contents of a tier's storage, with every namespace that has data; None means unknown, or none."""

    namespaces: tuple[StoredNamespace, ...] = ()
    segments: SurveyedSegments | None = None
    foreign: SurveyedForeign | None = None
    notes: tuple[str, ...] = ()  # hints for the user


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block that no process can load: its file or name in the storage, and its key, in hexadecimal, if known."""

    name: str
    key: str
    reason: str


@dataclass(eq=False)
class Verification:
    """The options of a check of one namespace's blocks, and its results so far.

    Args:
        block_bytes: Size of the namespace's blocks; None if unknown.
        repairs: Whether damaged blocks are deleted.
        on_block: Called with the bytes of each block. It may sleep, to limit the rate, or raise, to end the check.

    Attributes:
        blocks: Blocks that were read.
        size_bytes: Their bytes.
        damaged: Blocks that no process can load, by reason.
        named: The first of these.
        unreadable: Blocks that cannot be checked here, by reason; they may be intact, and are never deleted.
        repaired: Damaged blocks that were deleted.
        checks_tags: Whether the tags of encrypted blocks are verified, and not only their checksums.
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
    named: list[DamagedBlock] = field(default_factory=list)
    repaired: int = 0
    checks_tags: bool = False
    notes: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check was finished and no damage is left."""
        return not self.error and self.damaged.total() == self.repaired

    def note(self, found: RecordStatus | str, size_bytes: int, name: str = "", key: bytes = b"") -> bool:
        """Count a block, and return whether to delete it. The caller then counts it in `repaired`.

        Args:
            found: The result of reading the block, or one word for why it could not be read.
            size_bytes: Bytes that were read.
            name: Its file, or its name in the storage, for people.
            key: Its key, if the storage has it.
        """
        self.blocks += 1
        self.size_bytes += size_bytes
        is_damaged = isinstance(found, RecordStatus) and found is not RecordStatus.OK and found not in _SOUND
        if is_damaged or found is not RecordStatus.OK:
            reasons = self.damaged if is_damaged else self.unreadable
            reason = found.value if isinstance(found, RecordStatus) else found
            reasons[reason] += 1
            if is_damaged and name and len(self.named) < DAMAGED_NAMED_MAX:
                self.named.append(DamagedBlock(name[:_NAME_CHARACTERS_MAX], key.hex(), reason))
        self.on_block(size_bytes)
        return is_damaged and self.repairs


_SOUND = UNREADABLE | {RecordStatus.UNENCRYPTED}
"""Intact records that this process cannot load. Others may load them."""


class TierAdministration(ABC):
    """Administers one tier's storage. A subclass is constructed with the tier's settings. Used by one thread.

    Methods raise `TierError` if the storage cannot be reached, another process owns it, or another kind of tier wrote
    it. They end by their deadlines, in seconds of `time.monotonic()`. A digest has 32 hexadecimal digits.
    """

    def __init__(self, settings: Any) -> None:  # Any: each tier's own model
        self._settings = settings

    @property
    def where(self) -> str:
        """The path or address of the storage, for people; it has no secret. Empty if the subclass does not say."""
        return ""

    @abstractmethod
    def purge(self, digest: str, deadline: float) -> Purged:
        """Delete all data of a namespace, and check that none is left.

        Other processes may go on: their lookups are misses, and blocks that they store meanwhile may be left.
        """

    @abstractmethod
    def survey(self, deadline: float, only: str | None = None) -> Survey:
        """Count the contents of the storage without changes, also while processes use it.

        With `only`, a digest, no other namespace is counted.
        """

    def namespaces(self, deadline: float) -> Sequence[StoredNamespace]:
        """Return the namespaces of the storage, with their readable forms; by default those of a survey.

        A subclass that can list them without counting blocks leaves the counts unknown.
        """
        return self.survey(deadline).namespaces

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        """Read all blocks of one namespace, and `note` each; delete a block if `note` returns True. Optional.

        Memory is bounded by a few blocks, whatever sizes the storage claims. `verification` has the results, also after
        an exception.

        Raises:
            NotImplementedError: Tiers of this type cannot be verified.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close what was opened; by default nothing."""
        return

    def check_time(self, deadline: float, operation: str) -> None:
        """Raise `TierUnavailableError` after the deadline."""
        if time.monotonic() >= deadline:
            raise TierUnavailableError("the time was over", tier=self._settings.name, operation=operation)


def stored_namespace(digest: str, described: object) -> StoredNamespace:
    """Return a namespace that was listed and not counted, with its readable form if that matches."""
    return StoredNamespace(digest, matching_description(described, digest))


def matching_description(described: object, digest: str) -> Mapping[str, object]:
    """Return the readable form of a namespace from storage; an empty one if its digest is not `digest`.

    An attacker with write access could put another tenant's name into it, but then its digest differs.
    """
    if not isinstance(described, Mapping):
        return {}
    try:
        is_sound = NamespaceIdentity(described).digest.hex() == digest
    except (TypeError, ValueError, RecursionError):  # UnicodeEncodeError, of half a surrogate pair, is a ValueError
        return {}
    return described if is_sound else {}


class RecordCheck:
    """Checks block records of one namespace, without their keys. Any thread may call, for one record at a time.

    `block_bytes` is None if the size of blocks is unknown.
    """

    def __init__(self, namespace_digest: bytes, codecs: CodecSet, block_bytes: int | None) -> None:
        self._digest = namespace_digest
        self._codecs = codecs
        self._block_bytes = block_bytes
        self._records, self._blocks = ThreadBuffer(), ThreadBuffer()
        self.too_long: RecordStatus | str = "too_long" if block_bytes is None else RecordStatus.BAD_LENGTH
        """The status of a record for which `room` returns None."""
        self.bytes_max = record_bytes_max(_UNKNOWN_BLOCK_BYTES_MAX if block_bytes is None else block_bytes)

    def room(self, size_bytes: int) -> memoryview | None:
        """Return this thread's memory for a record; None if no record of this namespace is that long."""
        return self._records.take(size_bytes) if size_bytes <= self.bytes_max else None

    def check(self, record: memoryview, key_digest: bytes | None = None) -> RecordStatus:
        """Return the status of a whole record; see `verify_record`."""
        block = None if self._block_bytes is None else self._blocks.take(self._block_bytes)
        return verify_record(record, self._digest, block, self._codecs, key_digest)


def block_bytes_in(described: Mapping[str, object]) -> int | None:
    """Return the size of blocks in a namespace's readable form; None if it is missing or impossible."""
    block = described.get("block")
    size = block.get("bytes") if isinstance(block, Mapping) else None
    if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _UNKNOWN_BLOCK_BYTES_MAX:
        return size
    return None
