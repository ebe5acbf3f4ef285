"""How the command answers: exit statuses, JSON for machines, tables for people, progress where somebody watches.

Results go to standard output; errors and progress to standard error. rich is imported only when a table, a progress
bar or the screen of `top` is really drawn.
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

from tiered_kv.observe.answer import printable


class Status(IntEnum):
    """How the command ended."""

    OK = 0
    FOUND = 1
    """The verb did its work and found something wrong: a tier that does not open, a corrupt block, a broken plugin."""
    ERROR = 2
    """The verb could not do its work; standard error says why. argparse uses the same for wrong usage."""
    INTERRUPTED = 130
    """Ctrl-C, as shells number it: 128 and the signal."""


_PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
_WIDTH_MAX = 10_000
_FOLDED_WIDTH_MIN = 24
"""Columns that a folded text has at least."""


class Advance(Protocol):
    """Says how far something is; see `progress`."""

    def __call__(self, done: int, doing: str | None = None) -> None: ...


def print_json(result: Mapping[str, object]) -> None:
    """Print one JSON object; what JSON has no form for, such as a tier's path, is printed as text."""
    _write(json.dumps(result, indent=2, default=str) + "\n")


def print_text(text: str) -> None:
    """Print text for people. What a terminal would obey in it is shown as an escape."""
    _write(_shown(text) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = True
) -> None:
    """Print a table for people. Where it is wider than the terminal, only a last column of text is folded.

    Args:
        rows: The cells, in the order of `columns`. What a terminal would obey in them is shown as an escape.
        numbers: Whether all columns but the first hold numbers, which are aligned to the right.
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
    # A narrow terminal breaks lines; rich would leave numbers out.
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
    """Return text that may hold a stranger's words, so that none of them looks like a line of this command."""
    return text.replace("\n", "\\n")


def _shown(text: str) -> str:
    """Return `text` without what a terminal obeys: names in it may be those of a stranger's files or requests."""
    return "\n".join(map(printable, text.split("\n")))


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # names of files may be any bytes


@contextmanager
def progress(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Advance]:
    """Show how far something is, if standard error is a terminal. The time that has passed is always seen to go on.

    Args:
        total: Steps in all; None where that is not known.
        in_bytes: Whether a step is a byte; then the rate and an estimate of the time left are shown.

    Yields:
        A function to call with the number of steps done, and with what is being done now if that has changed.
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
    """Turn the first Ctrl-C into a flag, so that work in progress can end in good order; the second one raises.

    Yields:
        A function that tells whether Ctrl-C was pressed.
    """
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
