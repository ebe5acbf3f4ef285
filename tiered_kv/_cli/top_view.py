"""How `tiered-kv top` shows a stack: a screen for a terminal, lines of text for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiered_kv.config.units import rounded_bytes, rounded_seconds
from tiered_kv.observe.live import NoticeView, ReasonView, Sight, TierView, View

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
_BAR_MIN: Final = 6
_BAR_MAX: Final = 30
_NAME_MAX: Final = 20
_REASONS_MIN: Final = 3
_REASON_LINES_MAX: Final = 8
_WIDE: Final = 10_000
_BUDGET_WARNING: Final = 0.9
"""A store or load budget that is used up by this share is about to turn blocks away."""


def screen(sight: Sight, where: str, interval_s: float, console: Console) -> RenderableType:
    """Return what fills a terminal of the console's size: the most important first, the rest as far as it fits."""
    view = sight.view
    title = Text("tiered-kv top", style="bold", no_wrap=True, overflow="ellipsis")
    if view is not None:
        title.append(f"  {view.version}  up {rounded_seconds(view.uptime_seconds)}  pid {view.pid}", style="not bold")
    parts: list[RenderableType] = [title.append(f"  {where}", style="not bold dim"), headline(sight, interval_s)]
    if view is None:
        return Group(*parts, Text("Ctrl-C ends", style="dim"))
    left = console.height - len(parts) - 4
    tiers, notices = view.tiers[: max(1, left)], view.notices
    parts += ["", _tier_table(tiers, console, "dim" if sight.trouble else "")]
    left -= len(tiers)
    reasons_max = max(_REASONS_MIN, left - 4 - min(len(notices), max(3, left // 3)))
    reasons = view.reasons[:reasons_max] if left >= _REASONS_MIN + 2 else ()
    if reasons:
        parts += ["", _reason_table(reasons, len(view.reasons), console)]
        left -= len(reasons) + 2
    if notices and left >= 3:
        parts += ["", Text("last events", style="bold"), *map(_notice, notices[: left - 2])]
    return Group(*parts)


def headline(sight: Sight, interval_s: float) -> Text:
    """Return what is going on in all, or that there is no answer, as a line."""
    view = sight.view
    if view is None or sight.trouble:
        since = f" for {rounded_seconds(sight.lost_s)}" if sight.lost_s >= 1 else ""
        lost = f"NO ANSWER{since}: {sight.trouble}; asking again every {rounded_seconds(interval_s)}"
        return Text(lost, style="bold white on red", no_wrap=True, overflow="ellipsis")
    hits = number(sum(tier.hits_per_s for tier in view.tiers))
    share = f"{hits} blocks/s" if view.hit_share is None else f"{view.hit_share:.1%}"
    asked = "" if view.hit_share is None else f" of {number(view.asked_blocks_per_s or 0.0)} blocks/s"
    step = "" if view.step_p99_seconds is None else f"  step p99 {rounded_seconds(view.step_p99_seconds)}"
    over = "since it was opened" if view.is_since_start else f"over {rounded_seconds(round(view.interval_seconds, 1))}"
    text = Text("hits ", no_wrap=True, overflow="ellipsis")
    text.append(share, style="bold")
    text.append(f"{asked}  restored {number(view.restored_tokens_per_s)} tokens/s{step}")
    return text.append(f"  {over}", style="dim")


def reason_lines(view: View) -> Iterator[str]:
    """Yield the biggest reasons, a line each."""
    for reason in view.reasons[:_REASON_LINES_MAX]:
        yield (
            f"{reason.tier}: {_KINDS[reason.what]}: {reason.reason} {number(reason.blocks_per_s)} blocks/s,"
            f" {reason.blocks_total:,} since the stack was opened"
        )


def plain_rows(view: View) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the tiers, without bars."""
    heads = [head.replace("\n", " ") for head in _COLUMNS]
    return heads, [[tier.name, *(cell(tier).plain for cell in [*_COLUMNS.values()][1:])] for tier in view.tiers]


def notice_lines(notices: Sequence[NoticeView]) -> list[str]:
    """Return notices as lines, the latest last."""
    return [_notice(notice).plain for notice in reversed(notices)]


def number(count: float) -> str:
    """Return a count in at most five characters: 12345 is "12.3k"."""
    if 0 < count < 10:
        return f"{count:.1f}" if count >= 0.05 else "<0.1"
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit and count < 100 else f"{count:.0f}{unit}"
        count /= 1000
    return ">999P"


def _tier_table(tiers: Sequence[TierView], console: Console, style: str) -> Table:
    """Return the columns that fit; the last one is a bar of the capacity in use, if there is room."""
    optional = ["load\nbudget", "store\nbudget", "load\np99", "hit\n%"]
    columns = dict(_COLUMNS)
    while (left := console.width - _width(_table(columns, tiers, 0, style), console)) < 0 and optional:
        del columns[optional.pop(0)]
    return _table(columns, tiers, min(_BAR_MAX, left - 1) if left > _BAR_MIN else 0, style)


def _table(columns: _Columns, tiers: Sequence[TierView], bar: int, style: str) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True, header_style="bold", style=style
    )
    for head in columns:
        is_number = head not in ("tier", "breaker")
        table.add_column(head, justify="right" if is_number else "left", no_wrap=True, vertical="bottom")
    if bar:
        table.add_column(width=bar)
    for tier in tiers:
        share = _share(tier.used_bytes, tier.capacity_bytes)
        shown = [_bar(share, bar)] if bar and share is not None else []
        table.add_row(*(cell(tier) for cell in columns.values()), *shown)
    return table


def _width(table: Table, console: Console) -> int:
    """Return how wide a table is where nothing is cut off."""
    return console.measure(table, options=console.options.update(max_width=_WIDE)).maximum


def _name(tier: str) -> Text:
    """Return a name, without its middle where it is long: the ends of names differ most."""
    half = _NAME_MAX // 2
    return Text(tier if len(tier) <= _NAME_MAX else f"{tier[: half - 1]}…{tier[-half:]}")


def _gb(bytes_per_s: float) -> Text:
    gb = bytes_per_s / 1e9
    return Text("0" if gb == 0 else "<0.01" if gb < 0.005 else f"{gb:.2f}" if gb < 100 else number(gb))


def _share(used: int | None, limit: int | None) -> float | None:
    return min(1.0, used / limit) if used is not None and limit else None


def _capacity(tier: TierView) -> Text:
    """Return how full a tier is. A cache is meant to be full, so nothing warns here."""
    share = _share(tier.used_bytes, tier.capacity_bytes)
    if share is not None:
        return Text(f"{share:.0%}")
    return Text("-" if tier.used_bytes is None else rounded_bytes(tier.used_bytes))


def _budget(used: int | None, limit: int | None) -> Text:
    share = _share(used, limit)
    return Text("-") if share is None else Text(f"{share:.0%}", style="red" if share >= _BUDGET_WARNING else "")


def _bar(share: float, width: int) -> ProgressBar:
    return ProgressBar(1.0, share, width, complete_style="cyan", finished_style="cyan", style="dim")


def _state(tier: TierView) -> Text:
    return Text("DISABLED", style="bold red") if tier.is_disabled else Text(*_STATES[tier.breaker])


_Columns = dict[str, Callable[[TierView], Text]]
_COLUMNS: Final[_Columns] = {
    "tier": lambda tier: _name(tier.name),
    "hits\n/s": lambda tier: Text(number(tier.hits_per_s)),
    "hit\n%": lambda tier: Text("-" if tier.hit_share is None else f"{tier.hit_share * 100:.0f}"),
    "load\nGB/s": lambda tier: _gb(tier.load_bytes_per_s),
    "store\nGB/s": lambda tier: _gb(tier.store_bytes_per_s),
    "load\np99": lambda tier: Text("-" if tier.load_p99_seconds is None else rounded_seconds(tier.load_p99_seconds)),
    "store\nbudget": lambda tier: _budget(tier.store_budget_used_bytes, tier.store_budget_bytes),
    "load\nbudget": lambda tier: _budget(tier.load_budget_used_bytes, tier.load_budget_bytes),
    "breaker": _state,
    "used": _capacity,
}


def _reason_table(reasons: Sequence[ReasonView], count: int, console: Console) -> Table:
    """Return the biggest reasons, each with a bar as long as it is large beside the biggest, if there is room."""
    more = f"and {count - len(reasons)} smaller" if count > len(reasons) else ""
    biggest = max(each.blocks_per_s for each in reasons)

    def table(bar: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for name in ("misses and skips", "tier", "reason"):
            table.add_column(name, no_wrap=True, max_width=24)
        table.add_column("blocks/s", justify="right")
        table.add_column("in all", justify="right")
        if bar:
            table.add_column(Text(more, style="not bold dim"), width=bar, no_wrap=True)
        for each in reasons:
            cells = [Text(_KINDS.get(each.what, f"{each.what} failed")), _name(each.tier), Text(each.reason)]
            counts = [number(each.blocks_per_s), number(each.blocks_total)]
            bars = [_bar(each.blocks_per_s / biggest, bar)] if bar and biggest else []
            table.add_row(*cells, *counts, *bars, style="" if each.blocks_per_s else "dim")
        return table

    left = console.width - _width(table(0), console) - 1
    return table(min(_BAR_MAX, left) if left >= max(_BAR_MIN, len(more)) else 0)


def _notice(notice: NoticeView) -> Text:
    age = rounded_seconds(max(1.0, round(notice.age_s)))
    text = Text(f"{age:>6} ago  ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(f"{_name(notice.tier)}  ", style="not dim bold")
    return text.append(notice.what, style="not dim")
