"""The metrics of object tiers.

Their stores, lookups and sweeps count them, on their threads. `ObjectTier.stats` adds the gauges.
"""

from __future__ import annotations

from typing import Final

from tiered_kv.metrics.metric import Metric
from tiered_kv.metrics.vocabulary import common_metrics

OBJECT_METRICS: Final = (
    *common_metrics(
        "used_bytes",
        "capacity_bytes",
        "present_blocks_total",
        "corrupt_blocks_total",
        "unreadable_blocks_total",
        "unanswered_lookups_total",
        "epoch_repairs_total",
    ),
    Metric("unanswered_blocks_total", "Blocks for which the bucket did not answer while it answered for others."),
    Metric(
        "failed_requests_total",
        "Requests that failed in all attempts, by the server's error code.",
        ("operation", "reason"),
    ),
    Metric("requests_total", "Requests sent for payloads and presence.", ("method",)),
    Metric("retried_requests_total", "Requests sent again."),
    Metric("slow_down_answers_total", "Answers by which the server asked for fewer requests."),
    Metric("expired_blocks_total", "Blocks found older than ttl."),
    Metric("deleted_blocks_total", "Blocks deleted because of ttl or capacity."),
    Metric("renewed_blocks_total", "Blocks used past half of their time, and copied onto themselves."),
    Metric("failed_renewals_total", "Renewals that the server refused, or did not do."),
    Metric("failed_sweeps_total", "Sweeps that could not list or delete; the next tries again."),
)
