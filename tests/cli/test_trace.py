"""`tiered-kv trace` says what a file is, and what it writes is read as the same requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command import Command
from tests.support.pages import undescribed
from tiered_kv.errors import ConfigError
from tiered_kv.workload import summary
from tiered_kv.workload.hit_rates import hit_curve
from tiered_kv.workload.request import Request
from tiered_kv.workload.summary import summarize, write_trace
from tiered_kv.workload.trace import read_trace

TRACES = Path(__file__).parents[3] / "shared/traces"
Line = dict[str, Any]
LENGTHS = {"input_length": 1024, "output_length": 5}
FORMS: dict[str, tuple[str, list[Line]]] = {
    "Mooncake": ("ms", [{"timestamp": at, **LENGTHS, "hash_ids": [1, at]} for at in (2000, 4000)]),
    "tiered-kv": ("ms", [{"timestamp": at, **LENGTHS, "hash_ids": [1, at], "session": "s"} for at in (2000, 4000)]),
    "Qwen-Bailian": (
        "s",
        [
            {"chat_id": at, "parent_chat_id": -1, "timestamp": at, **LENGTHS, "type": "text", "hash_ids": [1, at]}
            for at in (2, 4)
        ],
    ),
    "LMCache's log of lookups": (
        "s",
        [{"timestamp": at, "seq_len": 9, "chunk_hashes": ["1", str(at)]} for at in (2, 4)],
    ),
    "sessions with turns (aiperf)": (
        "ms",
        [{"session_id": f"{at}", "timestamp": at, **LENGTHS, "hash_ids": [1, at]} for at in (2000, 4000)],
    ),
    "agents' sessions (kv-cache-tester)": (
        "s",
        [
            {
                "id": "a",
                "hash_id_scope": "global",
                "requests": [{"t": at, "in": 9, "out": 5, "hash_ids": [1, at]} for at in (2, 4)],
            }
        ],
    ),
}


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "trace")


def written(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_named_with_its_unit_and_counted(tmp_path: Path, trace: Command, form: str) -> None:
    unit, lines = FORMS[form]
    file = written(tmp_path / "in.jsonl", *lines)
    found = trace.json(file, "--to", str(tmp_path / "out.jsonl"))
    assert (found["form"], found["time_unit"], found["requests"], found["span_seconds"]) == (form, unit, 2, 2.0)
    assert (found["blocks"], found["distinct_blocks"], found["hit_rate"]) == (4, 3, 0.25)
    assert found["repeated_share"] == pytest.approx(1 / 3, abs=1e-6)
    again = trace.json(str(tmp_path / "out.jsonl"))
    same = ("requests", "sessions", "span_seconds", "blocks", "distinct_blocks", "repeated_share", "hit_rate")
    assert {name: again[name] for name in same} == {name: found[name] for name in same}
    assert form in trace.out(file)


def test_the_unit_of_times_can_be_another(tmp_path: Path, trace: Command) -> None:
    file = written(tmp_path / "in.jsonl", *({"timestamp": at, **LENGTHS, "hash_ids": [1]} for at in (0.5, 2.5)))
    assert trace.json(file, "--time-unit", "s")["span_seconds"] == 2.0
    assert trace.json(file)["span_seconds"] == 0.002


def test_the_reference_describes_every_field(tmp_path: Path, trace: Command) -> None:
    file = written(tmp_path / "in.jsonl", *FORMS["Mooncake"][1])
    assert undescribed(trace.json(file), "reference/command.md", "trace") == set()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tokenizer", "TMP/none"], "is no folder"),
        (["--block-tokens", "64"], "--block-tokens: it is for prompts without ids of blocks"),
        (["--to", "TMP/in.jsonl"], "in.jsonl exists already"),
        (["--to", "TMP/none/out"], "cannot write .*none/out: No such file"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, trace: Command, arguments: list[str], problem: str) -> None:
    file = written(tmp_path / "in.jsonl", *FORMS["Mooncake"][1])
    if "--tokenizer" in arguments:
        pytest.importorskip("transformers")
    said = trace.err(file, *(each.replace("TMP", str(tmp_path)) for each in arguments))
    with pytest.raises(ConfigError, match=problem):
        raise ConfigError(" ".join(said.split()))


def test_a_file_that_is_no_trace_is_named(tmp_path: Path, trace: Command) -> None:
    (tmp_path / "in").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "Azure's trace of LLM inference" in trace.err(str(tmp_path / "in"))
    (tmp_path / "in").write_text("INFO 11-30 10:00:00 [api_server.py:5] started, ready\nINFO bye\n")
    assert "in:1: a log with no request in it: vLLM writes" in trace.err(str(tmp_path / "in"))
    (tmp_path / "in").write_text("It's a banner, which is no table\nINFO 11-30 10:00:00 [a.py:5] started\n")
    assert "in:1: a log with no request in it: vLLM writes" in trace.err(str(tmp_path / "in"))
    (tmp_path / "in").write_text("It's a text, which is no table\n")
    assert "in:1: not a JSON object" in trace.err(str(tmp_path / "in"))
    (tmp_path / "in").write_text("hello\nworld\n")
    assert "in:1: not a JSON object" in trace.err(str(tmp_path / "in"))


def test_a_file_that_cannot_be_written_whole_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "LINE_BYTES_MAX", 1024)
    with pytest.raises(ConfigError, match="a line has at most 1KiB"):
        write_trace([Request(0, 9, 0, (1, 2)), Request(0, 9, 0, tuple(range(700)))], tmp_path / "out")
    assert not (tmp_path / "out").exists()


CHAIN = st.lists(st.integers(0, 3), max_size=5).map(
    lambda steps: tuple(hash(tuple(steps[: end + 1])) % 2**64 for end in range(len(steps)))
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(
    st.lists(
        st.builds(
            Request,
            st.integers(0, 10**13),
            st.integers(0, 9999),
            st.integers(0, 99),
            CHAIN,
            st.sampled_from(["", "a", 'é"\n']),
            st.sampled_from([None, {"ttl": 5}]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_written_is_read_as_the_same_requests(tmp_path: Path, requests: list[Request]) -> None:
    out = tmp_path / "out"
    out.unlink(missing_ok=True)
    write_trace(requests, out)
    again = list(read_trace(out))
    begin_ms = min(request.timestamp_ms for request in requests)
    for before, after in zip(requests, again, strict=True):
        assert after.timestamp_ms == before.timestamp_ms - begin_ms
        assert (after.input_length, after.output_length, after.session, after.hints) == (
            before.input_length,
            before.output_length,
            before.session,
            before.hints,
        )
    pairs = {
        pair for each in zip(requests, again, strict=True) for pair in zip(*(one.hash_ids for one in each), strict=True)
    }
    assert len({old for old, _ in pairs}) == len({new for _, new in pairs}) == len(pairs), "a number for each block"
    curve = hit_curve(requests)
    assert summarize(requests).hit_rate == pytest.approx(curve.rate(curve.distinct_blocks), abs=1e-6)


@pytest.mark.parametrize("name", ["conversation_trace", "agents_trace"])
def test_a_published_trace_has_the_blocks_that_simulate_counts(trace: Command, name: str) -> None:
    file = TRACES / f"{name}.jsonl"
    if not file.exists():
        pytest.skip("the published trace is not here")
    found = trace.json(str(file), "--requests", "300")
    curve = hit_curve(list(read_trace(file, requests_max=300)))
    assert (found["blocks"], found["distinct_blocks"]) == (curve.blocks, curve.distinct_blocks)
    assert found["hit_rate"] == pytest.approx(curve.rate(curve.distinct_blocks), abs=1e-6)
    assert found["block_tokens"] == 512
