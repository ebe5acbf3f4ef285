"""The types of a trace's fields: times, lengths, ids of blocks; and the check of an object.

`turns`, `agents` and `reports` check the objects of a trace with these types, on the command's thread.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from tiered_kv.config.validation import Model, check
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import HASH_ID_MAX, id_number

_MS_PER_S = 1000

Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]
TIME_MAX: Final = 1e14
"""A greater time is not in milliseconds: it would be in the year 5138."""


def _numbers(ids: list[object]) -> tuple[int, ...]:
    numbers = tuple(each if type(each) is int else id_number(each) for each in ids)
    if numbers and not (min(numbers) >= 0 and max(numbers) <= HASH_ID_MAX):
        raise ValueError(f"expected ids from 0 to {HASH_ID_MAX}, others as texts (in quotes)")
    if len(set(numbers)) != len(numbers):
        raise ValueError(
            "an id stands for a block with all before it, so it cannot be repeated, "
            f"as {_repeated(ids, numbers)!r:.40} is"
        )
    return numbers


def _repeated(ids: list[object], numbers: tuple[int, ...]) -> object:
    seen: set[int] = set()
    for each, number in zip(ids, numbers, strict=True):
        if number in seen:
            return each
        seen.add(number)
    return None


def _time(time: float) -> float:
    if time > TIME_MAX:
        raise ValueError("expected seconds or milliseconds: divide times in microseconds or nanoseconds")
    return time


Time = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_time)]
HashIds = Annotated[list[object], AfterValidator(_numbers)]
"""The ids of a prompt's blocks. The check returns a tuple of numbers."""


def milliseconds(time: float, *, is_in_seconds: bool) -> int:
    """Return a time in whole milliseconds."""
    return round(time * _MS_PER_S) if is_in_seconds else int(time)


def checked(model: type[Model], entry: object, where: str, place: str = "") -> Model:
    """Return an object of a trace as a `model`, or raise `ConfigError` with the place in the file and in the object."""
    found = check(model, entry, tuple(place.split(".")) if place else ())
    if isinstance(found, list):
        raise ConfigError(str(found[0]), location=where)
    return found
