"""A census: the counts of a storage's entries, by namespace, in bounded memory.

The survey and the purge of a tier's administration make it, on the thread that calls them. What must stay true: it
counts at most `NAMESPACES_MAX` namespaces, and names at most `FOREIGN_NAMED_MAX` foreign entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

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


def _with(ages: Ages | None, age_s: float | None) -> Ages | None:
    if age_s is None:
        return ages
    age_s = max(0.0, age_s)  # the writer's clock may be ahead
    if ages is None:
        return Ages(age_s, age_s)
    is_new = not ages.newest_s <= age_s <= ages.oldest_s
    return Ages(max(ages.oldest_s, age_s), min(ages.newest_s, age_s)) if is_new else ages


@dataclass(eq=False, slots=True)
class _Tally:
    """What one namespace has; None means unknown."""

    blocks: int = 0
    size_bytes: int | None = 0
    written: Ages | None = None
    used: Ages | None = None


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
        """Count an entry with some blocks of a namespace. One unknown size makes the namespace's size unknown."""
        if digest not in self._tallies and len(self._tallies) >= NAMESPACES_MAX:
            self.add_foreign(digest, size_bytes or 0)
            return
        tally = self._tallies[digest]
        tally.blocks += blocks
        tally.size_bytes = None if tally.size_bytes is None or size_bytes is None else tally.size_bytes + size_bytes
        if blocks:
            tally.written, tally.used = _with(tally.written, written_s), _with(tally.used, used_s)

    def add_foreign(self, name: str, size_bytes: int) -> None:
        self._foreign_entries += 1
        self._foreign_bytes += size_bytes
        if len(self._foreign_names) < FOREIGN_NAMED_MAX:
            self._foreign_names.append(name[:256])

    def of(self, digest: str) -> tuple[int, int | None]:
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
                each.blocks,
                each.size_bytes,
                each.written,
                each.used,
            )
            for digest, each in sorted(self._tallies.items())
        )
        foreign = SurveyedForeign(self._foreign_entries, self._foreign_bytes, tuple(self._foreign_names))
        return Survey(namespaces, segments, foreign)
