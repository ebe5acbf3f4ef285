"""Request traces: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

This is the format of the traces released with Mooncake (Qin et al., FAST'25). Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import check
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import HASH_ID_MAX, Request

LINE_BYTES_MAX = 4 << 20
"""A longer line is an error; a prompt of a hundred thousand blocks fits."""

_Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


def _without_repetition(ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(ids)) != len(ids):
        raise ValueError("an id stands for a block with all before it, so it cannot be repeated")
    return ids


class _Line(BaseModel):
    timestamp: _Whole
    input_length: _Whole
    output_length: _Whole
    hash_ids: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=HASH_ID_MAX)], ...], AfterValidator(_without_repetition)
    ]


def read_trace(path: Path, *, requests_max: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace, at most `requests_max`, one line at a time; empty lines are skipped."""
    count = 0
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(LINE_BYTES_MAX + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > LINE_BYTES_MAX:
                    problem = f"the line is longer than {format_bytes(LINE_BYTES_MAX)}"
                    raise ConfigError(problem, location=f"{path}:{number}")
                if line.strip():
                    yield _parse(line, f"{path}:{number}")
                    count += 1
                    if count == requests_max:
                        break
        if not count:
            raise ConfigError("the trace is empty: expected a request in each line", location=str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _parse(line: bytes, where: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a JSON object: {error}", location=where) from error
    checked = check(_Line, entry)
    if isinstance(checked, list):
        raise ConfigError(str(checked[0]), location=where)
    return Request(checked.timestamp, checked.input_length, checked.output_length, checked.hash_ids)
