"""Counts of the events since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv import counters

_NAMES: Final = {
    "present_blocks_total": "blocks that were to be stored and were there already",
    "evicted_blocks_total": "blocks removed to make room, whoever stored them",
    "surveys_total": "times that this process counted the directory",
}
_LABELLED: Final = {
    "corrupt_blocks_total": "blocks that nobody can read, which were deleted, by reason",
    "unreadable_blocks_total": "blocks that need a codec or a key that is not here, by reason",
    "failed_calls_total": "calls that failed, by reason",
}


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES, _LABELLED)
