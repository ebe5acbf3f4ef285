"""`tiered-kv top`: what a running stack does now, tier by tier."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Final

from tiered_kv._cli.answer import StatusAnswer, read_status
from tiered_kv._cli.arguments import describe_use, interval
from tiered_kv._cli.ask import DEFAULT_ADDRESS, Address, address_of, fetch
from tiered_kv._cli.live import Sight, Watcher
from tiered_kv._cli.output import Status, print_json, print_table, print_text, progress
from tiered_kv.config.units import rounded_seconds
from tiered_kv.errors import TierUnavailableError

_INTERVAL_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a running stack does: hits, throughput, use and breaker of each tier, why blocks are missed or not "
        "stored, and the last events. It asks the process that has the stack open, which needs 'metrics' in the "
        "stack's file. It opens no tier, and changes nothing. Ctrl-C ends it.\n\n"
        "Where standard output is no terminal, it prints a table for each interval."
    )
    parser.add_argument(
        "where",
        metavar="URL|STACK",
        nargs="?",
        default=f"http://{DEFAULT_ADDRESS}",
        help="http://HOST:PORT, HOST:PORT, or the stack's YAML file, which has the address (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show one interval and end; status 1 if a tier is out of use"
    )
    parser.add_argument(
        "--interval", metavar="TIME", type=interval, default=_INTERVAL_S, help="time from one look to the next (2s)"
    )
    describe_use(
        parser,
        ("tiered-kv top", "what serves on this machine, at the usual port"),
        ("tiered-kv top stack.yaml --interval 5s", "the stack of this file"),
        ("tiered-kv top http://10.0.0.7:9464 --once --json", "one answer for a script"),
        found="with --once or --json: a tier is disabled, or its breaker is not closed",
    )


def run(args: argparse.Namespace) -> Status:
    address = address_of(args.where)
    watcher = Watcher(lambda: _ask(address))
    if args.once or args.json:
        return _once(watcher, address, args)
    _end_by_signals()
    try:
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
            _draw(watcher, address, args.interval)
        else:
            _print(watcher, args.interval)
    except KeyboardInterrupt:  # the usual end
        pass
    return Status.INTERRUPTED


def _ask(address: Address) -> StatusAnswer:
    return read_status(fetch(address, "/status"))


def _once(watcher: Watcher, address: Address, args: argparse.Namespace) -> Status:
    """Show one interval; raise TierUnavailableError without an answer."""
    with progress(f"looking twice in {rounded_seconds(args.interval)}", None):
        first = watcher.look()
        if not first.error:
            time.sleep(args.interval)
        sight = first if first.error else watcher.look()
    if sight.view is None or sight.error:
        raise TierUnavailableError(f"{address}: {sight.error}; is the stack open there, with 'metrics' in its file?")
    if args.json:
        print_json({"url": str(address), **asdict(sight.view)})
    else:
        _print_sight(sight, args.interval, notices_s=float("inf"))
    return Status.FOUND if sight.view.has_problem else Status.OK


def _draw(watcher: Watcher, address: Address, interval_s: float) -> None:
    """Draw on the terminal's alternate screen."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from tiered_kv._cli.top_view import screen

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may have characters that the terminal's encoding lacks
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        live.update(Text(f"asking {address}"), refresh=True)
        while True:
            next_s = time.monotonic() + interval_s
            live.update(screen(watcher.look(), str(address), interval_s, console), refresh=True)
            time.sleep(max(0.0, next_s - time.monotonic()))


def _print(watcher: Watcher, interval_s: float) -> None:
    """Print a table for each interval, with the events since the previous table."""
    printed_s = time.monotonic() - interval_s
    while True:
        sight, now_s = watcher.look(), time.monotonic()
        _print_sight(sight, interval_s, notices_s=now_s - printed_s)
        printed_s = now_s
        sys.stdout.flush()
        time.sleep(max(0.0, now_s + interval_s - time.monotonic()))


def _print_sight(sight: Sight, interval_s: float, *, notices_s: float) -> None:
    from tiered_kv._cli.top_view import headline, notice_lines, plain_rows, reason_lines

    view = sight.view
    print_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {headline(sight, interval_s).plain}")
    if view is None or sight.error:
        return
    columns, rows = plain_rows(view)
    print_table(columns, rows)
    recent = [notice for notice in view.notices if notice.age_s <= notices_s]
    for line in [*reason_lines(view), *notice_lines(recent)]:
        print_text(line)


def _end_by_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that the terminal is restored."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as after `nohup`
            signal.signal(number, end)
