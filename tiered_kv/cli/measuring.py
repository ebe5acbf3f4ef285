"""The options that `replay` and `simulate` share: the requests, by a trace or built-in chats, and `--report`.

Both verbs call it on the main thread. What must stay true: wrong options are a `ConfigError` before the run, not after.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice

from tiered_kv.cli.arguments import file_path, positive_int
from tiered_kv.cli.output import print_text, progress, quantity
from tiered_kv.cli.report.figures import require_matplotlib
from tiered_kv.cli.report.page import Run
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import ChatWorkload, Request, hints_from_sessions
from tiered_kv.workload.trace import read_trace

_US_PER_S = 1e6
_CHAT_OPTIONS = {
    "seed": "chooses the chats; another seed shares no block with this one",
    "chats": "chats in all",
    "turns": "requests in a chat",
    "active_chats": "chats that are going on at once",
    "turn_blocks": "blocks that a turn appends, on average",
    "system_prompts": "distinct system prompts",
    "system_blocks": "blocks of a system prompt",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, with a title for tables, a description for JSON, and their greatest number if it is known."""

    title: str
    described: dict[str, object]
    requests: Iterator[Request]
    total: int | None


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=file_path,
        help="requests of a trace (file or folder); without it, built-in chats",
    )
    parser.add_argument(
        "--time-unit",
        choices=("ms", "s"),
        help="of the trace's times (default: that of its form, mostly ms)",
    )
    parser.add_argument(
        "--requests", metavar="N", type=positive_int, help="stop after this many requests, or when there are no more"
    )
    parser.add_argument(
        "--hints",
        choices=("from-trace", "from-sessions", "none"),
        default="from-trace",
        help="from-sessions: each request says roughly when its session returns, or that it ends (default: from-trace)",
    )
    chats = parser.add_argument_group("built-in chats", "multi-turn chats that share system prompts")
    for name, about in _CHAT_OPTIONS.items():
        default = getattr(ChatWorkload(), name)
        about = f"{about} (default: {default})"
        chats.add_argument(f"--{name.replace('_', '-')}", metavar="N", type=int, help=about)


def chosen_workload(args: argparse.Namespace) -> Workload:
    """Return the requests that the options choose; raise ConfigError if options contradict each other."""
    workload = _chosen_requests(args)
    if args.hints == "from-sessions":
        workload.described["hints"] = args.hints
        return replace(workload, requests=_hinted(workload.requests), title=f"{workload.title}, with hints")
    if args.hints == "none":
        return replace(workload, requests=(replace(request, hints=None) for request in workload.requests))
    return workload


def _hinted(requests: Iterator[Request]) -> Iterator[Request]:
    yield from hints_from_sessions(list(requests))


def _chosen_requests(args: argparse.Namespace) -> Workload:
    chat_options = {name: getattr(args, name) for name in _CHAT_OPTIONS if getattr(args, name) is not None}
    if args.trace is not None:
        if chat_options:
            raise ConfigError(f"--{next(iter(chat_options)).replace('_', '-')} is for built-in chats, not with --trace")
        requests = _counted(
            read_trace(args.trace, requests_max=args.requests, time_unit=args.time_unit or ""), args.requests
        )
        return Workload(f"trace {args.trace}", {"trace": str(args.trace)}, requests, args.requests)
    if args.time_unit is not None:
        raise ConfigError("--time-unit is that of a trace: give --trace")
    try:
        chats = ChatWorkload(**chat_options)
    except ConfigError as error:
        raise ConfigError(error.message, location=f"--{error.location.replace('_', '-')}") from error
    total = min(chats.requests_total, args.requests or chats.requests_total)
    if total < (args.requests or 0):
        _note_fewer(f"{chats.chats:,} chats of {chats.turns} turns are", total, args.requests, "; --chats makes more")
    title = f"{chats.chats:,} built-in chats of {chats.turns} turns, seed {chats.seed}"
    return Workload(title, {"chats": asdict(chats)}, islice(chats.requests(), total), total)


def _counted(requests: Iterator[Request], asked: int | None) -> Iterator[Request]:
    """Yield the requests of a trace. At its end, print a note if it had fewer requests than `asked`."""
    count = 0
    for request in requests:
        count += 1
        yield request
    if count < (asked or 0):
        _note_fewer("the trace has", count, asked or 0)


def _note_fewer(what: str, found: int, asked: int, advice: str = "") -> None:
    print_text(f"note: {what} {quantity(found, 'request')}, fewer than --requests {asked}{advice}", sys.stderr)


def shown_us(microseconds: float) -> str:
    """Return a time in the unit that fits it: 1787 is "1.79ms"."""
    return rounded_seconds(microseconds / _US_PER_S) if microseconds >= 1 else f"{microseconds:.2g}us"


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
    why = errno.EISDIR if path.is_dir() else 0 if path.parent.is_dir() else errno.ENOENT
    if not why and not os.access(path if path.exists() else path.parent, os.W_OK):
        why = errno.EACCES
    if why:
        raise ConfigError(f"the page cannot be written to '{path}': {os.strerror(why)}", location="--report")
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
