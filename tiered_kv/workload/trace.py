"""Request traces: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

The form is that of the traces released with Mooncake (Qin et al., FAST'25): one id for each block of the
prompt, equal ids for equal prefixes. Fields that are not named here are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import HASH_ID_MAX, Request

LINE_BYTES_MAX = 4 << 20
"""A longer line is an error; a prompt of a hundred thousand blocks fits."""

_SHOWN_CHARACTERS = 60


def read_trace(path: Path, *, requests_max: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace, one line at a time.

    Args:
        path: The trace. Empty lines are skipped.
        requests_max: Stop after this many; None for all.

    Raises:
        ConfigError: The file cannot be read or is empty, or a line is not a request; the message names file and line.
    """
    try:
        with path.open("rb") as file:
            count = 0
            number = 0
            while requests_max is None or count < requests_max:
                line = file.readline(LINE_BYTES_MAX + 1)
                if not line:
                    break
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    _reject(path, number, f"the line is longer than {format_bytes(LINE_BYTES_MAX)}")
                if line.strip():
                    yield _parse(path, number, line)
                    count += 1
            if not count and requests_max != 0:
                raise ConfigError("the trace is empty: expected a request in each line", location=str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _parse(path: Path, number: int, line: bytes) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        _reject(path, number, f"not a JSON object: {error}")
    if not isinstance(entry, dict):
        _reject(path, number, f"expected a JSON object, found {_shown(entry)}")
    return Request(
        timestamp_ms=_whole(path, number, entry, "timestamp"),
        input_length=_whole(path, number, entry, "input_length"),
        output_length=_whole(path, number, entry, "output_length"),
        hash_ids=_hash_ids(path, number, entry),
    )


def _whole(path: Path, number: int, entry: dict[str, object], name: str) -> int:
    value = _field(path, number, entry, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _reject(path, number, f"'{name}' must be a whole number, 0 or more, and is {_shown(value)}")
    return value


def _hash_ids(path: Path, number: int, entry: dict[str, object]) -> tuple[int, ...]:
    ids = _field(path, number, entry, "hash_ids")
    if not isinstance(ids, list):
        _reject(path, number, f"'hash_ids' must be a list of numbers, and is {_shown(ids)}")
    for hash_id in ids:
        if type(hash_id) is not int or not 0 <= hash_id <= HASH_ID_MAX:
            _reject(path, number, f"'hash_ids' must hold numbers from 0 to 2**64 - 1, and holds {_shown(hash_id)}")
    if len(set(ids)) != len(ids):
        _reject(path, number, "'hash_ids' repeats an id, but an id stands for a block with all before it")
    return tuple(ids)


def _field(path: Path, number: int, entry: dict[str, object], name: str) -> object:
    if name not in entry:
        _reject(path, number, f"'{name}' is missing")
    return entry[name]


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _reject(path: Path, number: int, problem: str) -> NoReturn:
    raise ConfigError(problem, location=f"{path}:{number}")
