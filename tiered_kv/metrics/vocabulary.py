"""The vocabulary of the core: what the manager counts of each tier, and what several tiers count alike.

Accounts, exporters, the command and the engines' plugins read it, on any thread. The manager's metrics are exposed as
`tiered_kv_<name>`, and a tier's own as `tiered_kv_tier_<name>`, all with the label `tier`. A plugin declares the
metrics that only its tier counts, in `TierType.metrics`. No two metrics share a name. `docs/reference/counters.md` has
its tables from here and from the plugins: `docs/CONTRIBUTING.md` says how.
"""

from __future__ import annotations

import itertools
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv.metrics.histogram import BYTES, SECONDS, SHORT_SECONDS
from tiered_kv.metrics.metric import Metric
from tiered_kv.reasons import SKIPPED, Fate, Learning, Reason, TooSlow

PREFIX: Final = "tiered_kv_"
TIER_PREFIX: Final = "tiered_kv_tier_"


def table(*metrics: Metric) -> dict[str, Metric]:
    """Return metrics by name."""
    return {metric.name: metric for metric in metrics}


def _each(*words: str) -> tuple[tuple[str, ...], ...]:
    return tuple((str(word),) for word in words)


DIRECTIONS: Final = ("store", "load")

ACCOUNT: Final = table(
    Metric("stored_blocks_total", "Blocks stored; in a secondary tier also those that it already had."),
    Metric("stored_bytes_total", "Their bytes."),
    Metric("loaded_blocks_total", "Blocks loaded; from a secondary tier: promoted."),
    Metric("loaded_bytes_total", "Their bytes."),
    Metric("submitted_jobs_total", "Jobs submitted.", ("direction",), values=_each(*DIRECTIONS)),
    Metric("skipped_blocks_total", "Blocks not offered to the tier for storing.", ("reason",), values=_each(*SKIPPED)),
    Metric("offered_again_blocks_total", "Blocks offered again: the tier lacked them when they were used in memory."),
    Metric(
        "failed_blocks_total",
        "Blocks that jobs did not store or load; a job has one reason for all its blocks.",
        ("direction", "reason"),
        values=tuple(itertools.product(DIRECTIONS, (Reason.EXCEPTION.value, Reason.EXPIRED.value))),
    ),
    Metric("refused_promotion_blocks_total", "Blocks that the tier had, but that were a miss for lack of room."),
    Metric(
        "too_slow_blocks_total",
        "Blocks not promoted because the engine computes them sooner.",
        ("reason",),
        values=_each(*TooSlow),
    ),
    Metric("learning_jobs_total", "Loads that measure the tier.", ("reason",), values=_each(*Learning)),
    Metric("expired_jobs_total", "Jobs not reported by their deadline."),
    Metric("late_jobs_total", "Jobs reported after their deadline."),
    Metric("lookup_timeouts_total", "Lookups not answered in time, or that the tier could not answer."),
    Metric("exceptions_total", "Exceptions, and values of a wrong type, from the tier's methods."),
    Metric("unknown_results_total", "Results for jobs that the tier never got, or had already reported."),
)
"""Metrics of a secondary tier's account. The primary tier has the metrics of stored, loaded and skipped blocks, too."""

PREFETCHED: Final = Metric(
    "prefetched_blocks_total",
    "Blocks that prefetch orders loaded and a request used, or none did; and blocks refused for lack of room.",
    ("outcome",),
    values=_each("used", "unused", "refused"),
)
WARMED: Final = Metric(
    "warmed_blocks_total",
    "Blocks of a warm start: loaded, present before that, absent in all tiers, and refused as memory was full.",
    ("outcome",),
    values=_each("loaded", "present", "absent", "refused"),
)
PRIMARY: Final = table(
    PREFETCHED,
    Metric(
        "prefetch_budget_bytes", "Bytes of blocks that prefetch orders may load now: less while few of them are used."
    ),
    WARMED,
    Metric("used_blocks", "Blocks in the primary tier."),
    Metric("used_bytes", "Bytes of the blocks in the primary tier."),
    Metric("capacity_bytes", "Bytes of the whole primary tier."),
    Metric("huge_page_bytes", "Bytes of it on huge pages, counted after the start: of shared memory, otherwise 0."),
    Metric("block_tokens", "Tokens of a block: the setting block.tokens."),
    Metric(
        "restored_tokens_total", "Tokens that the engine loaded, and need not compute: of the KV cache group with most."
    ),
    Metric(
        "compute_block_seconds",
        "Time in which the engine computes a prompt's first block; of several engines the slowest's; 0 if not known.",
    ),
    Metric("compute_growth_seconds", "Time that each earlier block of the prompt adds to it."),
    Metric("compute_backlog_seconds", "Time for the prompts that the engine has begun; only in vLLM."),
    Metric("evicted_blocks_total", "Blocks evicted from the primary tier to make room."),
    Metric("promotion_blocks", "Blocks in promotion from secondary tiers, or held for a request."),
    Metric("released_holds_total", "Holds that ended because the request did not load the block in time."),
    Metric("forgotten_requests_total", "Requests removed because too many were never finished."),
    Metric("hinted_requests_total", "Requests that had hints."),
    Metric("refused_hints_total", "Requests with hints that could not be read."),
    Metric("ignored_hint_actions_total", "Actions in routers' envelopes that mean no hint."),
    Metric(
        "step_seconds",
        "The manager's share of a scheduler's step, without lookups of one key, in one step of 128.",
        (),
        SHORT_SECONDS,
    ),
)
"""Metrics of the primary tier, by `TieringOffloadingManager._measure` and `PrimaryAccount.measure`."""

TENANTS: Final = table(
    Metric("tenant_used_bytes", "Bytes of the blocks that count for the tenant.", ("tenant",)),
    Metric("tenant_share_bytes", "The tenant's share of the capacity.", ("tenant",)),
    Metric("tenant_evicted_blocks_total", "Blocks of the tenant that were evicted to make room.", ("tenant",)),
)
"""Metrics of a tier with `limits`, by `Shares.numbers` in `shares.py`."""

HISTORY: Final = table(
    Metric("blocks_total", "Blocks that requests asked for.", ("result",), values=_each("hit", "miss")),
    Metric(
        "ghost_hits_total",
        "Blocks that requests used, and that the tier would have had with `size` times its capacity.",
        ("size",),
    ),
    Metric(
        "misses_total",
        "The misses, by why the tier did not deliver the block.",
        ("reason",),
        values=_each(*(fate.label for fate in Fate if fate > Fate.STORED)),
    ),
    Metric("unexplained_blocks_total", "Blocks asked for too fast for the history; only of cpu."),
)
"""Metrics of the history for each tier, by `Ledger.snapshot`; `PrimaryAccount.measure` hands them on."""

SECONDARY: Final = table(
    Metric("jobs_in_flight", "Jobs submitted and not yet reported."),
    Metric(
        "job_seconds",
        "Time from a job's submission until the manager collected it, also of failed jobs.",
        ("direction",),
        SECONDS,
    ),
    Metric("job_bytes", "Bytes of a job's blocks in the primary tier.", ("direction",), BYTES),
    Metric("lookup_seconds", "Time from a request's question to the first late answer of a step.", (), SHORT_SECONDS),
    Metric("pinned_bytes", "Bytes of the primary tier pinned by the tier's jobs."),
    Metric("store_budget_bytes", "Bytes that stores in flight may take."),
    Metric("store_budget_used_bytes", "Bytes that stores in flight take."),
    Metric("load_budget_bytes", "Bytes that loads in flight may take."),
    Metric("load_budget_used_bytes", "Bytes that loads in flight take."),
    Metric("write_budget_bytes", "Bytes that the tier may store in an hour; with a write_budget."),
    Metric("write_budget_used_bytes", "The used part of them; nearly all at the opening."),
    Metric("expected_load_seconds", "Time that a load takes without its blocks, as estimated; 0 before two loads."),
    Metric("expected_block_seconds", "Time that each block adds to a load, as estimated."),
    Metric("quarantined_bytes", "Of the pinned bytes, those of expired jobs."),
    Metric("drained", "1 while an operator has taken the tier out, else 0."),
    Metric("breaker_state", "0 closed, 1 half open, 2 open."),
    Metric("breaker_opened_total", "Times that the breaker opened."),
)
"""Metrics of each secondary tier besides its account, by `tiering/gauges.py`."""

AUDIT: Final = table(
    Metric(
        "audited_blocks_total",
        "Blocks found in the tier, computed again and compared.",
        ("result",),
        values=_each("identical", "close", "different"),
    ),
    Metric(
        "audit_largest_difference_ratio",
        "Largest relative difference of 256 values; 1000 if infinite, or the values' type is unknown.",
    ),
    Metric("audit_stopped", "1 once a block differed, with audit_action: stop."),
    Metric("audited_requests_total", "Requests with at least one compared block; only of cpu."),
    Metric("audit_busy_requests_total", "Requests not audited because another was; only of cpu."),
    Metric("audit_abandoned_blocks_total", "Blocks that were not compared; only of cpu.", ("reason",)),
)
"""Metrics of the audit, by `Audit.measure` in `tiering/audit/audit.py`."""

EVENTS: Final = table(
    Metric("event_messages_total", "Messages sent to subscribers, also if there were none."),
    Metric(
        "dropped_event_batches_total",
        "Batches of one step that were discarded: too many keys waited, or a third-party tier's keys were invalid.",
    ),
    Metric("event_replay_requests_total", "Requests for earlier messages."),
)
"""Metrics of the publisher of events, in the primary tier, by `EventPublisher.snapshot`."""

RECORDING: Final = table(
    Metric("recorded_requests_total", "Requests that the trace has got, or that were published for recorders."),
    Metric(
        "unrecorded_requests_total",
        "Requests that it lacks: too many came at once, or the file could not be written.",
    ),
)
"""Metrics of a recorder, in the primary tier, by `Recorder.measure` in `tiering/recording/recorder.py`."""

ATTACHED: Final = table(
    Metric("lost_connections_total", "Connections to the host's server that ended before the engine did."),
    Metric("connection_state", "1 attached, 0 not: then every block is a miss."),
)
"""Metrics of an engine that uses a host's cache, with blocks stored, loaded and missed, by `AttachedCounts`.

Its tier is `host`."""

SERVER: Final = table(
    Metric("sessions", "Engines and programs that are connected, or may still copy."),
    Metric("leased_blocks", "Blocks that may not be evicted, because of their requests."),
    Metric("granted_blocks", "Rows that they have for blocks to be stored."),
    Metric("lacks_huge_pages", "1 if the rows have no huge pages."),
    Metric("ready_bytes", "Bytes of rows that are allocated, so that engines may use them."),
)
"""Metrics of a host's server, in its primary tier, by `ServedStack.observed`."""

MANAGER: Final = {
    **ACCOUNT,
    **PRIMARY,
    **TENANTS,
    **HISTORY,
    **SECONDARY,
    **AUDIT,
    **EVENTS,
    **RECORDING,
    **ATTACHED,
    **SERVER,
}
"""The manager's counters, by name."""

COMMON: Final = table(
    Metric("blocks", "Blocks in the tier."),
    Metric("used_bytes", "Bytes that count against the capacity."),
    Metric("capacity_bytes", "The limit of used_bytes; shared storage may exceed it until the next sweep."),
    Metric("evicted_blocks_total", "Blocks evicted to make room; in shared storage those of any process."),
    Metric("wasted_bytes_total", "Bytes evicted without a read since they were written."),
    Metric("present_blocks_total", "Blocks to be stored that the storage already had."),
    Metric("recovered_blocks_total", "Blocks found when the storage was opened."),
    Metric("relocated_blocks_total", "Blocks that the tier wrote again inside its storage, to make room."),
    Metric(
        "corrupt_blocks_total",
        "Damaged records, or those of other blocks, by the record's reason; deleted if the tier can.",
        ("reason",),
    ),
    Metric("unreadable_blocks_total", "Sound records whose codec or key this process lacks.", ("reason",)),
    Metric("refused_lookups_total", "Lookups that were a miss because too many waited."),
    Metric("unanswered_lookups_total", "Lookups that were a miss because no server answered."),
    Metric(
        "epoch_repairs_total",
        "Times that the storage had lost the epoch's mark: it was written again, or a new one joined.",
    ),
    *TENANTS.values(),
)
"""Metrics that tiers count themselves, with one meaning in all tiers. The command and the dashboard read some.

Any tier may report them. A plugin takes its tier's common metrics by `common_metrics`, and declares the tier's others
beside them.
"""


def common_metrics(*names: str) -> tuple[Metric, ...]:
    """Return metrics of `COMMON`, for the declaration of a tier type.

    Raises:
        ConfigError: There is no such metric.
    """
    if unknown := [name for name in names if name not in COMMON]:
        raise ConfigError(f"no common metric is {unknown[0]!r}; declare a Metric, or take one of {', '.join(COMMON)}")
    return tuple(COMMON[name] for name in names)
