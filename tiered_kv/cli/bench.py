"""`tiered-kv bench`: throughput and lookup latency of each secondary tier.

`main` calls `run` on the main thread, which opens, measures and closes one tier after the other, each with a region of
its own. What must stay true: a tier that fails is reported, and the others are measured all the same. Blocks in the
command's own namespace are deleted at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from statistics import median
from typing import Final

from tiered_kv.cli.arguments import describe_use, positive_int
from tiered_kv.cli.measuring import shown_us
from tiered_kv.cli.output import Status, print_json, print_table, print_text, progress, quantity
from tiered_kv.cli.stacks import (
    OWN_MODEL,
    add_stack_arguments,
    chosen_tiers,
    held_log,
    operated_stack,
    own_config,
    purge_own,
    tier_error_text,
)
from tiered_kv.config.settings import TierSettings
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.errors import ConfigError
from tiered_kv.stack.open import open_tier, shut_down
from tiered_kv.tiering.base import SecondaryTierManager
from tiered_kv.workload.bench import BenchSettings, TierBench, bench_tier

_ROUND_BYTES = 256 << 20
"""Bytes of blocks in a round by default."""
_DIRECTIONS: Final = ("store", "load")
_COLUMNS: Final = ("tier", "store GB/s", "load GB/s", "cores busy", "lookup (p99)", "wrong")
_PURGE_S: Final = 300.0  # for thousands of blocks: some servers of objects take 20 ms to delete one
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


def run(args: argparse.Namespace) -> Status:
    stack = operated_stack(args)
    config = stack.to_open()
    tiers = chosen_tiers(config, args.tier)
    if not tiers:
        raise ConfigError("the stack has no secondary tier to measure", location="secondary")
    blocks = args.blocks or max(args.batch, _ROUND_BYTES // config.block.bytes)
    settings = BenchSettings(blocks=blocks, batch=args.batch, rounds=args.rounds)
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
                opened[0].describe()  # raises an error if the tier knows why
                result.error = "no block was stored and loaded back"
        except Exception as error:  # a third-party tier may raise anything
            result = TierBench(settings.name, settings.type, config.block.bytes, bench.batch, bench.blocks)
            result.error = tier_error_text(error, settings)
        finally:
            shut_down(opened, config)
            left = purge_own(config, [settings], _PURGE_S) if config.namespace.model == OWN_MODEL else {}
        if result.is_measured and (why := left.get(settings.name)):
            result.left = (
                f"{why}; delete them by: tiered-kv purge --namespace {own_config(config).identity.digest.hex()}"
            )
        return result


def _fields(result: TierBench) -> dict[str, object]:
    unmeasured = {} if result.is_measured else dict.fromkeys(("store_gb_per_s", "load_gb_per_s", "lookup_us"))
    return {**asdict(result), **unmeasured}


def _show(stack: str, results: list[TierBench], settings: BenchSettings) -> None:
    size = format_bytes(results[0].block_bytes)
    title = f"{stack}: {quantity(settings.blocks, 'block')} of {size}, {settings.batch:,} to a job"
    print_table(_COLUMNS, _rows(results), title=title)
    if any(each.is_measured for each in results):
        written = rounded_bytes(settings.blocks * settings.rounds * results[0].block_bytes)
        rounds = quantity(settings.rounds, "round")
        print_text(f"Medians (and spreads) of {rounds}; each tier was given {written} of new blocks. {_LIMITS}")
    for line in _remarks(results):
        print_text(line)


def _rows(results: Sequence[TierBench]) -> list[list[str]]:
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
    for each in results:
        if each.error:
            yield f"{each.name} FAILED: {each.error}"
        if each.left:
            yield f"{each.name}: blocks of this command are left: {each.left}"
        if each.corrupt_blocks:
            yield f"CORRUPT: {quantity(each.corrupt_blocks, 'block')} came back from {each.name} with other bytes"
        if each.failed_stores or each.failed_loads:
            reasons = ", ".join(f"{reason} {jobs:,}" for reason, jobs in each.reasons.items())
            yield (
                f"{each.name}: {each.failed_stores:,} blocks not stored, {each.failed_loads:,} not loaded"
                f" (jobs by reason: {reasons}); the rates are of the blocks that succeeded"
            )


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
