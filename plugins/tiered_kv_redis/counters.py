"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv.toolkit import counters

_NAMES: Final = {
    "stored_blocks": "blocks stored, those included that were there already",
    "present_blocks": "blocks that were to be stored and were there already",
    "loaded_blocks": "blocks loaded and verified",
    "corrupt_blocks": "blocks whose value nobody can read; it was deleted",
    "unanswered_lookups": "keys that became a miss because no server of the tier answered",
}
_FAMILIES: Final = {
    "failed_stores_": "blocks that were not stored, by reason",
    "failed_loads_": "blocks that were not loaded, by reason",
    "failed_lookups_": "keys without an answer, by reason",
}


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES, _FAMILIES)
