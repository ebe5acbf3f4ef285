"""Request traces: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

This is the format of the traces released with Mooncake (Qin et al., FAST'25). Other fields are ignored. Tools that
write such traces differ, so whatever has one meaning is read: 12.0 for 12, ids that are texts, a file that `gzip` made.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import check
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import HASH_ID_MAX, Request

LINE_BYTES_MAX = 4 << 20
"""A longer line is an error; a prompt of a hundred thousand blocks fits."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_EXACT_MAX = 2**53
"""A larger number that was written as a fraction, such as 1e18, may stand for several whole ones."""


def _whole(number: object) -> object:
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) <= _EXACT_MAX
    return int(number) if is_whole else number  # type: ignore[call-overload]  # a float


def _moment(timestamp: object) -> object:
    return math.floor(timestamp) if isinstance(timestamp, float) and 0 <= timestamp <= _EXACT_MAX else timestamp


def _hash_id(hash_id: object) -> object:
    """Return the number of an id that is a text: its decimal digits, or the hash of another text."""
    if not isinstance(hash_id, str) or not hash_id:
        return _whole(hash_id)
    if hash_id.isascii() and hash_id.isdecimal() and str(number := int(hash_id[:20])) == hash_id:
        return number
    return int.from_bytes(hashlib.blake2b(hash_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _hash_ids(ids: object) -> object:
    is_plain = not isinstance(ids, list) or {*map(type, ids)} <= {int}
    return ids if is_plain else [*map(_hash_id, cast(list[object], ids))]


_Whole = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=0, le=2**63 - 1)]


def _without_repetition(ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(ids)) != len(ids):
        raise ValueError("an id stands for a block with all before it, so it cannot be repeated")
    return ids


class _Line(BaseModel):
    timestamp: Annotated[_Whole, BeforeValidator(_moment)]
    input_length: _Whole
    output_length: Annotated[_Whole, BeforeValidator(lambda length: 0 if length is None else length)] = 0
    hash_ids: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=HASH_ID_MAX)], ...],
        BeforeValidator(_hash_ids),
        AfterValidator(_without_repetition),
    ]


def read_trace(path: Path, *, requests_max: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace, at most `requests_max`, one line at a time; empty lines are skipped.

    A file that was compressed with gzip is decompressed.
    """
    count = 0
    try:
        with path.open("rb") as file, _decompressed(file, path) as plain:
            lines = iter(lambda: plain.readline(LINE_BYTES_MAX + 1), b"")
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
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"cannot decompress the trace {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _decompressed(file: BufferedReader, path: Path) -> BufferedReader | gzip.GzipFile:
    begin = file.peek(len(_ZSTD))  # the file may be a pipe
    if begin.startswith(_ZSTD):
        raise ConfigError(f"the trace {path} is compressed with zstd: decompress it, or compress it with gzip")
    return gzip.GzipFile(fileobj=file) if begin.startswith(_GZIP) else file


def _parse(line: bytes, where: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a JSON object: {error}", location=where) from error
    checked = check(_Line, entry)
    if isinstance(checked, list):
        raise ConfigError(str(checked[0]), location=where)
    return Request(checked.timestamp, checked.input_length, checked.output_length, checked.hash_ids)
