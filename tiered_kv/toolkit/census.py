"""Counts the entries of a storage by namespace, with their ages, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tiered_kv.toolkit.administration import (
    FOREIGN_NAMED_MAX,
    NAMESPACES_MAX,
    Ages,
    StoredNamespace,
    Survey,
    SurveyedForeign,
    SurveyedSegments,
    matching_description,
)

_STEPS: Final = 50
"""Histogram steps for each factor of e between two ages."""


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
        """Count an entry with some blocks of a namespace. One unknown size makes the namespace's unknown."""
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

    def add_foreign(self, name: str, size_bytes: int) -> None:
        self._foreign_entries += 1
        self._foreign_bytes += size_bytes
        if len(self._foreign_names) < FOREIGN_NAMED_MAX:
            self._foreign_names.append(name[:256])

    def of(self, digest: str) -> tuple[int, int | None]:
        """Return the blocks and bytes of a namespace."""
        tally = self._tallies[digest]
        return tally.blocks, tally.size_bytes

    def left(self) -> list[str]:
        """Return lines about the foreign entries that a purge leaves."""
        left = [f"{name}, which is not this tier's" for name in self._foreign_names]
        if more := self._foreign_entries - len(left):
            left.append(f"{more} more such entries")
        return left

    def survey(self, describe: Callable[[str], object], segments: SurveyedSegments | None = None) -> Survey:
        """Return the result. `describe` returns the stored readable form of a namespace."""
        namespaces = tuple(
            StoredNamespace(
                digest,
                matching_description(describe(digest), digest),
                tally.blocks,
                tally.size_bytes,
                tally.written.ages(),
                tally.used.ages(),
            )
            for digest, tally in sorted(self._tallies.items())
        )
        foreign = SurveyedForeign(self._foreign_entries, self._foreign_bytes, tuple(self._foreign_names))
        return Survey(namespaces, segments, foreign)
