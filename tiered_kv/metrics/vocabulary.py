"""The vocabulary: the name and meaning of every metric, for counters, Prometheus and other registries.

The manager's counters are metrics `tiered_kv_<name>`, and a tier's own are `tiered_kv_tier_<name>`, all with the label
`tier`. `docs/reference/counters.md` has its tables from here: `docs/CONTRIBUTING.md` says how.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiered_kv.metrics.counters import Counters
from tiered_kv.metrics.histogram import BYTES, SECONDS, SHORT_SECONDS
from tiered_kv.reasons import SKIPPED, TOO_SLOW_REASONS, Fate

PREFIX: Final = "tiered_kv_"
TIER_PREFIX: Final = "tiered_kv_tier_"
TOTAL: Final = "_total"


@dataclass(frozen=True, slots=True)
class Metric:
    help: str
    labels: tuple[str, ...] = ()  # besides `tier`
    bounds: tuple[float, ...] = ()  # of a histogram: the largest value of each bucket
    values: tuple[tuple[str, ...], ...] = ()
    """The values of `labels` that it has from the start, with 0. Others may follow: a tier's own reasons."""
    of: str = ""  # of a tier's own metric: the built-in tiers that have it; "" for all


def _each(*words: str) -> tuple[tuple[str, ...], ...]:
    return tuple((word,) for word in words)


DIRECTIONS: Final = ("store", "load")

ACCOUNT: Final = {
    "stored_blocks_total": Metric("Blocks stored; in a secondary tier also those that it already had."),
    "stored_bytes_total": Metric("Their bytes."),
    "loaded_blocks_total": Metric("Blocks loaded; from a secondary tier: promoted."),
    "loaded_bytes_total": Metric("Their bytes."),
    "submitted_jobs_total": Metric("Jobs submitted.", ("direction",), values=_each(*DIRECTIONS)),
    "skipped_blocks_total": Metric("Blocks not offered to the tier for storing.", ("reason",), values=_each(*SKIPPED)),
    "offered_again_blocks_total": Metric("Blocks offered again: the tier lacked them when they were used in memory."),
    "failed_blocks_total": Metric(
        "Blocks that jobs did not store or load; a job has one reason for all its blocks.",
        ("direction", "reason"),
        values=tuple(itertools.product(DIRECTIONS, ("exception", "expired"))),
    ),
    "refused_promotion_blocks_total": Metric("Blocks that the tier had, but that were a miss for lack of room."),
    "too_slow_blocks_total": Metric(
        "Blocks not promoted because the engine computes them sooner.", ("reason",), values=_each(*TOO_SLOW_REASONS)
    ),
    "learning_jobs_total": Metric("Loads that measure the tier.", ("reason",), values=_each("first", "try")),
    "expired_jobs_total": Metric("Jobs not reported by their deadline."),
    "late_jobs_total": Metric("Jobs reported after their deadline."),
    "lookup_timeouts_total": Metric("Lookups not answered in time, or that the tier could not answer."),
    "exceptions_total": Metric("Exceptions, and values of a wrong type, from the tier's methods."),
    "unknown_results_total": Metric("Results for jobs that the tier never got, or had already reported."),
}
"""What the account of a secondary tier counts. The primary tier has those of stored, loaded and skipped blocks, too."""

PRIMARY: Final = {
    "used_blocks": Metric("Blocks in the primary tier."),
    "used_bytes": Metric("Bytes of the blocks in the primary tier."),
    "capacity_bytes": Metric("Bytes of the whole primary tier."),
    "block_tokens": Metric("Tokens of a block: the setting block.tokens."),
    "restored_tokens_total": Metric(
        "Tokens that the engine loaded, and need not compute: of the KV cache group with most."
    ),
    "compute_block_seconds": Metric(
        "Time in which the engine computes a prompt's first block; of several engines the slowest's; 0 if not known."
    ),
    "compute_growth_seconds": Metric("Time that each earlier block of the prompt adds to it."),
    "compute_backlog_seconds": Metric("Time for the prompts that the engine has begun; only in vLLM."),
    "evicted_blocks_total": Metric("Blocks evicted from the primary tier to make room."),
    "promotion_blocks": Metric("Blocks in promotion from secondary tiers, or held for a request."),
    "released_holds_total": Metric("Holds that ended because the request did not load the block in time."),
    "forgotten_requests_total": Metric("Requests removed because too many were never finished."),
    "hinted_requests_total": Metric("Requests that had hints."),
    "refused_hints_total": Metric("Requests with hints that could not be read."),
    "ignored_hint_actions_total": Metric("Actions in routers' envelopes that mean no hint."),
    "step_seconds": Metric(
        "The manager's share of a scheduler's step, without lookups of one key, in one step of 128.",
        (),
        SHORT_SECONDS,
    ),
}
"""Of the primary tier: the `snapshot` of `CPUOffloadingManager`, `PrimaryAccount` and `EngineCost`."""

HISTORY: Final = {
    "blocks_total": Metric("Blocks that requests asked for.", ("result",), values=_each("hit", "miss")),
    "ghost_hits_total": Metric(
        "Blocks that requests used, and that the tier would have had with so many times its capacity.", ("size",)
    ),
    "misses_total": Metric(
        "The misses, by why the tier did not deliver the block.",
        ("reason",),
        values=_each(*(fate.label for fate in Fate if fate > Fate.STORED)),
    ),
    "unexplained_blocks_total": Metric("Blocks asked for too fast for the history; only of cpu."),
}
"""Of the history, for each tier: `Ledger.snapshot`."""

SECONDARY: Final = {
    "jobs_in_flight": Metric("Jobs submitted and not yet reported."),
    "job_seconds": Metric(
        "Time from a job's submission until the manager collected it, also of failed jobs.", ("direction",), SECONDS
    ),
    "job_bytes": Metric("Bytes of a job's blocks in the primary tier.", ("direction",), BYTES),
    "lookup_seconds": Metric("Time from a request's question to the first late answer of a step.", (), SHORT_SECONDS),
    "pinned_bytes": Metric("Bytes of the primary tier pinned by the tier's jobs."),
    "store_budget_bytes": Metric("Bytes that stores in flight may take."),
    "store_budget_used_bytes": Metric("Bytes that stores in flight take."),
    "load_budget_bytes": Metric("Bytes that loads in flight may take."),
    "load_budget_used_bytes": Metric("Bytes that loads in flight take."),
    "write_budget_bytes": Metric("Bytes that the tier may store in an hour; with a write_budget."),
    "write_budget_used_bytes": Metric("The used part of them; nearly all at the opening."),
    "expected_load_seconds": Metric("Time that a load takes without its blocks, as estimated; 0 before two loads."),
    "expected_block_seconds": Metric("Time that each block adds to a load, as estimated."),
    "quarantined_bytes": Metric("Of the pinned bytes, those of expired jobs."),
    "breaker_state": Metric("0 closed, 1 half open, 2 open."),
    "breaker_opened_total": Metric("Times that the breaker opened."),
}
"""Of every secondary tier, besides its account: `GuardedTier.snapshot`."""

AUDIT: Final = {
    "audited_blocks_total": Metric(
        "Blocks found in the tier, computed again and compared.",
        ("result",),
        values=_each("identical", "close", "different"),
    ),
    "audit_largest_difference_ratio": Metric(
        "Largest relative difference of 256 values; 1000 if infinite, or the values' type is unknown."
    ),
    "audit_stopped": Metric("1 once a block differed, with audit_action: stop."),
    "audited_requests_total": Metric("Requests with at least one compared block; only of cpu."),
    "audit_busy_requests_total": Metric("Requests not audited because another was; only of cpu."),
    "audit_abandoned_blocks_total": Metric("Blocks that were not compared; only of cpu.", ("reason",)),
}
"""Of the audit: `tiering/audit/manager.py`."""

ATTACHED: Final = {
    "lost_connections_total": Metric("Connections to the host's server that ended before the engine did."),
    "connection_state": Metric("1 attached, 0 not: then every block is a miss."),
}
"""Of an engine that uses a host's cache, with blocks stored, loaded and missed: `AttachedManager.counters`.

Its tier is `host`."""

SERVER: Final = {
    "sessions": Metric("Engines and programs that are connected, or may still copy."),
    "leased_blocks": Metric("Blocks that may not be evicted, because of their requests."),
    "granted_blocks": Metric("Rows that they have for blocks to be stored."),
    "lacks_huge_pages": Metric("1 if the rows have no huge pages."),
    "ready_bytes": Metric("Bytes of rows that are allocated, so that engines may use them."),
}
"""Of a host's server, in its primary tier: `Host.observed`."""

MANAGER: Final = {**ACCOUNT, **PRIMARY, **HISTORY, **SECONDARY, **AUDIT, **ATTACHED, **SERVER}
"""The manager's counters, by name."""

TIER: Final = {
    # Use and eviction.
    "blocks": Metric("Blocks in the tier.", of="nvme memory"),
    "used_bytes": Metric("Bytes that count against the capacity.", of="nvme memory fs s3"),
    "capacity_bytes": Metric("The limit of used_bytes; in s3 sweeps enforce it.", of="nvme memory fs s3"),
    "is_attached": Metric("1 while the server answers, else 0.", of="host"),
    "granted_bytes": Metric("Bytes that this process may store before it asks the ledger again.", of="fs"),
    "evicted_blocks_total": Metric("Blocks evicted to make room; in fs those of any process.", of="nvme memory fs"),
    "wasted_bytes_total": Metric("Bytes evicted without a read since they were written.", of="nvme memory"),
    "present_blocks_total": Metric("Blocks to be stored that the storage already had.", of="fs redis s3"),
    # Damage and failures.
    "corrupt_blocks_total": Metric(
        "Damaged records, or those of other blocks, by the record's reason; deleted if the tier can.",
        ("reason",),
        of="nvme memory fs redis s3",
    ),
    "unreadable_blocks_total": Metric(
        "Sound records whose codec or key this process lacks.", ("reason",), of="nvme fs s3"
    ),
    "failed_blocks_total": Metric(
        "Blocks not stored or loaded, each by its own reason.", ("direction", "reason"), of="redis"
    ),
    "failed_calls_total": Metric("Calls of the file system that failed.", ("reason",), of="fs"),
    "failed_lookups_total": Metric("Lookups that a server did not answer.", ("reason",), of="redis"),
    "refused_lookups_total": Metric("Lookups that were a miss because too many waited."),
    "unanswered_lookups_total": Metric("Lookups that were a miss because no server answered.", of="redis s3"),
    "unanswered_blocks_total": Metric(
        "Blocks for which the bucket did not answer while it answered for others.", of="s3"
    ),
    "io_errors_total": Metric("System calls that failed, also for lack of space.", of="nvme"),
    "no_space_errors_total": Metric("Times that the disk had less space than the capacity allows.", of="nvme"),
    "room_timeouts_total": Metric("Stores for which no segment became free in time.", of="nvme"),
    "refused_stores_total": Metric("Stores failed at once: the disk is full, with no segment to reclaim.", of="nvme"),
    "foreign_files": Metric("Files in the directory that do not belong to the tier.", of="nvme"),
    # Segments.
    "segments": Metric("Segments in the directory.", of="nvme"),
    "free_segments": Metric("Segments that are ready to be filled.", of="nvme"),
    "stored_batches_total": Metric("Batches written.", of="nvme"),
    "reclaimed_segments_total": Metric("Segments used again, or deleted, to make room.", of="nvme"),
    "relocated_blocks_total": Metric("Blocks moved when their segment was reclaimed.", of="nvme"),
    "recovered_blocks_total": Metric("Blocks found when the directory was opened.", of="nvme"),
    "discarded_segments_total": Metric("Segments deleted at the opening: damaged, or over the capacity.", of="nvme"),
    "deleted_segments_total": Metric("Segments whose file was deleted since the opening.", of="nvme"),
    "damaged_segments_total": Metric("Of these, those where the disk failed, or the file was cut short.", of="nvme"),
    "refused_places_total": Metric(
        "Places of the disk that refused a write and are left out, while others take writes.", of="nvme"
    ),
    "left_out_segments": Metric("Segments that are not filled, or in part, because of such a place.", of="nvme"),
    "lost_segments_total": Metric("Segments whose file somebody else deleted or moved away.", of="nvme"),
    # Shared storage.
    "surveys_total": Metric("Surveys of the directory by this process.", of="fs"),
    "epoch_repairs_total": Metric(
        "Times that the storage had lost the epoch's mark: it was written again, or a new one joined.", of="fs redis s3"
    ),
    "failed_requests_total": Metric(
        "Requests that failed in all attempts, by the server's error code.", ("operation", "reason"), of="s3"
    ),
    "requests_total": Metric("Requests sent for payloads and presence.", ("method",), of="s3"),
    "retried_requests_total": Metric("Requests sent again.", of="s3"),
    "slow_down_answers_total": Metric("Answers by which the server asked for fewer requests.", of="s3"),
    "opened_connections_total": Metric("Connections opened.", of="s3"),
    "open_connections": Metric("Connections open at present.", of="s3"),
    "expired_blocks_total": Metric("Blocks found older than ttl.", of="s3"),
    "deleted_blocks_total": Metric("Blocks deleted because of ttl or capacity.", of="s3"),
    "renewed_blocks_total": Metric("Blocks used past half of their time, and copied onto themselves.", of="s3"),
    "failed_renewals_total": Metric("Renewals that the server refused, or did not do.", of="s3"),
    "failed_sweeps_total": Metric("Sweeps that could not list or delete; the next tries again.", of="s3"),
}
"""The built-in tiers' own counters, by name."""


def counters_of(metrics: Mapping[str, Metric]) -> Counters:
    return Counters(*_names_of(metrics))


def own_names(tier_type: str) -> tuple[list[str], list[str]]:
    """Return the names of the counters that a built-in tier counts itself: those without labels, and those with."""
    own = {name: each for name, each in TIER.items() if tier_type in each.of.split() and name.endswith(TOTAL)}
    return _names_of(own)


def _names_of(metrics: Mapping[str, Metric]) -> tuple[list[str], list[str]]:
    labelled = [name for name, metric in metrics.items() if metric.labels]
    return [name for name in metrics if name not in labelled], labelled
