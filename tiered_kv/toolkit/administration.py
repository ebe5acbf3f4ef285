"""Administration of a tier's storage without a stack: survey, verify, purge and copy its namespaces.

    administration = tier_type.administration()(settings)
    with closing(administration):
        for stored in administration.survey(deadline).namespaces:
            administration.purge(stored.digest, deadline)

The commands of `tiered_kv.cli` that look into a storage call it, each on one thread, while other processes may use the
storage. A reset of the cache only makes blocks unreachable. A purge deletes their bytes, and checks whether any are
left. Every call ends by its deadline. `tiered_kv.toolkit.listing_administration` has the loops of survey, check and
purge for a storage that can list and delete its entries.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.config.namespace import NamespaceIdentity
from tiered_kv.errors import TierUnavailableError
from tiered_kv.reasons import UNREADABLE, RecordStatus
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.record import record_bytes_max, verify_record

DIGEST_HEX = re.compile(r"[0-9a-f]{32}")  # the form of a namespace's digest in paths and names

DESCRIPTION_BYTES_MAX = 1 << 20  # longer readable forms in storage are ignored
NAMESPACES_MAX: Final = 1024  # namespaces in one survey; blocks of further namespaces count as foreign
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
    """A namespace with data in a tier's storage; None means unknown."""

    digest: str  # 32 hexadecimal digits
    described: Mapping[str, object] = field(default_factory=dict)
    """The readable form of the namespace; empty if no readable form matches the digest."""
    blocks: int | None = None
    size_bytes: int | None = None
    """Bytes in the storage, including marks and readable forms."""
    written: Ages | None = None
    """Ages since the blocks were written."""
    used: Ages | None = None
    """Ages since the blocks were last used or written."""

    @property
    def tenant(self) -> str | None:
        """The tenant of the readable form; None if unknown."""
        namespace = self.described.get("namespace")
        tenant = namespace.get("tenant") if isinstance(namespace, Mapping) else None
        return tenant if isinstance(tenant, str) else None


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge of one namespace; None means unknown."""

    blocks: int | None
    size_bytes: int | None
    left: tuple[str, ...] = ()  # data that could not be deleted, and why
    notes: tuple[str, ...] = ()  # hints for the user


@dataclass(frozen=True, slots=True)
class SurveyedSegments:
    """The large files that contain blocks."""

    files: int
    free: int  # files without a block
    unusable: int  # files without a valid header; the tier deletes them when it opens
    size_bytes: int  # the sum over all files
    filled_bytes: int  # the part of it that has been written
    left_out: int = 0  # files that are filled no further, since the disk refuses writes to a place in them


@dataclass(frozen=True, slots=True)
class SurveyedForeign:
    """Entries of the storage that are not this tier's, and the names of a few."""

    entries: int
    size_bytes: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """The contents of a tier's storage, with every namespace that has data."""

    namespaces: tuple[StoredNamespace, ...] = ()
    segments: SurveyedSegments | None = None  # None for a tier without segment files
    foreign: SurveyedForeign | None = None  # None if the tier does not look for foreign entries
    notes: tuple[str, ...] = ()  # hints for the user


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block that no process can load: its file or name in the storage, and its key, in hexadecimal, if known."""

    name: str
    key: str
    reason: str


@dataclass(eq=False)
class Verification:
    """The options of a check of one namespace's blocks, and its results so far."""

    block_bytes: int | None  # None if unknown
    repairs: bool = False  # whether damaged blocks are deleted
    on_block: Callable[[int], None] = lambda size_bytes: None
    """Called with the bytes of each block. It may sleep, to limit the rate, or raise, to end the check."""
    blocks: int = 0  # number of blocks that were read
    size_bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)  # blocks that no process can load, by reason
    unreadable: Counter[str] = field(default_factory=Counter)
    """Blocks that cannot be checked here, by reason; they may be intact, and are never deleted."""
    named: list[DamagedBlock] = field(default_factory=list)  # the first damaged ones
    repaired: int = 0  # damaged blocks that were deleted
    checks_tags: bool = False  # whether the tags of encrypted blocks are verified, and not only their checksums
    notes: list[str] = field(default_factory=list)  # hints for the user
    error: str = ""  # why the check was not finished; the caller sets it

    @property
    def ok(self) -> bool:
        """Whether the check was finished and no damage is left."""
        return not self.error and self.damaged.total() == self.repaired

    def note(self, found: RecordStatus | str, size_bytes: int, name: str = "", key: bytes = b"") -> bool:
        """Count a block of which `size_bytes` were read; return whether the caller has to delete it.

        The caller then counts the deleted block in `repaired`. `found` is the status of the record, or one word for the
        reason why the block could not be read. `name` is its file or its name in the storage.
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


_SOUND = UNREADABLE | {RecordStatus.UNENCRYPTED}  # intact records that this process cannot load. Others may load them.


class StoredBlock(NamedTuple):
    """A block of a storage, for a copy."""

    key: OffloadKey
    size_bytes: int | None = None  # of its record, at least about; None if unknown
    used_s: float | None = None  # when it was last used or written, in seconds of Unix time; None if unknown
    where: Any = None
    """A value that the storage needs beside the key, to read the block. (Any: each storage has its own.)"""


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
        """Count the contents of the storage, or of one digest only, without changes. Processes may use it."""

    def namespaces(self, deadline: float) -> Sequence[StoredNamespace]:
        """Return the namespaces of the storage, with their readable forms; by default the ones of a survey.

        A subclass that can list them without counting blocks leaves the counts unknown.
        """
        return self.survey(deadline).namespaces

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        """Read all blocks of one namespace, and `note` each; delete a block if `note` returns True. Optional.

        It uses memory for a few blocks at most, even if the storage claims wrong sizes. `verification` has the results,
        also after an exception. Raises `NotImplementedError`: tiers of this type cannot be verified.
        """
        raise NotImplementedError

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        """Yield in batches the blocks of one namespace that can be loaded, or those of `keys` only. Optional.

        A storage that knows when its blocks were used yields the last used ones first, as far as that is cheap. A block
        that is stored or deleted meanwhile may be left out; one of `keys` may be yielded though the storage lacks it.

        Raises:
            NotImplementedError: Blocks of this type of tier cannot be copied; or, without `keys`, the storage keeps no
                keys, and `needs_keys` is True.
        """
        raise NotImplementedError

    needs_keys: ClassVar[bool] = False
    """Whether `blocks` needs `keys`, since the storage keeps no keys of its blocks."""

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        """Read the record of each block into its row, as it is stored, and check it with `check_record`. Optional.

        A row is writable, and has `record_bytes_max` bytes. Other processes go on meanwhile. The answer has for each
        block its status: OK, the fault of a damaged record, or one word for the reason why the block cannot be read
        now. That is `Reason.ABSENT` if it is gone, and `Reason.RESET` if the cache was reset since `blocks`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close open files and connections; by default there are none."""
        return

    def check_time(self, deadline: float, operation: str) -> None:
        """Raise `TierUnavailableError` after the deadline."""
        if time.monotonic() >= deadline:
            raise TierUnavailableError("the time was over", tier=self._settings.name, operation=operation)


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
