"""The option `--report` of the verbs that measure."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from tiered_kv._cli.output import print_text
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.observe.report.page import Run, check_target, write_page


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write a page with plots to this HTML file (extra: report)"
    )


def write_report(args: argparse.Namespace, page: str) -> None:
    """Write the page to its file, and say so to people.

    Raises:
        ConfigError: It cannot be written.
    """
    write_page(args.report, page)
    if not args.json:
        print_text(f"page with plots: {args.report}")


def begun_report(args: argparse.Namespace, config: StackConfig) -> Run | None:
    """Return what a page will say of the run that begins now; None where none is wanted.

    Raises:
        ConfigError: The page cannot be made or written; better known before the run than after it.
    """
    if args.report is None:
        return None
    check_target(args.report)
    return Run(args.stack, args.given, config, datetime.now(UTC))
