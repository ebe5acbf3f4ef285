"""The page of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from tiered_kv.config.units import format_bytes
from tiered_kv.observe.report import figures, page
from tiered_kv.observe.report.figures import draw
from tiered_kv.observe.report.markup import Html, element, table
from tiered_kv.observe.report.page import Run, Tile, counted, figure, legend, section
from tiered_kv.workload.bench import BenchSettings, Round, TierBench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR: Final = 0.36
_ROOM: Final = 1.05
_LEAST_US: Final = 0.1
"""Shorter lookups are drawn here: a logarithmic scale has no 0."""
_RING: Final[dict[str, Any]] = {"color": figures.SURFACE, "markeredgecolor": figures.INK}  # Any: as matplotlib has it
_DIRECTIONS: Final = {
    "store": (figures.ACCENT, "var(--accent)"),
    "load": (figures.tier_color(0), figures.tier_variable(0)),
}


def bench_page(run: Run, results: Sequence[TierBench], settings: BenchSettings) -> str:
    """Return the page of a bench: what was run, each tier's result, and how the tiers were measured."""
    corrupt = sum(each.corrupt_blocks for each in results)
    wrong = page.note(f"CORRUPT: {counted(corrupt, 'block')} came back with other bytes", is_bad=True)
    return page.page(
        run,
        kind="Bench report",
        heading=f"The secondary tiers of {run.stack_name}",
        lede=_measured(results, settings),
        notes=[wrong] if corrupt else [],
        tiles=_tiles(results),
        sections=[_speed(results), _failures(results), page.conditions(run, _settings(settings))],
    )


def _measured(results: Sequence[TierBench], settings: BenchSettings) -> str:
    """Return the sentences that state what was measured."""
    block_bytes = results[0].block_bytes
    return (
        f"{counted(len(results), 'tier')} stored, found and loaded {counted(settings.blocks, 'new block')} of "
        f"{format_bytes(block_bytes)} in each of {counted(settings.rounds, 'round')}, one tier after the other, "
        f"each alone and without the manager in front of it. {counted(settings.batch, 'block')} made a job, and all "
        "jobs of a direction were submitted at once. Every loaded block was compared with what had been stored, "
        "byte by byte."
    )


def _tiles(results: Sequence[TierBench]) -> Iterator[Tile]:
    store = max(results, key=lambda each: each.store_gb_per_s)
    load = max(results, key=lambda each: each.load_gb_per_s)
    lookup = min(results, key=lambda each: each.lookup_us.p99)
    corrupt = sum(each.corrupt_blocks for each in results)
    fastest = "" if len(results) == 1 else "fastest "
    yield Tile(f"{store.store_gb_per_s:.2f}", "GB/s", f"{fastest}store: {store.name}")
    yield Tile(f"{load.load_gb_per_s:.2f}", "GB/s", f"{fastest}load: {load.name}")
    yield Tile(f"{lookup.lookup_us.p99:,.3g}", "us", f"{fastest}lookup (99th percentile): {lookup.name}")
    yield Tile(f"{sum(each.verified_blocks for each in results):,}", "", "blocks loaded and right")
    yield Tile(f"{corrupt:,}", "", "blocks loaded and wrong", is_bad=corrupt > 0)


def _speed(results: Sequence[TierBench]) -> Html:
    columns = [
        "tier",
        "type",
        "store (GB/s)",
        "load (GB/s)",
        "lookup p50 (us)",
        "lookup p99 (us)",
        "lookup max (us)",
        "right",
        "wrong",
    ]
    rows = [
        [
            each.name,
            each.type,
            f"{each.store_gb_per_s:.2f}",
            f"{each.load_gb_per_s:.2f}",
            *(f"{value:,.1f}" for value in (each.lookup_us.p50, each.lookup_us.p99, each.lookup_us.max)),
            f"{each.verified_blocks:,}",
            f"{each.corrupt_blocks:,}",
        ]
        for each in results
    ]
    plots = [
        figure(
            "Throughput",
            "The median of the rounds, and each round as a ring. A wide spread says that something disturbed them.",
            _throughput(results),
            legend((name, variable) for name, (_, variable) in _DIRECTIONS.items()),
        ),
        figure(
            "Time of a lookup",
            "From asking for one key to its answer: the median (dot), the 99th percentile (end of the line) and the "
            "longest (ring), on a logarithmic scale.",
            _lookups(results),
        ),
    ]
    about = "Rates are of the blocks that succeeded, from the first submission to the last report; 1 GB is 1e9 bytes."
    return section(
        "How fast each tier is",
        about,
        element("div", table(columns, rows, numbers=range(2, len(columns))), class_="card"),
        element("div", *plots, class_="plots below"),
    )


def _throughput(results: Sequence[TierBench]) -> Html:
    def plot(axes: Axes) -> None:
        for row, result in enumerate(results):
            for side, (name, (color, _)) in zip((-1, 1), _DIRECTIONS.items(), strict=True):
                rounds = [_rate(each, name) for each in result.rounds]
                place = row + side * _BAR / 2
                axes.barh(place, getattr(result, f"{name}_gb_per_s"), height=_BAR * 0.9, color=color)
                axes.plot(rounds, [place] * len(rounds), "o", **_RING, markersize=4)
        axes.set_xlim(0, _ROOM * max(axes.get_xlim()[1], 1e-3))
        axes.set_xlabel("GB/s")
        _rows(axes, results)

    return draw("bench", "Store and load throughput of each tier", plot, height_in=_height_in(results))


def _lookups(results: Sequence[TierBench]) -> Html:
    def plot(axes: Axes) -> None:
        axes.set_xscale("log")
        for row, result in enumerate(results):
            lookup = result.lookup_us
            p50, p99, longest = (max(value, _LEAST_US) for value in (lookup.p50, lookup.p99, lookup.max))
            axes.plot([p50, p99], [row, row], color=figures.ACCENT, linewidth=4, solid_capstyle="round")
            axes.plot([p50], [row], "o", color=figures.INK, markersize=7)
            axes.plot([longest], [row], "o", **_RING, markersize=6)
        axes.margins(x=0.08)
        figures.plain_log(axes.xaxis)
        axes.set_xlabel("time of a lookup (us)")
        _rows(axes, results)

    return draw("lookups", "Time of a lookup in each tier", plot, height_in=_height_in(results))


def _rate(each: Round, direction: str) -> float:
    return each.store_gb_per_s if direction == "store" else each.load_gb_per_s


def _rows(axes: Axes, results: Sequence[TierBench]) -> None:
    axes.set_yticks(range(len(results)), [each.name for each in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")


def _height_in(results: Sequence[TierBench]) -> float:
    return 0.9 + 0.45 * len(results)


def _failures(results: Sequence[TierBench]) -> Html:
    about = "A tier that refuses or loses blocks is measured with those that succeeded."
    rows = [
        [each.name, f"{each.failed_stores:,}", f"{each.failed_loads:,}", _reasons(each)]
        for each in results
        if each.failed_stores or each.failed_loads
    ]
    columns = ["tier", "blocks not stored", "stored and not loaded", "jobs that failed, by the tier's own word"]
    content = table(columns, rows, numbers=[1, 2]) if rows else element("p", "Every block was stored and loaded.")
    return section("Failures", about, element("div", content, class_="card"))


def _reasons(result: TierBench) -> str:
    return ", ".join(f"{reason}: {jobs:,}" for reason, jobs in result.reasons.items())


def _settings(settings: BenchSettings) -> list[tuple[str, str]]:
    return [
        ("blocks in a round", f"{settings.blocks:,}"),
        ("blocks in a job", f"{settings.batch:,}"),
        ("rounds", f"{settings.rounds:,}"),
        ("longest time of a direction of a round", f"{settings.timeout_s:g} s"),
    ]
