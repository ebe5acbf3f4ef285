"""Types of command-line arguments; each error says what would be accepted."""

from __future__ import annotations

import argparse

from tiered_kv.config.units import parse_seconds


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return value


def seconds(text: str) -> float:
    """Return a duration in seconds, from text such as "250ms"."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {text!r}") from None
