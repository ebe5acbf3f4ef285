"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv import counters

_NAMES: Final = {
    "present_blocks_total": "blocks that were to be stored and were there already",
    "unanswered_lookups_total": "keys that became a miss because no server of the tier answered",
}
_LABELLED: Final = {
    "corrupt_blocks_total": "blocks whose value nobody can read, which was deleted, by reason",
    "failed_blocks_total": "blocks that were not stored or loaded, by direction and reason",
    "failed_lookups_total": "keys without an answer, by reason",
}


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES, _LABELLED)
