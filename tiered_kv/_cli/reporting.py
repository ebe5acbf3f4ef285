"""The option `--report` of the verbs that measure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import UTC, datetime

from tiered_kv._cli.arguments import file_path
from tiered_kv._cli.output import print_text, progress
from tiered_kv._cli.report.figures import require_matplotlib
from tiered_kv._cli.report.page import Run
from tiered_kv.errors import ConfigError
from tiered_kv.stack_config import StackConfig


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", metavar="FILE", type=file_path, help="write a page with plots to this HTML file (extra: report)"
    )


def start_report(args: argparse.Namespace, config: StackConfig | None) -> Run | None:
    """Return the run that begins now, for its page; None without `--report`.

    Raises:
        ConfigError: The page cannot be drawn or written. The user learns this before the run, not after it.
    """
    path = args.report
    if path is None:
        return None
    require_matplotlib()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"the page cannot be written to '{path}'", location="--report")
    return Run(args.stack or "", args.given, config, datetime.now(UTC))


def write_report(args: argparse.Namespace, draw: Callable[[], str]) -> None:
    """Draw the page and write it to the file of `--report`."""
    with progress("drawing the page", None):
        page = draw()
    try:
        args.report.write_text(page, encoding="utf-8", errors="backslashreplace")  # file names may have any bytes
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to '{args.report}': {error.strerror}", location="--report"
        ) from error
    if not args.json:
        print_text(f"page with plots: {args.report}")
