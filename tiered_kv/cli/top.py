"""`tiered-kv top`: what a running stack does now, tier by tier, on a screen or as lines of text.

`main` calls `run` on the main thread, which asks, draws and waits for a key in turn. What must stay true: it changes
nothing in the stack, and restores the terminal at each end.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiered_kv.cli.arguments import describe_use, interval
from tiered_kv.cli.ask import DEFAULT_ADDRESS, StackStatus, View, fetch, read_status, token_of, url_of, view_of
from tiered_kv.cli.output import Status, print_json, print_text, progress
from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.errors import TieredKVError, TierUnavailableError

_INTERVAL_S: Final = 2.0
_STATES: Final = {
    "closed": ("closed", ""),
    "half_open": ("half", "yellow"),
    "open": ("OPEN", "bold red"),
    "": ("-", "dim"),
}
_KINDS: Final = {
    "miss": "missed",
    "unexplained": "not counted",
    "skip": "not stored",
    "load": "load failed",
    "store": "store failed",
}
_TABLE_WIDTH_MAX: Final = 110
_NAME_MAX: Final = 24
_REASONS_MAX: Final = 10
_NOTICES_MAX: Final = 5
_OWN_MAX: Final = 100
_OWN_NAME_MAX: Final = 40
_BUDGET_WARNING: Final = 0.9
"""The used share of a budget from which it is red: blocks are about to be skipped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what a running stack does: hits, throughput, use and breaker of each tier, why blocks are missed or not "
        "stored, and the last events. It asks the process that has the stack open, which needs 'metrics' in the "
        "stack's file. It opens no tier, and changes nothing. The key q ends it.\n\n"
        "Where standard output is no terminal, it shows one interval and ends, as with --once."
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
    parser.add_argument("--own", action="store_true", help="show also what the tiers count themselves")
    describe_use(
        parser,
        ("tiered-kv top", "what serves on this machine, at the usual port"),
        ("tiered-kv top stack.yaml --interval 5s", "the stack of this file"),
        ("tiered-kv top http://10.0.0.7:9464 --once --json", "one answer for a script"),
        found="with --once or --json: a tier is disabled, taken out or not open, or its breaker is not closed",
    )


def run(args: argparse.Namespace) -> Status:
    url, headers = url_of(args.where), token_of(args.where)

    def ask() -> StackStatus:
        return read_status(fetch(url, "/status", headers=headers))

    can_draw = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if args.once or args.json or not can_draw:
        return _once(ask, url, args)
    for each in (signal.SIGTERM, signal.SIGHUP):  # the handler raises an exception, so that the terminal is restored
        signal.signal(each, lambda signum, _: sys.exit(128 + signum))
    with suppress(KeyboardInterrupt):
        _draw(ask, url, args.interval, shows_own=args.own)
        return Status.OK
    return Status.INTERRUPTED


def _once(ask: Callable[[], StackStatus], where: str, args: argparse.Namespace) -> Status:
    """Show one interval; raise TierUnavailableError without an answer."""
    try:
        with progress(f"looking twice in {rounded_seconds(args.interval)}", None):
            before = ask()
            time.sleep(args.interval)
            view = view_of(before, ask())
    except TieredKVError as error:
        raise TierUnavailableError(f"{where}: {error}; is the stack open there, with 'metrics' in its file?") from error
    if args.json:
        print_json({"url": where, **view})
    else:
        width = min(_TABLE_WIDTH_MAX, shutil.get_terminal_size().columns) if sys.stdout.isatty() else _TABLE_WIDTH_MAX
        console = _console(width=width, color_system=None, force_terminal=False)
        print_text(time.strftime("%Y-%m-%d %H:%M:%S"))
        console.print(screen(view, "", where, console, shows_own=args.own))
    has_problem = any(
        tier["is_disabled"] or tier["removal"] or tier["breaker"] not in ("", "closed") for tier in view["tiers"]
    )
    return Status.FOUND if has_problem else Status.OK


def _draw(ask: Callable[[], StackStatus], where: str, interval_s: float, *, shows_own: bool) -> None:
    """Draw on the terminal's alternate screen until somebody presses q."""
    console = _console()
    last: StackStatus | None = None
    view: View | None = None
    error = lost_at = ""
    with (
        ExitStack() as undo,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        if _has_keys():
            undo.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, termios.tcgetattr(sys.stdin))
            tty.setcbreak(sys.stdin)  # keys come at once, and are not shown
        live.update(Text(f"asking {where}"), refresh=True)
        while True:
            next_s = time.monotonic() + interval_s
            try:
                now = ask()
                view, last, error, lost_at = view_of(last, now), now, "", ""
            except TieredKVError as problem:
                lost_at = lost_at or time.strftime("%H:%M:%S")
                error = f"NO ANSWER since {lost_at}: {problem}; again in {rounded_seconds(interval_s)}"
            live.update(screen(view, error, where, console, shows_own=shows_own), refresh=True)
            if _is_ended(next_s):
                return


def _is_ended(until_s: float) -> bool:
    """Wait until a time of `time.monotonic`; return True as soon as q is pressed, or the terminal has gone."""
    keys = [sys.stdin] if _has_keys() else []
    while select.select(keys, [], [], max(0.0, until_s - time.monotonic()))[0]:  # once, too, if the answer took longer
        if os.read(sys.stdin.fileno(), 1) in (b"q", b""):
            return True
    return False


def _has_keys() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _console(**settings: Any) -> Console:  # Any: rich's
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a name may have characters that the output's encoding lacks
    return Console(**settings)


def screen(view: View | None, error: str, where: str, console: Console, *, shows_own: bool = False) -> RenderableType:
    """Return the screen, with the most important part first; `error` is the error of the last request, or ""."""
    title = Text("tiered-kv top", style="bold", no_wrap=True, overflow="ellipsis")
    if view is not None:
        title.append(
            f"  {view['version']}  up {rounded_seconds(view['uptime_seconds'])}  pid {view['pid']}", style="not bold"
        )
    title.append(f"  {where}{'  q ends' if console.is_terminal else ''}", style="not bold dim")
    lost = Text(error, style="bold white on red", no_wrap=True, overflow="ellipsis")
    if view is None:
        return Group(title, lost)
    parts: list[RenderableType] = [title, lost if error else _headline(view)]
    parts += ["", _tier_table(view["tiers"], "dim" if error else "")]
    if noted := [tier for tier in view["tiers"] if tier["note"]]:
        parts += ["", *(Text.assemble((tier["name"], "bold"), f"  {tier['note']}") for tier in noted)]
    if view["reasons"]:
        parts += ["", _reason_table(view["reasons"])]
    if shows_own:
        parts += ["", _own_table(view["tiers"])]
    if notices := view["notices"][:_NOTICES_MAX]:
        parts += ["", Text("last events", style="bold"), *map(_notice, notices)]
    return Group(*parts)


def _headline(view: View) -> Text:
    hits = number(sum(tier["hits_per_s"] for tier in view["tiers"]))
    share = f"{hits} blocks/s" if view["hit_share"] is None else f"{view['hit_share']:.1%}"
    asked = "" if view["hit_share"] is None else f" of {number(view['asked_blocks_per_s'] or 0.0)} blocks/s"
    step = "" if view["step_p99_seconds"] is None else f"  step p99 {rounded_seconds(view['step_p99_seconds'])}"
    over = f"over {rounded_seconds(round(view['interval_seconds'], 1))}"
    text = Text("hits ", no_wrap=True, overflow="ellipsis")
    text.append(share, style="bold")
    text.append(f"{asked}  restored {number(view['restored_tokens_per_s'])} tokens/s{step}")
    return text.append(f"  {'since it was opened' if view['is_since_start'] else over}", style="dim")


def number(count: float) -> str:
    """Return a count in at most five characters: 12345 is "12.3k"."""
    if 0 < count < 10:
        return f"{count:.1f}" if count >= 0.05 else "<0.1"
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit and count < 100 else f"{count:.0f}{unit}"
        count /= 1000
    return ">999P"


def _tier_table(tiers: Sequence[View], style: str) -> Table:
    table = _table(style)
    for head in _COLUMNS:
        is_text = head in ("tier", "breaker")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != "tier", vertical="bottom")
    for tier in tiers:
        table.add_row(*(cell(tier) for cell in _COLUMNS.values()))
    return table


def _table(style: str = "") -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", style=style)


def _name(tier: str) -> Text:
    """Return a tier's name, which is cut if the terminal has no room for all columns."""
    return Text(tier if len(tier) <= _NAME_MAX else f"{tier[: _NAME_MAX - 1]}…", no_wrap=True, overflow="ellipsis")


def _gb(bytes_per_s: float) -> Text:
    gb = bytes_per_s / 1e9
    return Text("0" if gb == 0 else "<0.01" if gb < 0.005 else f"{gb:.2f}" if gb < 100 else number(gb))


def _share(used: int | None, limit: int | None) -> float | None:
    return min(1.0, used / limit) if used is not None and limit else None


def _capacity(tier: View) -> Text:
    """Return how full a tier is. A cache is meant to be full, so nothing warns here."""
    share = _share(tier["used_bytes"], tier["capacity_bytes"])
    if share is not None:
        return Text(f"{share:.0%}")
    return Text("-" if tier["used_bytes"] is None else rounded_bytes(tier["used_bytes"]))


def _budget(used: int | None, limit: int | None) -> Text:
    share = _share(used, limit)
    return Text("-") if share is None else Text(f"{share:.0%}", style="red" if share >= _BUDGET_WARNING else "")


_Columns = dict[str, Callable[[View], Text]]
_COLUMNS: Final[_Columns] = {
    "tier": lambda tier: _name(tier["name"]),
    "hits\n/s": lambda tier: Text(number(tier["hits_per_s"])),
    "hit\n%": lambda tier: Text("-" if tier["hit_share"] is None else f"{tier['hit_share'] * 100:.0f}"),
    "load\nGB/s": lambda tier: _gb(tier["load_bytes_per_s"]),
    "store\nGB/s": lambda tier: _gb(tier["store_bytes_per_s"]),
    "load\np99": lambda tier: Text(
        "-" if tier["load_p99_seconds"] is None else rounded_seconds(tier["load_p99_seconds"])
    ),
    "store\nbudget": lambda tier: _budget(tier["store_budget_used_bytes"], tier["store_budget_bytes"]),
    "load\nbudget": lambda tier: _budget(tier["load_budget_used_bytes"], tier["load_budget_bytes"]),
    "breaker": lambda tier: _state(tier),
    "used": _capacity,
}


def _state(tier: View) -> Text:
    if tier["is_disabled"]:
        return Text("DISABLED", "bold red")
    return Text(tier["removal"].upper(), "bold red") if tier["removal"] else Text(*_STATES[tier["breaker"]])


def _reason_table(reasons: Sequence[View]) -> Table:
    table = _table()
    for name in ("misses and skips", "tier", "reason"):
        table.add_column(name, no_wrap=True, max_width=_NAME_MAX)
    table.add_column("blocks/s", justify="right")
    table.add_column("in all", justify="right")
    for each in reasons[:_REASONS_MAX]:
        cells = [Text(_KINDS.get(each["what"], f"{each['what']} failed")), _name(each["tier"]), Text(each["reason"])]
        counts = [number(each["blocks_per_s"]), number(each["blocks_total"])]
        table.add_row(*cells, *counts, style="" if each["blocks_per_s"] else "dim")
    if len(reasons) > _REASONS_MAX:
        table.add_row(f"and {len(reasons) - _REASONS_MAX} smaller", style="dim")
    return table


def _own_table(tiers: Sequence[View]) -> Table:
    """Return a table of the metrics that the tiers count themselves, and their types declare."""
    table = _table()
    for name in ("tiers' own counters", "tier", "labels"):
        table.add_column(name, no_wrap=True, max_width=_OWN_NAME_MAX)
    table.add_column("/s", justify="right")
    table.add_column("value", justify="right")
    rows = [(tier["name"], own) for tier in tiers for own in tier["own"]]
    for tier, own in rows[:_OWN_MAX]:
        labels = Text(" ".join(own["labels"].values()), no_wrap=True, overflow="ellipsis")
        rate = "" if own["per_s"] is None else number(own["per_s"])
        table.add_row(Text(own["name"]), _name(tier), labels, rate, number(own["value"]))
    if len(rows) > _OWN_MAX:
        table.add_row(f"and {len(rows) - _OWN_MAX} more", style="dim")
    return table


def _notice(notice: View) -> Text:
    age = rounded_seconds(max(1.0, round(notice["age_s"])))
    text = Text(f"{age:>6} ago  ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(f"{_name(notice['tier'])}  ", style="not dim bold")
    return text.append(notice["what"], style="not dim")
