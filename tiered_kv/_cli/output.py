"""Output of the command: exit statuses, JSON, tables, progress.

Results go to standard output, errors and progress to standard error. rich is imported only when it draws.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


class Status(IntEnum):
    """Exit statuses."""

    OK = 0
    FOUND = 1
    """The verb did its work and found something wrong: a tier that does not open, a corrupt block, a broken plugin."""
    ERROR = 2
    """The verb could not do its work, or wrong usage; standard error says why."""
    INTERRUPTED = 130
    """Ctrl-C, as shells number it: 128 and the signal."""


_PLAIN_WIDTH = 120
"""Width of a table in a file or a pipe, in columns. A wider table has longer lines there, for `grep`."""
_FOLDED_WIDTH_MIN = 24
"""Minimum width of the last column of texts, in columns."""
_WORD_WIDTH_MAX = 40
"""Longer words, such as paths, may be folded."""
_STYLES = {"green": "^ok$", "bold red": r"\b(FAILED|REFUSED|CORRUPT)\b|^error:", "yellow": r"\bWARNING\b"}
"""The words that a terminal shows in colour."""


class Advance(Protocol):
    """Reports the steps done, and what is done now if that has changed; see `progress`."""

    def __call__(self, done: int, doing: str | None = None) -> None: ...


def print_json(result: Mapping[str, object]) -> None:
    """Print one JSON object; a value of another type, such as a path, is printed as text."""
    _write(json.dumps(result, indent=2, default=str) + "\n")


def print_text(text: str, stream: TextIO | None = None, style: str = "") -> None:
    """Print a text for people, with control characters escaped; a terminal breaks its lines between words.

    `stream` is by default standard output.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        _write(_shown(text) + "\n", stream)
        return
    from rich.console import Console
    from rich.text import Text

    for line in _shown(text).split("\n"):
        _print(Console(file=stream), _colored(Text(line, style=style)), stream)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = True
) -> None:
    """Print a table for people, with control characters escaped.

    All columns but the first hold `numbers`, aligned to the right, or texts, whose lines are broken between words. A
    table that is too wide for a terminal is continued below, with its first column again.
    """
    from rich.console import Console

    rows = [[_shown(cell) for cell in row] for row in rows]
    is_terminal, last = sys.stdout.isatty(), len(columns) - 1
    folded = set() if numbers else {*range(1, last + 1)} if is_terminal else {last}
    widths = [_narrowest(each, at in folded) for at, each in enumerate(zip(columns, *rows, strict=True))]
    if last in folded:
        widths[last] = max(widths[last], min(max(len(row[last]) for row in [columns, *rows]), _FOLDED_WIDTH_MIN))
    console = Console() if is_terminal else Console(width=max(_PLAIN_WIDTH, _table_width(widths)))
    if title:
        print_text(title, style="bold")
    wanted = [_narrowest(each, False) for each in zip(columns, *rows, strict=True)]
    for part in _parts(widths, console.width):
        fitted = _fitted(part, widths, wanted, console.width)
        _print(console, _table(part, columns, rows, fitted, numbers=numbers), sys.stdout)


def _narrowest(column: Sequence[str], is_folded: bool) -> int:
    """Return the least width of a column: that of its longest line, or of its longest word if it is folded."""
    if not is_folded:
        return max(len(line) for cell in column for line in cell.split("\n"))
    return min(_WORD_WIDTH_MAX, max((len(word) for cell in column for word in cell.split()), default=0))


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) - 1  # with the spaces around and between columns


def _parts(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns of each part of a table: the first one, and as many of the others as there is room for."""
    part: list[int] = [0]
    for at in range(1, len(widths)):
        if len(part) > 1 and _table_width([widths[each] for each in (*part, at)]) > width:
            yield part
            part = [0]
        part.append(at)
    yield part


def _fitted(part: Sequence[int], least: Sequence[int], wanted: Sequence[int], width: int) -> dict[int, int]:
    """Return the width of each column of a part, which share the room that is left; rich would cut some short."""
    room = width - _table_width([least[at] for at in part])
    fitted: dict[int, int] = {}
    for at in sorted(part, key=lambda each: wanted[each] - least[each]):
        more = max(0, min(wanted[at] - least[at], room // (len(part) - len(fitted))))
        fitted[at], room = least[at] + more, room - more
    return fitted


def _table(
    part: Sequence[int],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Mapping[int, int],
    *,
    numbers: bool,
) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at in part:
        side: Literal["left", "right"] = "right" if numbers and at > 0 else "left"
        table.add_column(columns[at], justify=side, overflow="fold", width=widths[at])
    for row in rows:
        table.add_row(*(_colored(Text(row[at])) for at in part))
    return table


def _colored(text: Text) -> Text:
    for style, words in _STYLES.items():
        text.highlight_regex(words, style)
    return text


def _print(console: Console, shown: RenderableType, stream: TextIO) -> None:
    with console.capture() as captured:
        console.print(shown)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    _write("\n".join(lines).lstrip("\n") + "\n", stream)


def one_line(text: str) -> str:
    """Return a text from outside, such as a file's name, so that it cannot add a line to the output."""
    return text.replace("\n", "\\n")


def _shown(text: str) -> str:
    """Return `text` with control characters escaped: it may have names of files or requests from outside."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return `text` with all that a terminal would obey escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _write(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))  # file names may have any bytes


@contextmanager
def progress(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Show progress if standard error is a terminal, and yield the function that reports it.

    Args:
        total: The number of steps; None if unknown.
        in_bytes: Whether a step is a byte; then the rate and an estimate of the time left are shown.
    """
    if not sys.stderr.isatty():
        yield lambda done, doing=None: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn()]
    if in_bytes:
        columns += [DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()]
    else:
        columns += [MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, doing=None: bar.update(task, completed=done, description=doing and escape(doing))


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; the second Ctrl-C raises KeyboardInterrupt."""
    pressed = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
