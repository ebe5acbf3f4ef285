"""What the administrations of tiers share to survey their storage, and to verify block records in it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.tiering.administration import (
    Ages,
    StoredNamespace,
    Survey,
    SurveyedForeign,
    SurveyedSegments,
)
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.record import record_bytes_max, verify_record
from tiered_kv.toolkit.status import RecordStatus

NAMESPACES_MAX: Final = 1024
"""Namespaces that one survey tells apart; it counts blocks of further ones as foreign."""
FOREIGN_NAMED_MAX: Final = 8
AGAIN_S: Final = 10.0
"""How long after its writing the use of a block is another use: writing takes time, and clocks are coarse."""
_STEPS: Final = 50
"""Into how many steps ages are divided from each to 2.7 times it."""
_UNKNOWN_BLOCK_BYTES_MAX: Final = 256 << 20
"""The longest block that is read where no readable form says how long blocks are."""


class AgeCounts:
    """Oldest, newest, and median of many ages. The median is an estimate, to about 2 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # by the logarithm of the age
        self._oldest_s, self._newest_s = 0.0, math.inf

    def add(self, age_s: float, blocks: int = 1) -> None:
        """Add the age of some blocks; a clock that is ahead makes it 0."""
        age_s = max(0.0, age_s)
        self._oldest_s = max(self._oldest_s, age_s)
        self._newest_s = min(self._newest_s, age_s)
        self._counts[round(_STEPS * math.log1p(age_s))] += blocks

    def ages(self) -> Ages | None:
        """Return what was added; None if nothing was."""
        left = self._counts.total() // 2
        for step, blocks in sorted(self._counts.items()):
            left -= blocks
            if left < 0:
                median_s = math.expm1(step / _STEPS)
                return Ages(self._oldest_s, min(max(median_s, self._newest_s), self._oldest_s), self._newest_s)
        return None


@dataclass(eq=False, slots=True)
class _Tally:
    """What was found of one namespace."""

    blocks: int = 0
    size_bytes: int | None = 0
    written: AgeCounts = field(default_factory=AgeCounts)
    used: AgeCounts = field(default_factory=AgeCounts)
    judged: int = 0  # blocks of which both ages are known
    used_again: int = 0


class Census:
    """Counts entries of a storage, in memory that does not grow with their number."""

    def __init__(self) -> None:
        self._tallies: defaultdict[str, _Tally] = defaultdict(_Tally)
        self._foreign_entries = self._foreign_bytes = 0
        self._foreign_names: list[str] = []

    def add(
        self,
        digest: str,
        size_bytes: int | None,
        blocks: int = 1,
        *,
        written_s: float | None = None,
        used_s: float | None = None,
    ) -> None:
        """Count an entry of a namespace.

        Args:
            digest: The namespace.
            size_bytes: The entry's size; None if it is unknown, and so is the namespace's then.
            blocks: How many blocks it is; 0 for marks, readable forms, files that are being written.
            written_s: How long ago they were written; None if that is unknown.
            used_s: How long ago they were used last; likewise.
        """
        if digest not in self._tallies and len(self._tallies) >= NAMESPACES_MAX:
            self.add_foreign(digest, size_bytes or 0)
            return
        tally = self._tallies[digest]
        tally.blocks += blocks
        tally.size_bytes = None if tally.size_bytes is None or size_bytes is None else tally.size_bytes + size_bytes
        if blocks and written_s is not None:
            tally.written.add(written_s, blocks)
        if blocks and used_s is not None:
            tally.used.add(used_s, blocks)
        if blocks and written_s is not None and used_s is not None:
            tally.judged += blocks
            tally.used_again += blocks * (written_s - used_s > AGAIN_S)

    def add_foreign(self, name: str, size_bytes: int) -> None:
        """Count an entry that is not the tier's."""
        self._foreign_entries += 1
        self._foreign_bytes += size_bytes
        if len(self._foreign_names) < FOREIGN_NAMED_MAX:
            self._foreign_names.append(name[:256])

    def survey(
        self,
        describe: Callable[[str], Mapping[str, object]],
        untold: str,
        segments: SurveyedSegments | None = None,
    ) -> Survey:
        """Return the result.

        Args:
            describe: Returns a namespace's readable form, empty if there is none.
            untold: Why this storage may not know which blocks were used again: a note if that is so.
            segments: The large files, if it has such.
        """
        namespaces = tuple(
            StoredNamespace(
                digest,
                describe(digest),
                tally.blocks,
                tally.size_bytes,
                tally.written.ages(),
                tally.used.ages(),
                tally.used_again / tally.judged if tally.judged else None,
            )
            for digest, tally in sorted(self._tallies.items())
        )
        foreign = SurveyedForeign(self._foreign_entries, self._foreign_bytes, tuple(self._foreign_names))
        is_untold = any(each.blocks and each.used_again is None for each in namespaces)
        return Survey(namespaces, segments, foreign, (untold,) if is_untold else ())


class RecordCheck:
    """Checks block records of one namespace. Any thread may call, each with one record at a time.

    Args:
        namespace_digest: The namespace, 16 bytes.
        codecs: The codecs and keys that are here.
        block_bytes: Size of its blocks; None if it is unknown.
    """

    def __init__(self, namespace_digest: bytes, codecs: CodecSet, block_bytes: int | None) -> None:
        self._digest = namespace_digest
        self._codecs = codecs
        self._block_bytes = block_bytes
        self._records, self._blocks = ThreadBuffer(), ThreadBuffer()
        self.too_long: RecordStatus | str = "too_long" if block_bytes is None else RecordStatus.BAD_LENGTH
        """What a record is for which there is no room."""

    def room(self, size_bytes: int) -> memoryview | None:
        """Return memory for a record of as many bytes; None if no record of this namespace is that long."""
        limit = record_bytes_max(_UNKNOWN_BLOCK_BYTES_MAX if self._block_bytes is None else self._block_bytes)
        return self._records.take(size_bytes) if size_bytes <= limit else None

    def check(self, record: memoryview, key_digest: bytes | None = None) -> RecordStatus:
        """Return what is wrong with a whole record, or OK; see `record.verify_record`."""
        block = None if self._block_bytes is None else self._blocks.take(self._block_bytes)
        return verify_record(record, self._digest, block, self._codecs, key_digest)


def block_bytes_in(described: Mapping[str, object]) -> int | None:
    """Return the size of blocks that a readable form says; None if it says no possible one."""
    block = described.get("block")
    size = block.get("bytes") if isinstance(block, Mapping) else None
    is_possible = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= _UNKNOWN_BLOCK_BYTES_MAX
    return size if is_possible and isinstance(size, int) else None
