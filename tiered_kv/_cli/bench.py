"""`tiered-kv bench`: throughput and lookup latency of each secondary tier."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from tiered_kv._cli.arguments import describe_use, positive_int
from tiered_kv._cli.measuring import add_report_argument, start_report, write_report
from tiered_kv._cli.output import Status, print_json, print_table, print_text, progress
from tiered_kv._cli.report.bench_page import BENCH_COLUMNS, bench_page, bench_remarks, bench_rows, bench_sentences
from tiered_kv._cli.report.page import Run
from tiered_kv._cli.stacks import OWN_MODEL, add_stack_arguments, held_log, operated_stack, purge_own, tier_error_text
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.units import format_bytes
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.stack import open_tier, shut_down
from tiered_kv.stack_config import StackConfig
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.workload.bench import BenchSettings, TierBench, bench_tier

_ROUND_BYTES = 256 << 20
"""Default size of a round."""


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
    tiers = _chosen(config, args.tier)
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
                results.append(_bench(config, tier, settings, reported, on_round))
                if results[-1].error:
                    drop_log()
    if args.json:
        print_json({"tiers": [_fields(result) for result in results]})
    else:
        _show(args.stack, results, settings)
    if reported is not None:
        write_report(args, lambda: bench_page(reported, results, settings))
    return Status.OK if all(result.ok for result in results) else Status.FOUND


def _chosen(config: StackConfig, name: str | None) -> list[TierSettings]:
    names = ", ".join(tier.name for tier in config.secondary)
    if not names:
        raise ConfigError("the stack has no secondary tier to measure", location="secondary")
    tiers = [tier for tier in config.secondary if name in (None, tier.name)]
    if not tiers:
        raise ConfigError(f"the stack has no secondary tier '{name}'; it has {names}", location="--tier")
    return tiers


def _bench(
    config: StackConfig,
    settings: TierSettings,
    bench: BenchSettings,
    reported: Run | None,
    on_round: Callable[[int], None],
) -> TierBench:
    opened: list[SecondaryTierManager] = []
    with closing(PrimaryRegion(bench.blocks, config.block.bytes)) as region:
        try:
            opened.append(open_tier(config, settings, region.kv_view))
            if reported is not None:
                reported.note_tiers([settings.name], opened)
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
    print_table(BENCH_COLUMNS, bench_rows(results), title=title)
    for line in [*bench_sentences(results, settings), *bench_remarks(results)]:
        print_text(line)
