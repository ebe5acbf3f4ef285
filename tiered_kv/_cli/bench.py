"""`tiered-kv bench`: throughput and lookup latency of each secondary tier."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from tiered_kv._cli.arguments import describe_use, positive_int
from tiered_kv._cli.measuring import add_report_argument, start_report, write_report
from tiered_kv._cli.output import Status, print_json, print_table, print_text, progress, quantity
from tiered_kv._cli.report.figures import draw, shown_us
from tiered_kv._cli.report.page import (
    INK,
    SURFACE,
    Html,
    Run,
    card,
    figure,
    page,
    plots,
    section,
    table,
    tier_color,
)
from tiered_kv._cli.stacks import (
    OWN_MODEL,
    add_stack_arguments,
    chosen_tiers,
    held_log,
    operated_stack,
    purge_own,
    tier_error_text,
)
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.stack import open_tier, shut_down
from tiered_kv.stack_config import StackConfig
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.workload.bench import BenchSettings, TierBench, bench_tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROUND_BYTES = 256 << 20
"""Default size of a round."""
_BAR: Final = 0.36
_ROOM: Final = 1.05
_RING: Final[dict[str, Any]] = {"color": SURFACE, "markeredgecolor": INK}  # Any: as matplotlib has it
_DIRECTIONS: Final = {"store": tier_color(0), "load": tier_color(1)}
_COLUMNS: Final = ("tier", "store GB/s", "load GB/s", "cores busy", "lookup (p99)", "wrong")
_LIMITS: Final = (
    "Cores that this process kept busy while it stored, and loaded, say what limits a rate: from about 1 on, the "
    "processor (checksums, codecs, copies); well below, the storage, or other programs that use the processor."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Store new blocks in each tier, look them up, load them back and check every byte. The blocks have keys "
        "of their own and stay until the tier drops them as its oldest; in a full tier they take the place of "
        "blocks * rounds of yours. The stack must not be open elsewhere if a tier needs it alone (nvme does)."
    )
    describe_use(
        parser,
        ("tiered-kv bench stack.yaml", "every secondary tier, one after the other"),
        ("tiered-kv bench stack.yaml --tier nvme --batch 8 --rounds 5", "one tier, by small jobs"),
        ("tiered-kv bench stack.yaml --report bench.html", "a page with plots, too"),
        found="a block came back with a wrong byte, or a tier stored or loaded nothing",
    )
    add_stack_arguments(parser)
    parser.add_argument("--tier", metavar="NAME", help="measure this tier only")
    parser.add_argument(
        "--blocks", metavar="N", type=positive_int, help="blocks in a round (default: 256 MiB of blocks)"
    )
    parser.add_argument(
        "--batch", metavar="N", type=positive_int, default=32, help="blocks in a job (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", metavar="N", type=positive_int, default=3, help="repetitions (default: %(default)s)"
    )
    add_report_argument(parser)


def run(args: argparse.Namespace) -> Status:
    stack = operated_stack(args)
    config = stack.to_open()
    tiers = chosen_tiers(config, args.tier)
    if not tiers:
        raise ConfigError("the stack has no secondary tier to measure", location="secondary")
    blocks = args.blocks or max(args.batch, _ROUND_BYTES // config.block.bytes)
    settings = BenchSettings(blocks=blocks, batch=args.batch, rounds=args.rounds)
    reported = start_report(args, config)
    results: list[TierBench] = []
    with progress("rounds", len(tiers) * settings.rounds) as advance:

        def on_round(rounds: int) -> None:
            advance(len(results) * settings.rounds + rounds)

        for tier in tiers:
            advance(len(results) * settings.rounds, f"measuring {tier.name}")
            with held_log() as drop_log:
                results.append(_bench(config, tier, settings, on_round))
                if results[-1].error:
                    drop_log()
    if args.json:
        print_json({"tiers": [_fields(result) for result in results]})
    else:
        _show(args.stack, results, settings)
    if reported is not None:
        write_report(args, lambda: _page(reported, results, settings))
    return Status.OK if all(result.ok for result in results) else Status.FOUND


def _bench(
    config: StackConfig,
    settings: TierSettings,
    bench: BenchSettings,
    on_round: Callable[[int], None],
) -> TierBench:
    opened: list[SecondaryTierManager] = []
    with closing(PrimaryRegion(bench.blocks, config.block.bytes)) as region:
        try:
            opened.append(open_tier(config, settings, region.kv_view))
            result = bench_tier(opened[0], settings.name, region.kv_view, bench, on_round=on_round)
            if not result.is_measured:
                opened[0].describe()  # which raises if it knows why
                result.error = "no block was stored and loaded back"
        except Exception as error:  # a third-party tier may raise anything
            result = TierBench(settings.name, settings.type, config.block.bytes, bench.batch, bench.blocks)
            result.error = tier_error_text(error, settings)
        finally:
            shut_down(opened, config)
            if config.namespace.model == OWN_MODEL:
                purge_own(config, [settings])
        return result


def _fields(result: TierBench) -> dict[str, object]:
    unmeasured = {} if result.is_measured else dict.fromkeys(("store_gb_per_s", "load_gb_per_s", "lookup_us"))
    return {**asdict(result), **unmeasured}


def _show(stack: str, results: list[TierBench], settings: BenchSettings) -> None:
    size = format_bytes(results[0].block_bytes)
    title = f"{stack}: {settings.blocks:,} blocks of {size}, {settings.batch} to a job"
    print_table(_COLUMNS, _rows(results), title=title)
    for line in [*_sentences(results, settings), *_remarks(results)]:
        print_text(line)


def _page(run: Run, results: Sequence[TierBench], settings: BenchSettings) -> str:
    """Return the page of a bench."""
    return page(
        run,
        kind="Bench report",
        heading=f"The secondary tiers of {run.stack_name}",
        lede=" ".join(_sentences(results, settings)) or "No tier could be measured.",
        notes=_remarks(results),
        sections=[_speed(results)],
        settings=[
            ("blocks of a round, and of a job", f"{settings.blocks:,}, {settings.batch:,}"),
            ("longest time of a direction of a round", f"{settings.timeout_s:g} s"),
        ],
    )


def _rows(results: Sequence[TierBench]) -> list[list[str]]:
    """Return the rows of `_COLUMNS`, one for each tier."""
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


def _remarks(results: Sequence[TierBench]) -> Iterator[str]:
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


def _sentences(results: Sequence[TierBench], settings: BenchSettings) -> list[str]:
    """Return what was measured, for the terminal and the page."""
    if not any(each.is_measured for each in results):
        return []
    written = rounded_bytes(settings.blocks * settings.rounds * results[0].block_bytes)
    rounds = quantity(settings.rounds, "round")
    return [f"Medians (and spreads) of {rounds}; each tier was given {written} of new blocks. {_LIMITS}"]


def _speed(results: Sequence[TierBench]) -> Html:
    measured = [each for each in results if each.is_measured]
    spread = "The median of the rounds, and each round as a ring. A wide spread says that something disturbed them."
    drawn = [figure("Throughput", spread, _throughput(measured), _DIRECTIONS.items())] if measured else []
    about = (
        "Rates are of the blocks that succeeded, from the first submission to the last report, of one tier after the "
        "other, without the manager. Every loaded block was compared byte by byte. 1 GB is 1e9 bytes."
    )
    return section(
        "How fast each tier is",
        about,
        card(table(_COLUMNS, _rows(results))),
        plots(*drawn),
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
