"""Output of the command: exit statuses, JSON, tables, progress.

Verbs call it on the main thread, or on the thread of a `TimeLimit`. Results go to standard output, errors and progress
to standard error. What must stay true: texts for people have their control characters escaped, and rich is imported
only when it draws.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TextIO

from tiered_kv.config.units import rounded_bytes

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


_PLAIN_WIDTH = 10_000
"""Columns of a file or a pipe: each row is a line there, for `grep`."""
LINE_EVERY_S = 10.0
"""Seconds between two lines of progress in a file or a pipe."""
_WORD_WIDTH_MAX = 40
"""Columns of the longest word that a table keeps whole; longer words, such as paths, may be folded."""
_STYLES = {"green": "^ok$", "bold red": r"\b(FAILED|REFUSED|CORRUPT)\b|^error:", "yellow": r"\bWARNING\b"}
"""The words that a terminal shows in colour."""


class Advance(Protocol):
    """Reports the number of steps `done`, and a new title as `doing` if it has changed; see `progress`."""

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

    With `numbers`, all columns but the first are aligned to the right. On a terminal, lines are broken between words,
    and a table that is too wide is continued below, with its first column again. Elsewhere each row is one line.
    """
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    rows = [[_shown(cell) for cell in row] for row in rows]
    cells = list(zip(columns, *rows, strict=True))
    wanted = [max(len(line) for cell in column for line in cell.split("\n")) for column in cells]
    least = [min(_WORD_WIDTH_MAX, max(len(word) for word in " ".join(column).split())) for column in cells]
    if title:
        print_text(title, style="bold")
    parts = [[0]]
    for at in range(1, len(columns)):
        if len(parts[-1]) > 1 and _table_width(least[each] for each in (*parts[-1], at)) > console.width:
            parts.append([0])
        parts[-1].append(at)
    for part in parts:
        widths = {at: wanted[at] for at in part}
        while _table_width(widths.values()) > console.width and any(widths[at] > least[at] for at in part):
            widths[max(part, key=lambda at: widths[at] - least[at])] -= 1
        shown = _table([(columns[at], widths[at]) for at in part], ([row[at] for at in part] for row in rows), numbers)
        _print(console, shown, sys.stdout)


def _table_width(widths: Iterable[int]) -> int:
    return sum(width + 3 for width in widths) - 1  # the sum counts the spaces around and between columns


def _table(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]], numbers: bool) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, (name, width) in enumerate(columns):
        table.add_column(name, justify="right" if numbers and at > 0 else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*(_colored(Text(cell)) for cell in row))
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


def quantity(count: int, noun: str) -> str:
    """Return a number and a noun: "1 block", "2,000 blocks"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def readable(name: str, value: object) -> tuple[str, str]:
    """Return a field of a tier's description for people."""
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, int) and name.endswith("_bytes"):
        text = rounded_bytes(value)
    else:
        text = "none" if value is None else str(value)
    return name.removesuffix("_bytes"), text


def one_line(text: str) -> str:
    """Return a text from outside, such as a file's name, so that it cannot add a line to the output."""
    return text.replace("\n", "\\n")


def _shown(text: str) -> str:
    """Return `text` with control characters escaped: it may have names of files or requests from outside."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return `text` with each unprintable character escaped: a terminal would obey it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _write(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))  # file names may have any bytes


@contextmanager
def progress(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Show progress on standard error, and yield the function that reports it.

    A terminal shows a bar. A file or a pipe gets a line every ten seconds, so shorter work has no line.

    Args:
        total: The number of steps; None if unknown.
        in_bytes: Whether a step is a byte; then the rate and an estimate of the time left are shown.
    """
    if not sys.stderr.isatty():
        yield _progress_lines(title, total, in_bytes)
        return
    from rich import progress as shown
    from rich.console import Console
    from rich.markup import escape

    columns: list[shown.ProgressColumn] = [shown.TextColumn("{task.description}"), shown.BarColumn()]
    if in_bytes:
        columns += [shown.DownloadColumn(binary_units=True), shown.TransferSpeedColumn(), shown.TimeRemainingColumn()]
    else:
        columns += [shown.MofNCompleteColumn(), shown.TimeElapsedColumn()]
    with shown.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, doing=None: bar.update(task, completed=done, description=doing and escape(doing))


def _progress_lines(title: str, total: int | None, in_bytes: bool) -> Advance:
    shown = rounded_bytes if in_bytes else "{:,}".format
    of_total = "" if total is None else f" of {shown(total)}"
    next_s = time.monotonic() + LINE_EVERY_S

    def advance(done: int, doing: str | None = None) -> None:
        nonlocal title, next_s
        title = doing or title
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + LINE_EVERY_S
            print_text(f"{title}: {shown(done)}{of_total}", sys.stderr)
            sys.stderr.flush()

    return advance


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
