"""How the command answers: exit statuses, JSON for machines, tables for people, progress where somebody watches.

Results go to standard output; errors and progress to standard error.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import zip_longest
from types import FrameType


class Status(IntEnum):
    """How the command ended."""

    OK = 0
    FOUND = 1
    """The verb did its work and found something wrong: a tier that does not open, a corrupt block, a broken plugin."""
    ERROR = 2
    """The verb could not do its work; standard error says why. argparse uses the same for wrong usage."""
    INTERRUPTED = 130
    """Ctrl-C, as shells number it: 128 and the signal."""
    READER_GONE = 141
    """Whoever read the output has gone (`| head`), as shells number it: 128 and SIGPIPE."""


_PLAIN_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""
_FOLDED_WIDTH_MIN = 24
"""Columns that a folded text has at least."""
_GAP = "  "
_PROGRESS_INTERVAL_S = 0.1


class OutputError(Exception):
    """Standard output cannot be written to; the message says why."""


class ReaderGoneError(OutputError):
    """Whoever read standard output has gone."""


def print_json(result: Mapping[str, object]) -> None:
    """Print one JSON object; what JSON has no form for, such as a tier's path, is printed as text."""
    _write(json.dumps(result, indent=2, default=str) + "\n")


def print_text(text: str) -> None:
    """Print a line for people, exactly as it is."""
    _write(text + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", numbers: bool = True
) -> None:
    """Print a table for people. Where it is wider than the terminal, only a last column of text is folded.

    Args:
        columns: The heads.
        rows: The cells, in the order of `columns`.
        title: Stands above the table.
        numbers: Whether all columns but the first hold numbers, which are aligned to the right.
    """
    cells = [[cell.splitlines() or [""] for cell in row] for row in [columns, *rows]]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    if not numbers:
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PLAIN_WIDTH
        room -= sum(widths[:-1]) + len(_GAP) * len(widths[:-1])
        widths[-1] = min(widths[-1], max(room, _FOLDED_WIDTH_MIN))
        for row in cells:
            row[-1] = [folded for line in row[-1] for folded in textwrap.wrap(line, widths[-1]) or [""]]
    lines = [title] if title else []
    for number, row in enumerate(cells):
        for parts in zip_longest(*row, fillvalue=""):
            padded = [
                part.rjust(width) if numbers and index else part.ljust(width)
                for index, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append(_GAP.join(padded).rstrip())
        if number == 0:
            lines.append(_GAP.join("-" * width for width in widths))
    _write("\n".join(lines) + "\n\n")


def flush_output() -> None:
    """Hand on what was printed.

    Raises:
        OutputError: It cannot be written.
    """
    _write("", flush=True)


def _write(text: str, *, flush: bool = False) -> None:
    """Write to standard output. Once that has failed, it leads to nowhere, so that nothing fails on it again."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))  # names of files may be any bytes
        if flush:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise ReaderGoneError("its reader has gone") from error
        raise OutputError(error.strerror) from error


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how far something is, if standard error is a terminal.

    Args:
        title: What is being done.
        total: Steps in all; None where that is not known.

    Yields:
        A function to call with the number of steps done.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    next_s = 0.0

    def show(done: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            print(f"\r{title}: {done:,}" + (f" of {total:,}" if total else ""), end="", file=sys.stderr, flush=True)

    yield show
    print("\r\033[K", end="", file=sys.stderr)  # ECMA-48: to the line's beginning, and clear it


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
