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
from typing import Protocol


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
"""Width of a table in a file or a pipe, in columns."""
_WIDTH_MAX = 10_000
_FOLDED_WIDTH_MIN = 24
"""Minimum width of a folded text, in columns."""


class Advance(Protocol):
    """Reports the steps done, and what is done now if that has changed; see `progress`."""

    def __call__(self, done: int, doing: str | None = None) -> None: ...


def print_json(result: Mapping[str, object]) -> None:
    """Print one JSON object; a value of another type, such as a path, is printed as text."""
    _write(json.dumps(result, indent=2, default=str) + "\n")


def print_text(text: str) -> None:
    """Print a text for people, with control characters escaped."""
    _write(_shown(text) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = True
) -> None:
    """Print a table for people, with control characters escaped.

    All columns but the first hold `numbers`, aligned to the right, or texts. In a narrow terminal the last column of
    texts is folded.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows = [[_shown(cell) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        is_folded = not numbers and index == len(columns) - 1
        table.add_column(
            column,
            justify="right" if numbers and index > 0 else "left",
            overflow="fold",
            no_wrap=not is_folded,
            min_width=_FOLDED_WIDTH_MIN if is_folded else max(len(row[index]) for row in [columns, *rows]),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    # A narrow terminal breaks lines; rich would cut off numbers.
    console.width = max(
        console.width, Measurement.get(console, console.options.update(width=_WIDTH_MAX), table).minimum
    )
    with console.capture() as captured:
        if title:
            console.print(_shown(title), style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    _write("\n".join(lines).lstrip("\n") + "\n")


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


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # file names may have any bytes


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
