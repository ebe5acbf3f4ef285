"""What happened since the tier was opened."""

from __future__ import annotations

from typing import Final

from tiered_kv.toolkit import counters

_NAMES: Final = {
    "get_requests": "requests to read a block, or the mark of the epoch",
    "put_requests": "requests to store one",
    "head_requests": "requests whether a block is there",
    "delete_requests": "requests to delete damaged blocks",
    "retries": "requests that were sent again",
    "slow_downs": "times the server asked for fewer requests",
    "connections_opened": "connections opened",
    "corrupt_blocks": "records damaged twice in a row, of another format version, or refused by encryption",
    "unreadable_blocks": "sound records that need a codec or a key that is not here; they are left to others",
    "oversized_blocks": "objects that were longer than a record can be; they are not read",
    "expired_blocks": "blocks found older than `ttl`",
    "deleted_blocks": "blocks deleted because of `ttl` or `capacity`",
    "unanswered_blocks": "blocks that the bucket did not answer for while it answered for others",
    "failed_lookups": "lookups answered with a miss because the bucket answered for no block",
    "renewed_blocks": "blocks used past half of `ttl`, and made young again",
    "failed_renewals": "such blocks that the server did not copy",
    "failed_sweeps": "sweeps that could not list or delete",
    "skipped_stores": "blocks not sent because they were known to be there",
    "resets": "times that the cache was reset",
}


class Counters(counters.Counters):
    """This tier's counts. Any thread may call."""

    def __init__(self) -> None:
        super().__init__(_NAMES)
