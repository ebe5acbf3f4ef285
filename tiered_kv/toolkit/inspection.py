"""Helpers for a `TierAdministration`: a census of stored entries, and checks of block records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.administration import (
    Ages,
    StoredNamespace,
    Survey,
    SurveyedForeign,
    SurveyedSegments,
)
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.record import record_bytes_max, verify_record

NAMESPACES_MAX: Final = 1024
"""Namespaces in one survey; blocks of further namespaces count as foreign."""
FOREIGN_NAMED_MAX: Final = 8
REUSE_AFTER_S: Final = 10.0
"""A use within this time after the write does not count: writing takes time, and clocks are coarse."""
_STEPS: Final = 50
"""Histogram steps for each factor of e between two ages."""
_UNKNOWN_BLOCK_BYTES_MAX: Final = 256 << 20
"""The longest block that is read if the readable form does not say how long blocks are."""


class _AgeHistogram:
    """Oldest, newest and median of many ages. The median is an estimate, to about 2 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # by the logarithm of the age
        self._oldest_s, self._newest_s = 0.0, math.inf

    def add(self, age_s: float, blocks: int = 1) -> None:
        age_s = max(0.0, age_s)  # the writer's clock may be ahead
        self._oldest_s = max(self._oldest_s, age_s)
        self._newest_s = min(self._newest_s, age_s)
        self._counts[round(_STEPS * math.log1p(age_s))] += blocks

    def ages(self) -> Ages | None:
        left = self._counts.total() // 2
        for step, blocks in sorted(self._counts.items()):
            left -= blocks
            if left < 0:
                median_s = math.expm1(step / _STEPS)
                return Ages(self._oldest_s, min(max(median_s, self._newest_s), self._oldest_s), self._newest_s)
        return None


@dataclass(eq=False, slots=True)
class _Tally:
    blocks: int = 0
    size_bytes: int | None = 0
    written: _AgeHistogram = field(default_factory=_AgeHistogram)
    used: _AgeHistogram = field(default_factory=_AgeHistogram)
    dated: int = 0  # blocks of which both ages are known
    used_again: int = 0


class Census:
    """Counts the entries of a storage, in bounded memory."""

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
            size_bytes: None if it is unknown; then the size of the namespace is unknown too.
            blocks: Blocks in the entry; 0 for marks, readable forms and files that are being written.
            written_s, used_s: How long ago the blocks were written, and used last; None if unknown.
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
            tally.dated += blocks
            tally.used_again += blocks * (written_s - used_s > REUSE_AFTER_S)

    def add_foreign(self, name: str, size_bytes: int) -> None:
        self._foreign_entries += 1
        self._foreign_bytes += size_bytes
        if len(self._foreign_names) < FOREIGN_NAMED_MAX:
            self._foreign_names.append(name[:256])

    def survey(
        self,
        describe: Callable[[str], Mapping[str, object]],
        no_reuse_note: str,
        segments: SurveyedSegments | None = None,
    ) -> Survey:
        """Return the result.

        Args:
            describe: Returns the readable form of a namespace, empty if there is none.
            no_reuse_note: Why the storage does not know which blocks were used again; reported if that is so.
            segments: The large files of a storage that has them.
        """
        namespaces = tuple(
            StoredNamespace(
                digest,
                describe(digest),
                tally.blocks,
                tally.size_bytes,
                tally.written.ages(),
                tally.used.ages(),
                tally.used_again / tally.dated if tally.dated else None,
            )
            for digest, tally in sorted(self._tallies.items())
        )
        foreign = SurveyedForeign(self._foreign_entries, self._foreign_bytes, tuple(self._foreign_names))
        lacks_reuse = any(each.blocks and each.used_again is None for each in namespaces)
        return Survey(namespaces, segments, foreign, (no_reuse_note,) if lacks_reuse else ())


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
