"""The names of the tier's counters; `metrics/vocabulary.py` explains them."""

from __future__ import annotations

from typing import Final

COUNTERS: Final = (
    "retried_requests_total",
    "slow_down_answers_total",
    "opened_connections_total",
    "expired_blocks_total",
    "deleted_blocks_total",
    "unanswered_blocks_total",
    "unanswered_lookups_total",
    "renewed_blocks_total",
    "failed_renewals_total",
    "failed_sweeps_total",
    "present_blocks_total",
)
COUNTERS_BY_LABEL: Final = ("requests_total", "corrupt_blocks_total", "unreadable_blocks_total")
