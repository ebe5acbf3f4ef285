"""Types of command-line arguments; each error says what would be accepted."""

from __future__ import annotations

import argparse

from tiered_kv.config.units import parse_bytes, parse_seconds


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


def rate(text: str) -> int:
    """Return bytes a second, at least 1, from text such as "100MiB/s" or "100MiB"."""
    try:
        value = parse_bytes(text.removesuffix("/s"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, found {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 byte a second, found {text!r}")
    return value
