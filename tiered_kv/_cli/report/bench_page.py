"""The page of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tiered_kv._cli.report import figures, page
from tiered_kv._cli.report.figures import Html, card, draw, element, shown_us, table
from tiered_kv._cli.report.page import Run, figure, quantity, section, tile
from tiered_kv.config.units import rounded_bytes
from tiered_kv.workload.bench import BenchSettings, TierBench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR: Final = 0.36
_ROOM: Final = 1.05
_RING: Final[dict[str, Any]] = {"color": figures.SURFACE, "markeredgecolor": figures.INK}  # Any: as matplotlib has it
_DIRECTIONS: Final = {"store": figures.tier_color(0), "load": figures.tier_color(1)}
BENCH_COLUMNS: Final = ("tier", "store GB/s", "load GB/s", "cores busy", "lookup (p99)", "wrong")
BENCH_LIMITS: Final = (
    "Cores that this process kept busy while it stored, and loaded, say what limits a rate: from about 1 on, the "
    "processor (checksums, codecs, copies); well below, the storage, or other programs that use the processor."
)


def bench_page(run: Run, results: Sequence[TierBench], settings: BenchSettings) -> str:
    """Return the page of a bench."""
    return page.page(
        run,
        kind="Bench report",
        heading=f"The secondary tiers of {run.stack_name}",
        lede=" ".join(bench_sentences(results, settings)) or "No tier could be measured.",
        notes=bench_remarks(results),
        tiles=_tiles([each for each in results if each.is_measured]),
        sections=[_speed(results)],
        settings=[
            ("blocks of a round, and of a job", f"{settings.blocks:,}, {settings.batch:,}"),
            ("longest time of a direction of a round", f"{settings.timeout_s:g} s"),
        ],
    )


def bench_rows(results: Sequence[TierBench]) -> list[list[str]]:
    """Return the rows of `BENCH_COLUMNS`, one for each tier."""
    return [
        [
            each.name if each.name == each.type else f"{each.name} ({each.type})",
            *(_rate(_rounds(each, direction)) if each.is_measured else "-" for direction in _DIRECTIONS),
            " / ".join(_cores(each, direction) for direction in _DIRECTIONS) if each.is_measured else "-",
            f"{shown_us(each.lookup_us.p50)} ({shown_us(each.lookup_us.p99)})" if each.is_measured else "-",
            f"{each.corrupt_blocks:,}" if each.is_measured else "-",
        ]
        for each in results
    ]


def bench_remarks(results: Sequence[TierBench]) -> Iterator[str]:
    """Yield a sentence for each kind of failure."""
    for each in results:
        if each.error:
            yield f"{each.name} FAILED: {each.error}"
        if each.corrupt_blocks:
            yield f"CORRUPT: {quantity(each.corrupt_blocks, 'block')} came back from {each.name} with other bytes"
        if each.failed_stores or each.failed_loads:
            reasons = ", ".join(f"{reason} {jobs:,}" for reason, jobs in each.reasons.items())
            yield (
                f"{each.name}: {each.failed_stores:,} blocks not stored, {each.failed_loads:,} not loaded"
                f" (jobs by reason: {reasons}); the rates are of the blocks that succeeded"
            )


def bench_sentences(results: Sequence[TierBench], settings: BenchSettings) -> list[str]:
    """Return what was measured, for the terminal and the page."""
    if not any(each.is_measured for each in results):
        return []
    written = rounded_bytes(settings.blocks * settings.rounds * results[0].block_bytes)
    rounds = quantity(settings.rounds, "round")
    return [f"Medians (and spreads) of {rounds}; each tier was given {written} of new blocks. {BENCH_LIMITS}"]


def _tiles(results: Sequence[TierBench]) -> Iterator[Html]:
    if not results:
        return
    fastest = "" if len(results) == 1 else "fastest "
    for direction in _DIRECTIONS:
        best = max(results, key=lambda each: median(_rounds(each, direction)))
        name = f"{fastest}{direction}: {best.name}, with {_cores(best, direction)} cores busy"
        yield tile(_gb(median(_rounds(best, direction))), "GB/s", name)
    quick = min(results, key=lambda each: each.lookup_us.p99)
    yield tile(shown_us(quick.lookup_us.p99), "", f"{fastest}lookup (99th percentile): {quick.name}")
    corrupt = sum(each.corrupt_blocks for each in results)
    yield tile(f"{sum(each.verified_blocks for each in results):,}", "", "blocks loaded and right")
    yield tile(f"{corrupt:,}", "", "blocks loaded and wrong", is_bad=corrupt > 0)


def _speed(results: Sequence[TierBench]) -> Html:
    measured = [each for each in results if each.is_measured]
    spread = "The median of the rounds, and each round as a ring. A wide spread says that something disturbed them."
    plots = [figure("Throughput", spread, _throughput(measured), _DIRECTIONS.items())] if measured else []
    about = (
        "Rates are of the blocks that succeeded, from the first submission to the last report, of one tier after the "
        "other, without the manager. Every loaded block was compared byte by byte. 1 GB is 1e9 bytes."
    )
    return section(
        "How fast each tier is",
        about,
        card(table(BENCH_COLUMNS, bench_rows(results))),
        element("div", *plots, class_="plots"),
    )


def _throughput(results: Sequence[TierBench]) -> Html:
    def plot(axes: Axes) -> None:
        for row, result in enumerate(results):
            for side, (direction, color) in zip((-1, 1), _DIRECTIONS.items(), strict=True):
                rounds, place = _rounds(result, direction), row + side * _BAR / 2
                axes.barh(place, median(rounds), height=_BAR * 0.9, color=color)
                axes.plot(rounds, [place] * len(rounds), "o", **_RING, markersize=4)
        axes.set_xlim(0, _ROOM * max(axes.get_xlim()[1], 1e-3))
        axes.set_xlabel("GB/s")
        axes.set_yticks(range(len(results)), [each.name for each in results])
        axes.set_ylim(len(results) - 0.4, -0.6)
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")

    height_in = 0.9 + 0.45 * len(results)
    return draw("bench", "Store and load throughput of each tier", plot, height_in=height_in)


def _cores(result: TierBench, direction: str) -> str:
    return f"{median(getattr(each, f'{direction}_cores') for each in result.rounds):.1f}"


def _rounds(result: TierBench, direction: str) -> list[float]:
    return [getattr(each, f"{direction}_gb_per_s") for each in result.rounds]


def _rate(rounds: Sequence[float]) -> str:
    least, most = (f"{each:.2g}" if each < 10 else f"{each:.0f}" for each in (min(rounds), max(rounds)))
    spread = f" ({least}-{most})" if len(rounds) > 1 else ""
    return _gb(median(rounds)) + spread


def _gb(rate: float) -> str:
    return f"{rate:.2f}" if rate >= 1 else f"{rate:.3f}"
