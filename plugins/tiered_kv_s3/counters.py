"""What the tier counts since it was opened."""

from __future__ import annotations

from typing import Final

COUNTERS: Final = {
    "retried_requests_total": "requests that were sent again",
    "slow_down_answers_total": "times the server asked for fewer requests",
    "opened_connections_total": "connections opened",
    "expired_blocks_total": "blocks found older than `ttl`",
    "deleted_blocks_total": "blocks deleted because of `ttl` or `capacity`",
    "unanswered_blocks_total": "blocks that the bucket did not answer for while it answered for others",
    "unanswered_lookups_total": "lookups answered with a miss because the bucket answered for no block",
    "renewed_blocks_total": "blocks used past half of `ttl`, and made young again",
    "failed_renewals_total": "such blocks that the server did not copy",
    "failed_sweeps_total": "sweeps that could not list or delete",
    "present_blocks_total": "blocks not sent because they were known to be there",
    "resets_total": "times that the cache was reset",
}
COUNTERS_BY_LABEL: Final = {
    "requests_total": "requests for payloads and presence, by method",
    "corrupt_blocks_total": "records damaged twice in a row, of another version, or refused by encryption, by reason",
    "unreadable_blocks_total": "sound records that need a codec or a key that is not here, by reason; they stay",
}
