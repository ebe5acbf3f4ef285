"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv.toolkit import counters

_NAMES: Final = {
    "stored_batches": "batches written",
    "corrupt_blocks": "blocks whose bytes did not match their checksum, or were not there any more",
    "io_errors": "system calls that failed, those for want of space included",
    "no_space_errors": "times the file system had less space than the capacity allows",
    "room_timeouts": "stores that were given up because no room was made in time",
    "refused_stores": "stores that were failed at once: the disk is full, and there is no segment to reclaim",
    "reclaimed_segments": "segments used again, or deleted, to make room",
    "relocated_blocks": "blocks that moved on when their segment was reclaimed, because they had been used",
    "dropped_blocks": "blocks that went with their segment",
    "recovered_blocks": "blocks found when the directory was opened",
    "discarded_segments": "segments found and not kept, because they were damaged or over the capacity",
    "deleted_segments": "segments whose file was given back",
    "resets": "times that the cache was reset",
}
_FAMILIES: Final = {
    "refused_": "blocks whose bytes are right and that encryption refused, by reason",
}
"""What other names begin with; they come as they happen."""


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES, _FAMILIES)
