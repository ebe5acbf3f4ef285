"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv.toolkit import counters

_NAMES: Final = {
    "stored_blocks": "blocks that were written",
    "present_blocks": "blocks that were to be stored and were there already",
    "loaded_blocks": "blocks that were read and verified",
    "missing_blocks": "blocks that were to be loaded and were not there",
    "corrupt_blocks": "blocks that nobody can read, which were deleted; also as corrupt_<why>",
    "evicted_blocks": "blocks removed to make room, whoever stored them",
    "surveys": "times that this process counted the directory",
}
_FAMILIES: Final = {
    "corrupt_": "of `corrupt_blocks`, by what was wrong",
    "failed_": "calls that failed, by reason",
}
"""What other names begin with; they come as they happen."""


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES, _FAMILIES)
