"""The page of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from tiered_kv._cli.report import figures, page, plots
from tiered_kv._cli.report.figures import Html, bar, card, element, joined, table
from tiered_kv._cli.report.page import Run, figure, quantity, section, tile
from tiered_kv._cli.report.plots import Sampler
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.units import format_bytes
from tiered_kv.metrics.instruments import flat_counts
from tiered_kv.reasons import FAILED, SENTENCES, TOO_SLOW_REASONS
from tiered_kv.workload.replay import ReplaySettings
from tiered_kv.workload.tally import GB, ReplayReport

_MISSED: Final = "misses"
_SPENT: Final = {
    "bytes": "went into writing and comparing bytes",
    "manager": "into the manager",
    "waiting": "into waits for storage",
}
_LIMITS: Final = {
    "bytes": ("the replay's own work", "the replay's own work limits them, not the storage"),
    "manager": ("the manager", "the manager's work for so many requests limits them, not the storage"),
    "waiting": ("the storage", "the storage limits them"),
}
_REASONS: Final = (
    ("misses_total", "Misses: blocks that were asked for and did not come from the tier", SENTENCES),
    ("too_slow_blocks_total", "Computed instead of loaded: blocks that the engine computes sooner", TOO_SLOW_REASONS),
    ("skipped_blocks_total", "Stores that were skipped: blocks that were not offered to the tier", SENTENCES),
    (
        "failed_blocks_total",
        "Transfers that failed: blocks that a job did not store or load",
        {word: reason.sentence for word, reason in FAILED.items()},
    ),
)
"""Counters with reasons, their titles, and the meanings of the reasons."""


def replay_page(
    run: Run, report: ReplayReport, sampler: Sampler, settings: ReplaySettings, workload: str, remarks: Iterable[str]
) -> str:
    """Return the page of a replay of `workload`. `remarks` are sentences at its top."""
    return page.page(
        run,
        kind="Replay report",
        heading=f"{workload} through {run.stack_name}",
        lede=" ".join(replay_sentences(report)),
        notes=remarks,
        tiles=_tiles(report),
        sections=[_origin(report), _course(report, sampler), _reasons(run, report)],
        settings=_settings(report, settings),
    )


TIER_COLUMNS: Final = ("tier", "hits", "share", "stored GB", "GB/s", "loaded GB", "GB/s")


def tier_rows(report: ReplayReport) -> Iterator[list[str]]:
    """Yield the rows of `TIER_COLUMNS`, one for each tier and one for misses."""
    for name, tier in report.tiers.items():
        stored = [f"{tier.stored_bytes / GB:.2f}", f"{tier.store_gb_per_s:.3f}"]
        loaded = [f"{tier.loaded_bytes / GB:.2f}", f"{tier.load_gb_per_s:.3f}"]
        yield [name, f"{tier.hits:,}", _share(tier.hits, report.blocks), *stored, *loaded]
    yield [_MISSED, f"{report.misses:,}", _share(report.misses, report.blocks), "", "", "", ""]


def _limit_sentence(report: ReplayReport) -> str:
    """Return a sentence about what the run spent its time with, and so what limits its rates."""
    told = ", ".join(f"{report.spent_s[name] / max(report.seconds, 1e-9):.0%} {what}" for name, what in _SPENT.items())
    return f"GB/s are averages over the run, of which {told}: {_limit(report)[1]}."


def _limit(report: ReplayReport) -> tuple[str, str]:
    """Return in short, and in a sentence, what limits the rates."""
    return _LIMITS[max(report.spent_s, key=report.spent_s.__getitem__)]


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "<0.1%" if 0 < part < whole / 1000 else f"{part / whole:.1%}"


def replay_sentences(report: ReplayReport) -> list[str]:
    """Return what a replay came to, for the terminal and the page."""
    p50, p99, longest = map(figures.shown_us, (report.step_us.p50, report.step_us.p99, report.step_us.max))
    asked = f"{quantity(report.blocks, 'block')} of {format_bytes(report.block_bytes)}"
    loaded = report.verified_blocks + report.corrupt_blocks
    wrong = f"{report.corrupt_blocks:,} are CORRUPT" if report.corrupt_blocks else "all are right"
    compared = (
        f"{quantity(loaded, 'loaded block')} compared byte by byte: {wrong}." if loaded else "No block was loaded."
    )
    return [
        f"{report.hit_rate:.1%} of {asked} were hits, in {quantity(report.requests, 'request')} and "
        f"{report.seconds:,.1f} s.",
        compared,
        f"A step inside the manager took {p50} (median), {p99} (99 of 100 at most), {longest} (longest).",
        _limit_sentence(report),
    ]


def _tiles(report: ReplayReport) -> Iterator[Html]:
    primary = report.tiers[PRIMARY_NAME]  # all transfers go through it
    yield tile(f"{100 * report.hit_rate:.1f}", "%", "of blocks were hits")
    yield tile(f"{report.blocks - report.misses:,}", "", "blocks loaded by requests")
    yield tile(f"{report.misses:,}", "", "blocks missed")
    yield tile(figures.shown_us(report.step_us.p99), "", "99th percentile of a step")
    yield tile(f"{primary.store_gb_per_s:.3f}", "GB/s", f"stored by requests; limit: {_limit(report)[0]}")
    yield tile(f"{primary.load_gb_per_s:.3f}", "GB/s", f"loaded by requests; limit: {_limit(report)[0]}")
    yield tile(f"{report.corrupt_blocks:,}", "", "wrong blocks", is_bad=report.corrupt_blocks > 0)


def _keys(report: ReplayReport) -> dict[str, str]:
    return {name: figures.tier_color(index) for index, name in enumerate(report.tiers)}


def _origin(report: ReplayReport) -> Html:
    keys = {**_keys(report), _MISSED: figures.MISS}
    blocks = {**{name: tier.hits for name, tier in report.tiers.items()}, _MISSED: report.misses}
    parts = (
        element("span", style=f"flex: {count} 0 0; background: {figures.in_page(keys[name])}")
        for name, count in blocks.items()
        if count
    )
    rows = [[joined([page.color_key(keys[row[0]]), row[0]]), *row[1:]] for row in tier_rows(report)]
    about = (
        "Each block that a request asked for is counted once: for the tier that had it, or as missed. A request's "
        "first absent block and all blocks after it are missed. What a tier below the primary one gave, the primary "
        "tier loaded too. 1 GB is 1e9 bytes."
    )
    return section(
        "Where blocks came from", about, card(element("div", *parts, class_="whole"), table(TIER_COLUMNS, rows))
    )


def _course(report: ReplayReport, sampler: Sampler) -> Html:
    tiers, keys, samples, step = list(report.tiers), _keys(report), sampler.samples, report.step_us
    p50, p99, longest = map(figures.shown_us, (step.p50, step.p99, step.max))
    reporting = {name for name in tiers if any(sample.use(name) is not None for sample in samples)}
    silent = ", ".join(name for name in tiers if name not in reporting)
    shown = [
        figure(
            "Hits by tier",
            "The share of blocks that each tier gave, from the first request to the last.",
            plots.hits_over_requests(samples, tiers),
            [*keys.items(), (_MISSED, figures.MISS)],
        ),
        figure(
            "Throughput",
            "Bytes that each tier stored (above) and loaded (below). For cpu, those that requests stored and loaded.",
            plots.throughput(samples, tiers),
            keys.items(),
        ),
        figure(
            "Time of a step",
            f"What {quantity(report.steps, 'step')} spent inside the manager, all requests of a step together. The "
            f"lines: half took at most {p50}, 99 of 100 at most {p99} (dashed), the longest {longest} (dotted).",
            plots.step_distribution(sampler.step_s, step),
        ),
        figure(
            "Use of capacity",
            "How full each tier was, in-flight bytes included where the tier counts them."
            + (f" Not shown, since they do not tell: {silent}." if silent else ""),
            plots.use_over_time(samples, tiers),
            ((name, color) for name, color in keys.items() if name in reporting),
        ),
    ]
    taken = quantity(len(samples), "sample")
    about = f"{taken} of the counters, taken between steps, so that they count in no step's time."
    return section("During the run", about, element("div", *shown, class_="plots"))


def _reasons(run: Run, report: ReplayReport) -> Html:
    parts = []
    for counter, title, meanings in _REASONS:
        counts = [
            (name, labels, count)
            for name, tier in report.tiers.items()
            for labels, count in flat_counts(tier.counters.get(counter, {}))
            if count
        ]
        counts.sort(key=lambda each: -each[2])
        rows = [
            [
                name,
                run.scrub(" ".join(labels)),
                f"{count:,}",
                bar(count / counts[0][2]),
                meanings.get(labels[-1], ""),
            ]
            for name, labels, count in counts
        ]
        is_counted = counter != "misses_total" or any(counter in tier.counters for tier in report.tiers.values())
        none = element("p", "None." if is_counted else "This stack did not count the reasons of its misses.")
        columns = ["tier", "reason", "blocks", "", "what it means"]
        shown = table(columns, rows, texts=[0, 1, 3, 4]) if rows else none
        parts.append(card(element("h3", title), shown))
    about = "Each tier counts its own blocks, so a block that two tiers did not have is counted in both."
    return section("Misses, skips and failures", about, *parts)


def _settings(report: ReplayReport, settings: ReplaySettings) -> list[tuple[str, str]]:
    return [
        ("requests at once", f"{settings.concurrency:,}"),
        ("longest wait of a request for its blocks", f"{settings.request_timeout_s:g} s"),
        ("blocks left by an earlier run that the first request hit", f"{report.first_request_hits:,}"),
        ("requests that waited too long", f"{report.timed_out_requests:,}"),
    ]
