"""Fuzzing of the trace reader: a trace's line is a request, or a `ConfigError` that names it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.fuzzing.target import Target
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import HASH_ID_MAX
from tiered_kv.workload.trace import read_trace

_LINE = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
_SEEDS = (
    3 * _LINE,
    b'{"timestamp": 0, "input_length": 1e3, "output_length": 0.0, "hash_ids": [], "more": {"a": [1, null]}}\n\n'
    + _LINE,
    _LINE.replace(b"46", b"18446744073709551615"),
)
_WORDS = (
    b"NaN", b"Infinity", b"1e999", b"-1", b"true", b"null", b"[" * 40, b'{"a":' * 40, b"\xff", b'"\\ud800"',
    b"9" * 40,
)  # fmt: skip


def trace_target() -> Target:
    """Return the target: a trace's file."""
    return Target("fuzz/trace", _SEEDS, _run, _WORDS)


def _run(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="tiered-kv-fuzz-") as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        said = ""
        try:
            requests = list(read_trace(path))
        except ConfigError as error:
            requests, said = [], str(error)
    if said:
        assert str(path) in said, f"the error names no file: {said}"
        assert len(said) < 1000, "the error repeats what it found"
        return
    assert requests, "a trace without requests is an error"
    for request in requests:
        for number in (request.timestamp_ms, request.input_length, request.output_length):
            assert type(number) is int
            assert number >= 0
        assert len(set(request.hash_ids)) == len(request.hash_ids)
        assert all(type(each) is int and 0 <= each <= HASH_ID_MAX for each in request.hash_ids)
