"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv.toolkit import counters

_NAMES: Final = {
    "stored_files": "blocks that were written",
    "present_blocks": "blocks that were to be stored and were there already",
    "loaded_files": "blocks that were read and verified",
    "missing_blocks": "blocks that were to be loaded and were not there",
    "corrupt_blocks": "blocks that did not match their checksum, were cut off or too long; also as corrupt_<why>",
    "removed_files": "damaged files that were removed",
    "evicted_files": "files removed to make room",
    "removed_temporaries": "what writers that ended amid a block had left",
    "sweeps": "times that the directory was counted",
    "room_timeouts": "stores given up because no room was made in time",
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
