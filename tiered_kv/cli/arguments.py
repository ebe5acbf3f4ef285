"""Types of command-line arguments, and the end of a verb's help.

`add_arguments` of each verb names the types, and argparse calls them on the main thread. What must stay true: a wrong
text is an `ArgumentTypeError` that says which texts are accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from tiered_kv.config.units import expanded_path, parse_bytes, parse_seconds

Number = TypeVar("Number", int, float)
_INTERVAL_MIN_S: Final = 0.1
_INTERVAL_MAX_S: Final = 86_400.0
_TOKENS_MAX: Final = 1 << 30
_DIGITS_MAX: Final = 12


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return value


def tokens(text: str) -> int:
    """Return a number of tokens: 32768, 32k or 1M, where k is 1,024 and M is 1,024k."""
    scale = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    number = text[:-1] if scale > 1 else text
    if not (number.isascii() and number.isdecimal() and 1 <= int(number[:_DIGITS_MAX]) * scale <= _TOKENS_MAX):
        raise argparse.ArgumentTypeError(f"expected a number of tokens, such as 32768, 32k or 1M, found {text!r}")
    return int(number) * scale


def share(text: str) -> float:
    """Return a share, such as "0.9"."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, such as 0.9, found {text!r}")
    return value


def seconds(text: str) -> float:
    """Return the seconds of a duration such as "250ms"."""
    return _parsed(parse_seconds, text, text)


def size(text: str) -> int:
    """Return the bytes of a size such as "2MiB", or of a rate such as "100MiB/s"."""
    value = _parsed(parse_bytes, text.removesuffix("/s"), text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 byte, found {text!r}")
    return value


def interval(text: str) -> float:
    value = seconds(text)
    if not _INTERVAL_MIN_S <= value <= _INTERVAL_MAX_S:
        raise argparse.ArgumentTypeError(f"expected a duration from 100ms to 1d, found {text!r}")
    return value


def _parsed(parse: Callable[[object], Number], text: str, given: str) -> Number:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {given!r}") from None


def file_path(text: str) -> Path:
    """Return a path with its `~` expanded: the shell does not expand one after an "="."""
    try:
        return Path(expanded_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {text!r}") from None


def describe_use(parser: argparse.ArgumentParser, *examples: tuple[str, str], found: str = "") -> None:
    """End a verb's help with `examples`, commands and their purposes, and exit statuses. `found` explains status 1."""
    lines = [line for command, about in examples for line in (f"  {command}", f"      {about}")]
    statuses = [
        "  0    all is well",
        *([f"  1    {found}"] if found else []),
        "  2    it could not be done",
        "  130  Ctrl-C",
    ]
    parser.epilog = "\n".join(["examples:", *lines, "", "exit status:", *statuses])
