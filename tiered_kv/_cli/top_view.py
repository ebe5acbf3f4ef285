"""How `tiered-kv top` shows a stack: a screen for a terminal, lines of text for everything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiered_kv.config.units import rounded_bytes
from tiered_kv.observe.answer import NoticeAnswer
from tiered_kv.observe.live import ReasonView, Sight, TierView, View

_STATES: Final = {
    "closed": ("closed", ""),
    "half_open": ("half", "yellow"),
    "open": ("OPEN", "bold red"),
    "": ("-", "dim"),
}
_KINDS: Final = {"miss": "missed", "skip": "not stored", "load": "load failed", "store": "store failed"}
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_REASON_BAR_MAX: Final = 30
_NAME_MAX: Final = 20
_REASONS_MIN: Final = 3
_BUDGET_WARNING: Final = 0.9
"""A store or load budget that is used up by this share is about to turn blocks away."""


def screen(sight: Sight, where: str, interval_s: float, console: Console) -> RenderableType:
    """Return what fills a terminal of the console's size: the most important first, the rest as far as it fits."""
    width, height = console.size
    can_draw = (console.encoding or "").lower().startswith("utf")
    parts: list[RenderableType] = list(_head(sight, where, interval_s))
    view = sight.view
    if view is None:
        return Group(*parts, Text("Ctrl-C ends", style="dim"))
    tiers_max = max(1, height - len(parts) - 4)
    parts += ["", _tier_table(view, width, tiers_max, can_draw, is_old=bool(sight.trouble))]
    left = height - len(parts) - 2 - min(len(view.tiers), tiers_max)
    reasons_max = max(_REASONS_MIN, left - 2 - min(len(view.notices), max(3, left // 3)) - 2)
    reasons = view.reasons[:reasons_max] if left >= _REASONS_MIN + 2 else ()
    if reasons:
        parts += ["", _reason_table(reasons, len(view.reasons), width, can_draw)]
        left -= len(reasons) + 2
    if view.notices and left >= 3:
        parts += ["", Text("last events", style="bold"), *map(_notice, _grouped(view.notices)[: left - 3])]
    return Group(*parts)


def headline(sight: Sight, interval_s: float) -> str:
    """Return what is going on in all, or that there is no answer, as a line."""
    if sight.view is None or sight.trouble:
        return _lost(sight, interval_s)
    return _totals(sight.view).plain


def reason_lines(view: View, reasons_max: int = 8) -> Iterator[str]:
    """Yield the biggest reasons, a line each."""
    for reason in view.reasons[:reasons_max]:
        yield (
            f"{reason.tier}: {_KINDS[reason.what]}: {reason.reason} {number(reason.blocks_per_s)} blocks/s,"
            f" {reason.blocks_total:,} since the stack was opened"
        )


def plain_rows(view: View) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells of the tiers, without bars."""
    columns = _columns(_Look(), False)
    return [column.head.replace("\n", " ") for column in columns], [
        [column.cell(tier).plain for column in columns] for tier in view.tiers
    ]


def notice_line(notice: NoticeAnswer) -> str:
    """Return a notice as a line."""
    return _notice(notice).plain


def number(count: float) -> str:
    """Return a count in at most five characters: 12345 is "12.3k"."""
    if 0 < count < 10:
        return f"{count:.1f}" if count >= 0.05 else "<0.1"
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit and count < 100 else f"{count:.0f}{unit}"
        count /= 1000
    return ">999P"


def duration(seconds: float) -> str:
    """Return a time for people, in at most six characters or so: 250e-6 is "250us", 5400 is "90min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.9995 else "1s"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.2g}s"


def _head(sight: Sight, where: str, interval_s: float) -> Iterator[Text]:
    view = sight.view
    title = Text("tiered-kv top", style="bold", no_wrap=True, overflow="ellipsis")
    if view is not None:
        title.append(f"  {view.version}  up {duration(view.uptime_seconds)}  pid {view.pid}", style="not bold")
    title.append(f"  {where}", style="not bold dim")
    yield title
    if sight.trouble:
        yield Text(f" {_lost(sight, interval_s)} ", style="bold white on red", no_wrap=True, overflow="ellipsis")
    elif view is not None:
        yield _totals(view)


def _lost(sight: Sight, interval_s: float) -> str:
    since = f" for {duration(sight.lost_s)}" if sight.lost_s >= 1 else ""
    return f"NO ANSWER{since}: {sight.trouble}; asking again every {duration(interval_s)}"


def _totals(view: View) -> Text:
    hits = number(sum(tier.hits_per_s for tier in view.tiers))
    share = f"{hits} blocks/s" if view.hit_share is None else f"{view.hit_share:.1%}"
    asked = "" if view.hit_share is None else f" of {number(view.asked_blocks_per_s or 0.0)} blocks/s"
    step = "" if view.step_p99_seconds is None else f"  step p99 {duration(view.step_p99_seconds)}"
    over = "since it was opened" if view.is_since_start else f"over {duration(view.interval_seconds)}"
    text = Text("hits ", no_wrap=True, overflow="ellipsis")
    text.append(share, style="bold")
    text.append(f"{asked}  restored {number(view.restored_tokens_per_s)} tokens/s{step}")
    return text.append(f"  {over}", style="dim")


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    cell: Callable[[TierView], Text]
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class _Look:
    """How wide bars are, in characters, and whether sizes stand beside them."""

    capacity_bar: int = 0
    budget_bar: int = 0
    has_sizes: bool = False


def _tier_table(view: View, width: int, tiers_max: int, can_draw: bool, *, is_old: bool) -> Table:
    shown = view.tiers[:tiers_max]
    columns = _fitting(shown, width, can_draw)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True, style="dim" if is_old else "")
    for column in columns:
        table.add_column(
            column.head,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            vertical="bottom",
            header_style="bold",
        )
    for tier in shown:
        table.add_row(*(column.cell(tier) for column in columns))
    return table


def _fitting(tiers: Sequence[TierView], width: int, can_draw: bool) -> list[_Column]:
    """Return the columns that fit: with bars and sizes where there is room, and fewer where there is little."""
    for look in (_Look(16, 12, True), _Look(12, 8, True), _Look(12, 6), _Look(12), _Look(6), _Look()):
        columns = _columns(look, can_draw)
        if _width(columns, tiers) <= width:
            return columns
    for head in ("load\nbudget", "store\nbudget", "load\np99", "hit\n%"):
        columns = [column for column in columns if column.head != head]
        if _width(columns, tiers) <= width:
            break
    return columns


def _width(columns: Sequence[_Column], tiers: Sequence[TierView]) -> int:
    """Return how wide a table is, with a space between two columns."""
    widths = (
        max([*(len(line) for line in column.head.split("\n")), *(cell_len(column.cell(tier).plain) for tier in tiers)])
        for column in columns
    )
    return sum(widths) + len(columns) - 1


def _columns(look: _Look, can_draw: bool) -> list[_Column]:
    def capacity(tier: TierView) -> Text:
        return _capacity(tier, look, can_draw)

    def store_budget(tier: TierView) -> Text:
        return _budget(tier.store_budget_used_bytes, tier.store_budget_bytes, look.budget_bar, can_draw)

    def load_budget(tier: TierView) -> Text:
        return _budget(tier.load_budget_used_bytes, tier.load_budget_bytes, look.budget_bar, can_draw)

    return [
        _Column("tier", lambda tier: Text(_short(tier.name)), is_number=False),
        _Column("hits\n/s", lambda tier: Text(number(tier.hits_per_s))),
        _Column("hit\n%", lambda tier: Text("-" if tier.hit_share is None else f"{tier.hit_share * 100:.0f}")),
        _Column("load\nGB/s", lambda tier: Text(_gb(tier.load_bytes_per_s))),
        _Column("store\nGB/s", lambda tier: Text(_gb(tier.store_bytes_per_s))),
        _Column("load\np99", lambda tier: Text(_seconds(tier.load_p99_seconds))),
        _Column("used", capacity),
        _Column("store\nbudget", store_budget),
        _Column("load\nbudget", load_budget),
        _Column("breaker", _state, is_number=False),
    ]


def _short(name: str) -> str:
    return name if len(name) <= _NAME_MAX else f"{name[: _NAME_MAX - 1]}…"


def _gb(bytes_per_s: float) -> str:
    gb = bytes_per_s / 1e9
    return "0" if gb == 0 else "<0.01" if gb < 0.005 else f"{gb:.2f}" if gb < 100 else number(gb)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _capacity(tier: TierView, look: _Look, can_draw: bool) -> Text:
    """Return how full a tier is. A cache is meant to be full, so nothing warns here."""
    if tier.used_bytes is None:
        return Text("-")
    size = rounded_bytes(tier.used_bytes)
    if not tier.capacity_bytes:
        return Text(size)
    share = min(1.0, tier.used_bytes / tier.capacity_bytes)
    text = Text(f"{size} of {rounded_bytes(tier.capacity_bytes)} " if look.has_sizes else "")
    return text.append(_bar(share, look.capacity_bar, "cyan", can_draw)).append(f"{share:5.0%}")


def _budget(used: int | None, limit: int | None, bar: int, can_draw: bool) -> Text:
    if used is None or not limit:
        return Text("-")
    share = min(1.0, used / limit)
    style = "red" if share >= _BUDGET_WARNING else "green"
    return _bar(share, bar, style, can_draw).append(f"{share:5.0%}", style=style if share >= _BUDGET_WARNING else "")


def _bar(share: float, width: int, style: str, can_draw: bool, rest: str = "") -> Text:
    """Return a bar, in eighths of a character where the terminal can draw them."""
    if can_draw:
        whole, eighths = divmod(round(share * width * 8), 8)
        filled = "█" * whole + (_EIGHTHS[eighths] if eighths else "")
    else:
        filled = "#" * round(share * width)
    rest = rest or ("░" if can_draw else ".")
    return Text(filled, style=style).append(rest * (width - len(filled)), style="dim")


def _state(tier: TierView) -> Text:
    if tier.is_disabled:
        return Text("DISABLED", style="bold red")
    return Text(*_STATES[tier.breaker])


def _reason_table(reasons: Sequence[ReasonView], count: int, width: int, can_draw: bool) -> Table:
    """Return the biggest reasons, each with a bar as long as it is large beside the biggest."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows = [
        [_KINDS.get(each.what, f"{each.what} failed"), _short(each.tier), each.reason, number(each.blocks_per_s)]
        for each in reasons
    ]
    head = ["misses and skips", "tier", "reason", "blocks/s"]
    for index, name in enumerate(head):
        table.add_column(name, no_wrap=True, max_width=24, justify="right" if index == 3 else "left")
    widths = [min(24, max(cell_len(row[index]) for row in [head, *rows])) for index in range(len(head))]
    more = f"and {count - len(reasons)} smaller" if count > len(reasons) else ""
    bar = min(_REASON_BAR_MAX, width - sum(widths) - len("999.9M") - 6)
    if bar >= len(more):
        table.add_column(Text(more, style="not bold dim"), no_wrap=True)
    table.add_column("in all", justify="right", no_wrap=True)
    biggest = max(each.blocks_per_s for each in reasons)
    for each, row in zip(reasons, rows, strict=True):
        share = each.blocks_per_s / biggest if biggest else 0.0
        cells = [*map(Text, row), *([_bar(share, bar, "yellow", can_draw, rest=" ")] if bar >= len(more) else [])]
        table.add_row(*cells, number(each.blocks_total), style="" if each.blocks_per_s else "dim")
    return table


def _grouped(notices: Sequence[NoticeAnswer]) -> list[NoticeAnswer]:
    """Return each event once, as old as the last of its kind: a breaker that tries again and again hides no other."""
    counts = Counter((notice.tier, notice.what) for notice in notices)
    latest = {(notice.tier, notice.what): notice for notice in reversed(notices)}
    times = {key: f"{key[1]} ({count} times)" if count > 1 else key[1] for key, count in counts.items()}
    return [replace(latest[key], what=what) for key, what in times.items()]


def _notice(notice: NoticeAnswer) -> Text:
    text = Text(f"{duration(max(1.0, round(notice.age_s))):>6} ago  ", style="dim", no_wrap=True, overflow="ellipsis")
    text.append(f"{_short(notice.tier)}  ", style="not dim bold")
    return text.append(notice.what, style="not dim")
