"""The vocabulary: the name and meaning of every metric, for counters, Prometheus and other registries.

The manager's counters are metrics `tiered_kv_<name>`, and a tier's own are `tiered_kv_tier_<name>`, all with the label
`tier`. `docs/reference/counters.md` has the details; a test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tiered_kv.metrics.instruments import BYTES, SECONDS, SHORT_SECONDS, Counters
from tiered_kv.reasons import SKIPPED, TOO_SLOW_REASONS, Fate

PREFIX: Final = "tiered_kv_"
TIER_PREFIX: Final = "tiered_kv_tier_"
TOTAL: Final = "_total"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        labels: Its labels besides `tier`.
        bounds: Of a histogram: the largest value of each bucket.
        values: The values of `labels` that it has from the start, with 0. Others may follow: a tier's own reasons.
    """

    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()


def _each(*words: str) -> tuple[tuple[str, ...], ...]:
    return tuple((word,) for word in words)


DIRECTIONS: Final = ("store", "load")


ACCOUNT: Final = {
    "stored_blocks_total": Metric("Blocks stored in the tier."),
    "stored_bytes_total": Metric("Bytes stored in the tier."),
    "loaded_blocks_total": Metric("Blocks loaded from the tier."),
    "loaded_bytes_total": Metric("Bytes loaded from the tier."),
    "submitted_jobs_total": Metric("Jobs given to the tier.", ("direction",), values=_each(*DIRECTIONS)),
    "skipped_blocks_total": Metric(
        "Blocks that the tier was not given for storing.", ("reason",), values=_each(*SKIPPED)
    ),
    "failed_blocks_total": Metric(
        "Blocks that jobs did not store or load.",
        ("direction", "reason"),
        values=tuple(itertools.product(DIRECTIONS, ("exception", "expired"))),
    ),
    "refused_promotion_blocks_total": Metric("Blocks that the tier had and for which there was no room."),
    "too_slow_blocks_total": Metric(
        "Blocks not loaded because the engine computes them sooner.", ("reason",), values=_each(*TOO_SLOW_REASONS)
    ),
    "learning_jobs_total": Metric(
        "Loads from which the tier's times are learned.", ("reason",), values=_each("first", "try")
    ),
    "expired_jobs_total": Metric("Jobs not reported by their deadline."),
    "late_jobs_total": Metric("Jobs reported after their deadline."),
    "lookup_timeouts_total": Metric("Lookups that the tier did not answer in time."),
    "exceptions_total": Metric("Exceptions raised by the tier's methods."),
    "unknown_results_total": Metric("Results for jobs that the tier was not given."),
}
"""What the account of a secondary tier counts. The primary tier has those of stored, loaded and skipped blocks, too."""

MANAGER: Final = {
    **ACCOUNT,
    # Of the primary tier.
    "used_blocks": Metric("Blocks in the primary tier."),
    "used_bytes": Metric("Bytes of the blocks in the primary tier."),
    "capacity_bytes": Metric("Bytes of the whole primary tier."),
    "block_tokens": Metric("Tokens of a block."),
    "restored_tokens_total": Metric("Tokens whose blocks the engine loaded, and need not compute."),
    "compute_block_seconds": Metric("Seconds in which the engine computes the first block of a prompt."),
    "compute_growth_seconds": Metric("Seconds more for each block before it."),
    "compute_backlog_seconds": Metric("Seconds for the prompts that the engine has begun."),
    "evicted_blocks_total": Metric("Blocks evicted from the primary tier to make room."),
    "promotion_blocks": Metric("Blocks on their way from secondary tiers, or held for a request."),
    "released_holds_total": Metric("Holds released because the request did not load the block in time."),
    "forgotten_requests_total": Metric("Requests that were never finished, and were forgotten."),
    "hinted_requests_total": Metric("Requests that came with hints."),
    "refused_hints_total": Metric("Requests whose hints could not be read."),
    "step_seconds": Metric(
        "Seconds of a scheduler step that the manager took, without lookups of one key, in one step of 128.",
        (),
        SHORT_SECONDS,
    ),
    # Of the history.
    "blocks_total": Metric("Blocks that requests asked for.", ("result",), values=_each("hit", "miss")),
    "ghost_hits_total": Metric("Blocks used that the tier would have had at another size.", ("size",)),
    "misses_total": Metric(
        "Blocks that requests asked for and that this tier did not bring.",
        ("reason",),
        values=_each(*(fate.label for fate in Fate if fate > Fate.STORED)),
    ),
    "unexplained_blocks_total": Metric(
        "Blocks that requests asked for, too fast or too many for the history: they are in no miss or hit."
    ),
    # Of secondary tiers.
    "jobs_in_flight": Metric("Jobs given to the tier and not yet reported."),
    "job_seconds": Metric("Seconds from a job's submission until it was collected.", ("direction",), SECONDS),
    "job_bytes": Metric("Bytes of the blocks of a job.", ("direction",), BYTES),
    "lookup_seconds": Metric("Seconds until the tier answered a lookup late; a sample.", (), SHORT_SECONDS),
    "pinned_bytes": Metric("Bytes of the primary tier that the tier's jobs keep in use."),
    "store_budget_bytes": Metric("Bytes that stores in flight may take."),
    "store_budget_used_bytes": Metric("Bytes that stores in flight take."),
    "load_budget_bytes": Metric("Bytes that loads in flight may take."),
    "load_budget_used_bytes": Metric("Bytes that loads in flight take."),
    "write_budget_bytes": Metric("Bytes that the tier may store in an hour."),
    "write_budget_used_bytes": Metric("Bytes of these that are used up."),
    "expected_load_seconds": Metric("Seconds that each load takes, as estimated, without its blocks."),
    "expected_block_seconds": Metric("Seconds that each block adds to a load, as estimated."),
    "quarantined_bytes": Metric("Bytes of the primary tier that expired jobs keep out of use."),
    "breaker_state": Metric("0 closed, 1 half open, 2 open."),
    "breaker_opened_total": Metric("Times that the breaker opened."),
    # Of the audit.
    "audited_blocks_total": Metric(
        "Blocks computed anew and compared.", ("result",), values=_each("identical", "close", "different")
    ),
    "audit_largest_difference_ratio": Metric("Largest relative difference of 256 values so far."),
    "audit_stopped": Metric("1 once a block differed, where the audit stops the tier then."),
    "audited_requests_total": Metric("Requests of which at least one block was compared."),
    "audit_busy_requests_total": Metric("Requests not audited because another was."),
    "audit_abandoned_blocks_total": Metric("Blocks that were to be compared and were not.", ("reason",)),
}
"""The manager's counters, by name."""

TIER: Final = {
    # Use and eviction.
    "blocks": Metric("Blocks in the tier."),
    "used_bytes": Metric("Bytes that the tier uses of its capacity."),
    "capacity_bytes": Metric("The most bytes that the tier may use."),
    "granted_bytes": Metric("Bytes that this process may store before it asks the ledger again."),
    "evicted_blocks_total": Metric("Blocks evicted to make room."),
    "wasted_bytes_total": Metric("Bytes evicted without a read since they were written."),
    "present_blocks_total": Metric("Blocks that were to be stored and were there already."),
    # Damage and failures.
    "corrupt_blocks_total": Metric("Blocks that no process can read, or with other content than stored.", ("reason",)),
    "unreadable_blocks_total": Metric("Sound blocks that this process cannot read.", ("reason",)),
    "failed_blocks_total": Metric("Blocks not stored or loaded, each by its own reason.", ("direction", "reason")),
    "failed_calls_total": Metric("Calls of the file system that failed.", ("reason",)),
    "failed_lookups_total": Metric("Lookups that a server did not answer.", ("reason",)),
    "refused_lookups_total": Metric("Lookups that were a miss because too many waited."),
    "unanswered_lookups_total": Metric("Lookups that were a miss because no server answered."),
    "unanswered_blocks_total": Metric("Blocks that the bucket did not answer for while it answered for others."),
    "io_errors_total": Metric("System calls that failed."),
    "no_space_errors_total": Metric("Times that the disk had less space than the capacity allows."),
    "room_timeouts_total": Metric("Stores for which no segment became free in time."),
    "refused_stores_total": Metric("Stores failed at once because the disk was full."),
    "foreign_files": Metric("Files in the directory that are not the tier's."),
    # Segments.
    "segments": Metric("Segments in the directory."),
    "free_segments": Metric("Segments that are ready to be filled."),
    "stored_batches_total": Metric("Batches written."),
    "reclaimed_segments_total": Metric("Segments used again, or deleted, to make room."),
    "relocated_blocks_total": Metric("Blocks moved on because they had been used."),
    "recovered_blocks_total": Metric("Blocks found when the directory was opened."),
    "discarded_segments_total": Metric("Segments found when it was opened, and deleted."),
    "deleted_segments_total": Metric("Segments whose file was deleted since."),
    "damaged_segments_total": Metric("Segments lost because the disk failed in them, or their file was cut short."),
    "lost_segments_total": Metric("Segments whose file somebody else deleted or moved away."),
    # Shared storage.
    "surveys_total": Metric("Surveys of the directory by this process."),
    "epoch_repairs_total": Metric("Repairs of the epoch's mark."),
    "failed_requests_total": Metric("Requests that failed, by the server's error code.", ("operation", "reason")),
    "requests_total": Metric("Requests sent for payloads and presence.", ("method",)),
    "retried_requests_total": Metric("Requests sent again."),
    "slow_down_answers_total": Metric("Answers by which the server asked for fewer requests."),
    "opened_connections_total": Metric("Connections opened."),
    "open_connections": Metric("Connections open now."),
    "expired_blocks_total": Metric("Blocks found older than their time to live."),
    "deleted_blocks_total": Metric("Blocks deleted for their age, or for the capacity."),
    "renewed_blocks_total": Metric("Blocks copied onto themselves because they were used."),
    "failed_renewals_total": Metric("Renewals that the server refused, or did not do."),
    "failed_sweeps_total": Metric("Sweeps that could not list or delete."),
}
"""The built-in tiers' own counters, by name."""


def counters_of(metrics: Mapping[str, Metric]) -> Counters:
    """Return counters with these names and labels."""
    labelled = [name for name, metric in metrics.items() if metric.labels]
    return Counters([name for name in metrics if name not in labelled], labelled)
