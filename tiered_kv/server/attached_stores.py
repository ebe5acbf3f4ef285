"""The blocks that an attached engine's workers write: into rows that the server has granted.

`AttachedManager` owns it, on the scheduler's thread. What must stay true: a row is either free (`HostLink.free`), or
one block here is written to it. It leaves with the end of the copy: to the server, with its key, or back to the free
rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiered_kv.base import OffloadKey
from tiered_kv.server.attach import HostLink
from tiered_kv.server.attached_request import AttachedRequest
from tiered_kv.server.protocol import MISSING, ROW_MAX


class AttachedStores:
    """Rows that are being written, by the keys of their blocks."""

    def __init__(self) -> None:
        self._writing: dict[OffloadKey, int] = {}
        self._short: dict[OffloadKey, None] = {}
        """Blocks of stores that found too few rows since the last `take_short`. An engine tries them all again."""

    @property
    def are_short(self) -> bool:
        """Whether a store has found too few rows since the last `take_short`."""
        return bool(self._short)

    def take_short(self) -> int:
        """Return how many rows stores have lacked since the last call."""
        count = len(self._short)
        self._short.clear()
        return count

    def begin(
        self, keys: Collection[OffloadKey], request: AttachedRequest, link: HostLink
    ) -> tuple[list[OffloadKey], list[int]] | None:
        """Return the keys of blocks that the server lacks, as far as is known, and a row for each.

        Returns None if too few rows are free.
        """
        held, writing, is_known = request.rows, self._writing, link.is_known
        new = [
            key
            for key in dict.fromkeys(keys)
            if key not in writing and held.get(key, MISSING) > ROW_MAX and not is_known(key)
        ][: link.welcome.grant_max]
        if len(new) > len(link.free):
            self._short.update(dict.fromkeys(new))
            return None
        rows = [link.free.pop() for _ in new]
        writing.update(zip(new, rows, strict=True))
        return new, rows

    def end(self, keys: Iterable[OffloadKey]) -> tuple[list[OffloadKey], list[int]]:
        """Return those of `keys` that were being written, and their rows."""
        rows = {key: row for key in keys if (row := self._writing.pop(key, -1)) >= 0}
        return [*rows], [*rows.values()]
