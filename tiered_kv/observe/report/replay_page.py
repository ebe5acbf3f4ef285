"""The page of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tiered_kv.config.stack_config import PRIMARY_TIER_NAME
from tiered_kv.config.units import format_bytes
from tiered_kv.counters import flat_counts
from tiered_kv.observe.report import page, plots, words
from tiered_kv.observe.report.figures import tier_variable
from tiered_kv.observe.report.markup import Html, bar, element, joined, table
from tiered_kv.observe.report.page import Run, Tile, counted, figure, legend, section
from tiered_kv.observe.report.samples import Sampler
from tiered_kv.workload.replay import ReplaySettings
from tiered_kv.workload.tally import GB, ReplayReport

_COUNTERS_MAX: Final = 500
"""Of a tier; a stranger's may have any number."""
_MISSED: Final = "missed"
_MISS_COLOR: Final = "var(--miss)"
_BREAKER_STATES: Final = (
    ("closed (in use)", "var(--good)"),
    ("half open (probing)", "var(--warn)"),
    ("open (left alone)", "var(--bad)"),
)


def replay_page(
    run: Run, report: ReplayReport, sampler: Sampler, settings: ReplaySettings, workload: str, remarks: Iterable[str]
) -> str:
    """Return the page of a replay.

    Args:
        run: What was run, where.
        report: Its outcome.
        sampler: What was sampled meanwhile.
        settings: How requests were driven.
        workload: What was replayed, for people.
        remarks: What a reader must not miss, a sentence each.
    """
    return page.page(
        run,
        kind="Replay report",
        heading=f"{workload[:1].upper()}{workload[1:]} through {run.stack_name}",
        lede=_measured(report, settings),
        notes=[page.note(run.told(text), is_bad=text.startswith("CORRUPT")) for text in remarks],
        tiles=_tiles(report),
        sections=[
            _origin(report),
            _course(report, sampler),
            _reasons(report),
            _counters(report),
            page.conditions(run, _settings(report, settings)),
        ],
    )


def _measured(report: ReplayReport, settings: ReplaySettings) -> str:
    """Return the sentences that state what was measured."""
    tiers = len(report.tiers)
    return (
        f"In {report.seconds:,.1f} s, {counted(report.requests, 'request')} asked for "
        f"{counted(report.blocks, 'block')} of {format_bytes(report.block_bytes)}, in order and as fast as the stack "
        f"took them, at most {settings.concurrency} at once. {counted(tiers, 'tier')} gave {report.hit_rate:.1%} of "
        "the blocks. Every block that came back was compared with what had been stored, byte by byte: "
        f"{report.verified_blocks:,} were right, {report.corrupt_blocks:,} were wrong. No model was run: the time is "
        "that of storing, finding and loading blocks."
    )


def _tiles(report: ReplayReport) -> Iterator[Tile]:
    stored = sum(tier.store_gb_per_s for tier in report.tiers.values())
    loaded = sum(tier.load_gb_per_s for tier in report.tiers.values())
    yield Tile(f"{100 * report.hit_rate:.1f}", "%", "of blocks were hits")
    yield Tile(_short(report.blocks - report.misses), "", "blocks loaded by requests")
    yield Tile(_short(report.misses), "", "blocks missed")
    yield Tile(f"{report.step_us.p99:,.0f}", "us", "99th percentile of a step")
    yield Tile(f"{stored:.2f}", "GB/s", "stored, all tiers")
    yield Tile(f"{loaded:.2f}", "GB/s", "loaded, all tiers")
    yield Tile(f"{report.corrupt_blocks:,}", "", "wrong blocks", is_bad=report.corrupt_blocks > 0)


def _origin(report: ReplayReport) -> Html:
    """Where blocks came from, and what each tier moved, over the whole run."""
    shares = [(name, tier.hits, tier_variable(index)) for index, (name, tier) in enumerate(report.tiers.items())]
    shares.append((_MISSED, report.misses, _MISS_COLOR))
    whole = [
        element("span", style=f"flex: {blocks} 0 0; background: {color}", title=f"{name}: {blocks:,} blocks")
        for name, blocks, color in shares
        if blocks
    ]
    rows = [
        [
            joined([page.color_key(color), name]),
            f"{blocks:,}",
            _share(blocks, report.blocks),
            *_moved(report, name),
        ]
        for name, blocks, color in shares
    ]
    columns = ["tier", "blocks", "share", "stored (GB)", "stored (GB/s)", "loaded (GB)", "loaded (GB/s)"]
    about = (
        "Each block that a request asked for is counted once: for the tier that had it, or as missed. A request's "
        "first absent block and all blocks after it are missed. Rates are averages over the run; 1 GB is 1e9 bytes."
    )
    parts = [element("div", *whole, class_="whole"), table(columns, rows, numbers=range(1, len(columns)))]
    return section("Where blocks came from", about, element("div", *parts, class_="card"))


def _moved(report: ReplayReport, name: str) -> list[str]:
    if name not in report.tiers:
        return ["", "", "", ""]
    tier = report.tiers[name]
    return [
        f"{tier.stored_bytes / GB:.2f}",
        f"{tier.store_gb_per_s:.2f}",
        f"{tier.loaded_bytes / GB:.2f}",
        f"{tier.load_gb_per_s:.2f}",
    ]


def _course(report: ReplayReport, sampler: Sampler) -> Html:
    """How it went over time."""
    tiers, samples = list(report.tiers), sampler.samples
    secondary = [name for name in tiers if name != PRIMARY_TIER_NAME]
    keys = {name: tier_variable(index) for index, name in enumerate(tiers)}
    telling = [(name, color) for name, color in keys.items() if plots.tells_use(samples, name)]
    step = report.step_us
    figures = [
        figure(
            "Hits by tier",
            "The share of blocks that each tier gave, from the first request to the last.",
            plots.hits_over_requests(samples, tiers),
            legend([*keys.items(), (_MISSED, _MISS_COLOR)]),
        ),
        figure(
            "Throughput",
            "Bytes that each tier stored (above) and loaded (below). For cpu, those that requests stored and loaded.",
            plots.throughput(samples, tiers),
            legend(keys.items()),
        ),
        figure(
            "Time of a step",
            f"What {counted(report.steps, 'step')} spent inside the manager, all requests of a step together. "
            f"Half took at most {step.p50:,.0f} us, 99 of 100 at most {step.p99:,.0f} us.",
            plots.step_distribution(sampler.step_s),
        ),
        figure(
            "Time of a step during the run",
            "The median and the 99th percentile of the steps in each moment of the run.",
            plots.steps_over_time(samples, sampler.step_s),
            legend([("99th percentile", "var(--ink)"), ("median", "var(--accent)")]),
        ),
        figure(
            "Use of capacity",
            _use_caption(sampler, tiers),
            plots.use_over_time(samples, tiers),
            legend(telling),
        ),
    ]
    if secondary:
        figures.append(
            figure(
                "Skipped and failed blocks",
                "Blocks whose store was not made (above), and whose store or load failed (below), a second. "
                "The reasons are further down.",
                plots.trouble(samples, tiers),
                legend(keys.items()),
            )
        )
        figures.append(
            figure(
                "Breakers",
                "A breaker opens after many failures in a row; then its tier is left alone until a probe succeeds.",
                plots.breakers_over_time(samples, secondary),
                legend(_BREAKER_STATES),
                is_wide=True,
            )
        )
    about = (
        f"{counted(len(samples), 'sample')} of the counters, taken between steps, so that they count in no step's time."
    )
    return section("During the run", about, element("div", *figures, class_="plots"))


def _use_caption(sampler: Sampler, tiers: Sequence[str]) -> str:
    silent = [name for name in tiers if not plots.tells_use(sampler.samples, name)]
    caption = "How full each tier was, in-flight bytes included where the tier counts them."
    return f"{caption} Not shown, since they do not tell: {', '.join(silent)}." if silent else caption


def _reasons(report: ReplayReport) -> Html:
    """Why blocks did not come, were not stored, or failed on the way."""
    about = "Each tier counts its own blocks, so a block that two tiers did not have is counted in both."
    missed = _by_reason(report, "misses_total")
    parts = [
        _reason_table("Misses", "blocks that were asked for and did not come from the tier", missed, words.MISSES)
        if missed or _is_counted(report, "misses_total")
        else element("p", "This stack did not count the reasons of its misses.", class_="about"),
        _reason_table(
            "Stores that were skipped",
            "blocks that were not offered to the tier",
            _by_reason(report, "skipped_blocks_total"),
            words.SKIPS,
        ),
        _reason_table(
            "Transfers that failed",
            "blocks that a job did not store or load",
            _by_reason(report, "failed_blocks_total"),
            words.FAILURES,
        ),
    ]
    return section("Misses, skips and failures", about, *parts)


def _is_counted(report: ReplayReport, counter: str) -> bool:
    return any(counter in tier.counters for tier in report.tiers.values())


def _by_reason(report: ReplayReport, counter: str) -> list[tuple[str, tuple[str, ...], int]]:
    """Return each count of a labelled counter that is not 0 with its tier and labels, the greatest first."""
    found = []
    for name, tier in report.tiers.items():
        counts: Any = tier.counters.get(counter)
        if isinstance(counts, Mapping):
            found += [(name, labels, count) for labels, count in flat_counts(counts) if count]
    return sorted(found, key=lambda each: -each[2])


def _reason_table(
    title: str, about: str, counts: Sequence[tuple[str, tuple[str, ...], int]], meanings: Mapping[str, str]
) -> Html:
    head = element("h3", f"{title}: {about}")
    if not counts:
        return element("div", head, element("p", "None.", class_="about"), class_="card")
    greatest = counts[0][2]
    rows = [
        [
            tier,
            " ".join(labels).replace("_", " "),
            f"{count:,}",
            bar(count / greatest),
            meanings.get(labels[-1], ""),
        ]
        for tier, labels, count in counts
    ]
    return element(
        "div", head, table(["tier", "reason", "blocks", "", "what it means"], rows, numbers=[2]), class_="card"
    )


def _counters(report: ReplayReport) -> Html:
    """All that was counted, for those who look for one number: closed at first."""
    tiers = []
    for name, tier in report.tiers.items():
        counts = [(path, count) for path, count in flat_counts(tier.counters) if "buckets" not in path]
        rows = [
            [", ".join(path), f"{count:,}" if isinstance(count, (int, float)) else str(count)] for path, count in counts
        ]
        shown = table(["counter, and its labels", "at the end"], rows[:_COUNTERS_MAX], numbers=[1])
        tiers.append(element("details", element("summary", f"{name}: {len(counts)} counters"), shown, class_="card"))
    return section("All counters", "What each of them means is in the reference of counters.", *tiers)


def _settings(report: ReplayReport, settings: ReplaySettings) -> list[tuple[str, str]]:
    return [
        ("duration", f"{report.seconds:,.1f} s, until the last stores had ended"),
        ("requests at once", str(settings.concurrency)),
        ("longest wait of a request for its blocks", f"{settings.request_timeout_s:g} s"),
        ("steps", f"{report.steps:,}"),
        ("blocks left by an earlier run that the first request hit", f"{report.first_request_hits:,}"),
        ("requests that waited too long", f"{report.timed_out_requests:,}"),
    ]


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return "< 0.1%" if 0 < part < whole / 1000 else f"{part / whole:.1%}"


def _short(count: int) -> str:
    """Return a number that fits a tile."""
    for unit, scale in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if count >= scale:
            return f"{count / (1000 if unit == 'k' else scale):,.4g} {unit}"
    return f"{count:,}"
