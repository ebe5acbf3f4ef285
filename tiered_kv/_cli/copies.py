"""`tiered-kv bench --gpu`: how fast blocks are copied between a GPU and the primary tier."""

from __future__ import annotations

import argparse

from tiered_kv._cli.output import Status, print_json, print_table, print_text, progress
from tiered_kv.config.units import format_bytes, rounded_bytes
from tiered_kv.worker.rates import (
    DEFAULT_BYTES,
    NUM_JOBS,
    NUM_LAYERS,
    PAGES_BYTES,
    CopyRates,
    device_name,
    measure_copies,
)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--gpu` to the verb's arguments."""
    parser.add_argument(
        "--gpu",
        metavar="DEVICE",
        nargs="?",
        const="cuda",
        choices=["cuda", "cpu"],
        help="measure copies to and from this device: cuda (the default), or cpu for copies within the CPU's memory",
    )


def run(args: argparse.Namespace) -> Status:
    """Measure and print."""
    if args.stack is not None or args.tier is not None:
        args.parser.error("--gpu measures no stack: leave STACK and --tier out")
    device = device_name(args.gpu)
    with progress("sizes", len(PAGES_BYTES)) as advance:
        results: list[CopyRates] = []
        for page_bytes in PAGES_BYTES:
            results += measure_copies(args.gpu, pages_bytes=[page_bytes], total_bytes=DEFAULT_BYTES, rounds=args.rounds)
            advance(len(results))
    if args.json:
        print_json({"device": device, "copies": [result.as_json() for result in results]})
        return Status.OK
    print_table(
        ["page", "store GB/s", "plain", "ratio", "load GB/s", "plain", "ratio"],
        [_row(result) for result in results],
        title=f"{device}: {rounded_bytes(DEFAULT_BYTES)} in {NUM_JOBS} jobs, scattered pages of {NUM_LAYERS} layers",
    )
    rounds = f"{args.rounds} rounds" if args.rounds > 1 else "1 round"
    print_text(f"Medians of {rounds}; plain is the best round of one contiguous copy of as many bytes.")
    return Status.OK


def _row(result: CopyRates) -> list[str]:
    return [
        format_bytes(result.page_bytes),
        f"{result.store_gb_per_s:.2f}",
        f"{result.plain_store_gb_per_s:.2f}",
        f"{result.store_ratio:.2f}",
        f"{result.load_gb_per_s:.2f}",
        f"{result.plain_load_gb_per_s:.2f}",
        f"{result.load_ratio:.2f}",
    ]
