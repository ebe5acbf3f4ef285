"""Traces: what is read, and what a bad line says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request, block_key
from tiered_kv.workload.trace import LINE_BYTES_MAX, read_trace

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 20, "hash_ids": [0, 7]}
REAL_TRACE = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl"


def written(path: Path, *lines: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_lines_become_requests_in_their_order(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, "", GOOD | {"timestamp": 6, "hash_ids": [], "type": "a field that is not known"})
    assert list(read_trace(file)) == [Request(5, 600, 20, (0, 7)), Request(6, 600, 20, ())]


def test_it_stops_after_the_requests_that_were_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, GOOD, "this line is never looked at")
    assert len(list(read_trace(file, requests_max=2))) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1]", r"expected a mapping with the keys timestamp, input_length, output_length, hash_ids, found \[1\]"),
        ({"timestamp": 5, "input_length": 600, "output_length": 20}, "hash_ids: this key is required"),
        (GOOD | {"input_length": -1}, "input_length: expected a value greater than or equal to 0, found -1"),
        (GOOD | {"output_length": "12"}, "output_length: expected a whole number, found '12'"),
        (GOOD | {"timestamp": float("inf")}, "timestamp: expected a whole number, found inf"),
        (GOOD | {"hash_ids": [1, -2]}, "hash_ids.1: expected a value greater than or equal to 0, found -2"),
        (GOOD | {"hash_ids": [2**64]}, "hash_ids.0: .* found 18446744073709551616"),
        (GOOD | {"hash_ids": [1.0]}, "hash_ids.0: expected a whole number, found 1.0"),
        (GOOD | {"hash_ids": [1, 2, 1]}, "cannot be repeated"),
        (GOOD | {"hash_ids": "x" * 1000}, "x…$"),
    ],
)
def test_a_bad_line_says_where_and_what(tmp_path: Path, line: object, problem: str) -> None:
    file = tmp_path / "trace.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_bytes((json.dumps(GOOD) + "\n" + text).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=problem) as caught:
        list(read_trace(file))
    assert caught.value.location == f"{file}:2"


def test_a_line_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 4MiB"):
        list(read_trace(written(tmp_path, "1" * (LINE_BYTES_MAX + 1))))


def test_an_absent_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*absent: No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="Is a directory"):
        list(read_trace(tmp_path))


@pytest.mark.parametrize("text", ["", "\n "])
def test_an_empty_trace_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl: the trace is empty: expected a request in each line"):
        list(read_trace(written(tmp_path, text)))


def test_keys_are_the_same_in_every_process() -> None:
    assert block_key(0).hex() == "267218a3270b48fe083c810df57a9afc00000000"
    assert block_key(2**64 - 1) != block_key(0)


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the published trace is not here")
def test_the_published_trace_is_read() -> None:
    requests = list(read_trace(REAL_TRACE, requests_max=300))
    assert sum(len(request.hash_ids) for request in requests) == 8490
    assert requests[0].input_length == 6758
