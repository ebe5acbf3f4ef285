"""Sizes, rates, durations and paths: the types of such settings, and functions that parse and format them.

`format_bytes` is exact: the parser reads back the same number. `rounded_bytes` and `rounded_seconds` are not. Models of
settings, commands and messages use this module, on any thread. No function keeps state.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

BYTES_MAX = 2**63 - 1

_BINARY = {"B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", start=1)}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate("kMGTP", start=1)}
_SIZES = _BINARY | _DECIMAL | {"KB": 1000}
_SECONDS = {"us": "1e-6", "ms": "1e-3", "s": "1", "m": "60", "min": "60", "h": "3600", "d": "86400"}
_DURATIONS = {unit: Decimal(seconds) for unit, seconds in _SECONDS.items()}
HOURS_A_DAY = 24
_PER_DAY = {"day": 1, "h": HOURS_A_DAY, "s": 86400}  # how many of each are in a day

_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_SIZE_ACCEPTED = "a size such as 64MiB or 1.5GB, or a number of bytes"
_RATE_ACCEPTED = "a rate such as 2TiB/day, 90GiB/h or 25MB/s, or a number of bytes a day"
_DURATION_ACCEPTED = "a duration such as 250ms, 30s or 1h, or a number of seconds"


def parse_bytes(value: object) -> int:
    """Return the bytes of a size: an int, or a text such as "64MiB" or "1.5GB"; raise ValueError for other values."""
    return _size(value, _SIZE_ACCEPTED, 1)


def parse_bytes_per_day(value: object) -> int:
    """Return the bytes a day of a rate: an int, or a text such as "2TiB/day"; raise ValueError for other values."""
    if not isinstance(value, str):
        return _size(value, _RATE_ACCEPTED, 1)
    size, _, time = value.partition("/")
    if time.strip() not in _PER_DAY:
        raise ValueError(f"expected {_RATE_ACCEPTED}")
    return _size(size, _RATE_ACCEPTED, _PER_DAY[time.strip()])


def _size(value: object, accepted: str, times: int) -> int:
    number, unit = _split(value, accepted)
    if unit not in _SIZES and unit:
        raise ValueError(f"expected {accepted}; the units are {', '.join(_SIZES)}")
    size = number * _SIZES[unit or "B"] * times
    if size != int(size):
        raise ValueError(f"expected {accepted}; this is a fraction of a byte")
    if size > BYTES_MAX:
        raise ValueError(f"expected {accepted}, less than 8192PiB")
    return int(size)


def format_bytes(size_bytes: int) -> str:
    """Return the shortest exact text of a size: 67108864 is "64MiB", 1500000000 is "1500MB"."""
    exact = [
        f"{size_bytes // scale}{unit}"
        for unit, scale in (_BINARY | _DECIMAL).items()
        if size_bytes % scale == 0 and (size_bytes or scale == 1)
    ]
    return min(exact, key=len)


def rounded_bytes(size_bytes: int) -> str:
    """Return a size for people, to three digits or so: 97654321 is "93.1MiB". `format_bytes` is exact."""
    for unit, scale in reversed(_BINARY.items()):
        if size_bytes >= scale:
            count = size_bytes / scale
            return f"{count:.0f}{unit}" if count >= 100 or count == int(count) else f"{count:.1f}{unit}"
    return f"{size_bytes}B"


def rounded_seconds(seconds: float) -> str:
    """Return a duration for people, in at most six characters or so: 250e-6 is "250us", 7300 is "2h"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.9995 else "1s"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.2g}s"


def parse_seconds(value: object) -> float:
    """Return the seconds of a duration: a number, or a text such as "250ms"; raise ValueError for other values."""
    number, unit = _split(value, _DURATION_ACCEPTED)
    if unit not in _DURATIONS and unit:
        raise ValueError(f"expected {_DURATION_ACCEPTED}; the units are {', '.join(_DURATIONS)}")
    return float(number * _DURATIONS[unit or "s"])


def expanded_path(path: str) -> str:
    """Return a path with the home directory in place of a `~` at its beginning; raise ValueError if no home is known.

    Without this error, a process without a home would make a directory that is called "~".
    """
    if not path.startswith("~"):
        return path
    is_own = path.partition("/")[0] == "~"
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") or (is_own and os.environ.get("HOME") == ""):
        why = "this process has no home directory (HOME)" if is_own else "there is no such user"
        raise ValueError(f"expected a path whose ~ is a home directory, and {why}; write the whole path")
    return expanded


def _number(expected: str) -> BeforeValidator:
    """Return a validator that refuses True and False, which pydantic accepts as numbers."""

    def check(value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"expected {expected}")
        return value

    return BeforeValidator(check)


def _schema(number: str, units: Iterable[str], accepted: str, name: str, times: str = "") -> WithJsonSchema:
    text = {"type": "string", "pattern": rf"^\s*[0-9]+(\.[0-9]+)?\s*({'|'.join(units)})?\s*{times}$|\$\{{"}
    return WithJsonSchema({"anyOf": [{"type": number, "minimum": 0}, text], "description": accepted, "format": name})


Bytes = Annotated[int, BeforeValidator(parse_bytes), _schema("integer", _SIZES, _SIZE_ACCEPTED, "size")]
"""A size in bytes: in YAML 64MiB, 1.5GB or a number."""

BytesPerDay = Annotated[
    int,
    BeforeValidator(parse_bytes_per_day),
    _schema("integer", _SIZES, _RATE_ACCEPTED, "rate", rf"/\s*({'|'.join(_PER_DAY)})\s*"),
]
"""A rate in bytes a day: in YAML 2TiB/day, 90GiB/h, 25MB/s or a number."""

Seconds = Annotated[
    float, BeforeValidator(parse_seconds), _schema("number", _DURATIONS, _DURATION_ACCEPTED, "duration")
]
"""A duration in seconds: in YAML 250ms, 30s, 1h or a number."""

Count = Annotated[int, _number("a whole number")]
"""A whole number; give its bounds with `Field(ge=...)`."""

FilePath = Annotated[str, Field(min_length=1), AfterValidator(expanded_path)]
"""A path of a file or directory; a `~` at its beginning is the home directory."""

Share = Annotated[float, _number("a number from 0 to 1"), Field(ge=0, le=1)]
"""A number from 0 to 1."""


def _split(value: object, accepted: str) -> tuple[Decimal, str]:
    """Return the number and the unit of `value`; the unit is empty if there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not 0 <= value < math.inf:  # NaN is refused too
            raise ValueError(f"expected {accepted}, not below zero")
        return Decimal(repr(value)), ""
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= 64 else None
    if match is None:
        raise ValueError(f"expected {accepted}")
    return Decimal(match["number"]), match["unit"]
