"""Traces in the forms of their publishers: agents' sessions, turns, chats, logs; and what cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command import Command
from tiered_kv.errors import ConfigError
from tiered_kv.workload.hit_rates import hit_curve, hit_rate
from tiered_kv.workload.request import Request, block_tokens
from tiered_kv.workload.trace import read_trace

TRACES = Path(__file__).parents[3] / "shared/traces"
Line = dict[str, Any]


def read(path: Path, *lines: object, requests_max: int | None = None, time_unit: str = "") -> list[Request]:
    file = path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return list(read_trace(file, requests_max=requests_max, time_unit=time_unit))


def error(path: Path, text: str | bytes) -> ConfigError:
    file = path / "trace.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        list(read_trace(file))
    return caught.value


def hits_by_lru(prompts: Iterable[Sequence[object]], size: int) -> int:
    """Return the hits of the shortest LRU; the head of a prompt is newer than its tail."""
    held, hits = OrderedDict[object, None](), 0
    for ids in prompts:
        hits += next((at for at, each in enumerate(ids) if each not in held), len(ids))
        for each in reversed(ids):
            held[each] = None
            held.move_to_end(each)
        while len(held) > size:
            held.popitem(last=False)
    return hits


# Agents' sessions.


def call(at_s: float, ids: Sequence[int], **more: object) -> Line:
    return {"t": at_s, "type": "n", "model": "m", "in": 64 * len(ids), "out": 9, "hash_ids": list(ids), **more}


def session(name: str, *requests: Line, **more: object) -> Line:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def subagent(at_s: float, *requests: Line) -> Line:
    return {"t": at_s, "type": "subagent", "agent_id": "agent_001", "requests": list(requests)}


def test_requests_of_agents_come_by_time_and_blocks_belong_to_a_session(tmp_path: Path) -> None:
    inner = subagent(8, call(9, [1, 70], type="s"), subagent(9.5, call(0.25, [1, 80])))
    requests = read(
        tmp_path, session("a", call(0.5, [1, 2]), call(7, [1, 2, 3]), inner), session("b", call(1.25, [1, 2]))
    )
    assert [(each.timestamp_ms, each.session) for each in requests] == [
        (500, "a"),
        (1250, "b"),
        (7000, "a"),
        (9000, "a"),
        (9750, "a"),  # its time counts from the start of its subagent
    ]
    first, other, *later = (each.hash_ids for each in requests)
    assert not set(first) & set(other)
    assert all(ids[0] == first[0] for ids in later)
    assert (requests[0].input_length, requests[0].output_length) == (128, 9)


def test_times_of_subagents_count_from_their_start_as_published(tmp_path: Path) -> None:
    requests = read(tmp_path, session("a", call(0, [1]), subagent(100, call(0, [1]), call(150, [1]))))
    assert [each.timestamp_ms for each in requests] == [0, 100_000, 250_000]


@pytest.mark.parametrize(("scope", "is_shared"), [("local", False), ("global", True), (None, False)])
def test_the_scope_says_whether_sessions_share_blocks(tmp_path: Path, scope: str | None, is_shared: bool) -> None:
    sessions = [session(name, call(0, [1, 2]), hash_id_scope=scope) for name in "ab"]
    one, two = read(tmp_path, *sessions)
    assert (one.hash_ids == two.hash_ids) is is_shared


def test_a_folder_is_read_as_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    sessions = [session(f"s{number}", call(10 - number, [1]), call(20 + number, [1, 2])) for number in range(4)]
    (folder / "0.json").write_text(json.dumps(sessions[0]))
    (folder / "1.json").write_text(json.dumps(sessions[1], indent=2))
    (folder / "2.json.gz").write_bytes(gzip.compress(json.dumps(sessions[2]).encode()))
    (folder / "3.jsonl").write_text(json.dumps(sessions[3]) + "\n\n")
    (folder / "hit_rates.txt").write_text("not a trace")
    assert list(read_trace(folder)) == read(tmp_path, *sessions)
    assert list(read_trace(folder, requests_max=3)) == read(tmp_path, *sessions)[:3]
    (folder / "4.jsonl").write_text(json.dumps({"timestamp": 1, "input_length": 1, "hash_ids": [1]}))
    with pytest.raises(ConfigError, match=r"4\.jsonl:1: expected|4\.jsonl:1: id: this key is required"):
        list(read_trace(folder))
    (folder / "0.json").write_text(json.dumps({"timestamp": 1, "input_length": 1, "hash_ids": [1]}))
    with pytest.raises(ConfigError, match="a folder holds agents' sessions"):
        list(read_trace(folder))


def deep(levels: int) -> Line:
    return subagent(0, deep(levels - 1) if levels else call(0, [1]))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (session("b", {"t": 1, "in": 64, "out": 1}), r"trace\.jsonl:2: requests\.0\.hash_ids: this key is required"),
        (
            session("b", call(0, [1]), subagent(1, call(2, [-1]))),
            r":2: requests\.1\.requests\.0\.hash_ids: expected ids",
        ),
        (session("b", call(-1, [1])), r":2: requests\.0\.t: expected a value greater"),
        (session("b", call(0, [1, 1])), r":2: requests\.0\.hash_ids: .* cannot be repeated"),
        (session("b", hash_id_scope="elsewhere"), r":2: hash_id_scope: expected"),
        (session("b", block_size=16), r":2: block_size: expected blocks of 64 tokens"),
        (session("a"), r":2: id: expected another id for each session, found 'a'"),
        ({"id": "b", "hash_id_scope": "local"}, r":2: requests: this key is required"),
        (session("b", 5), r":2: requests\.0: expected a mapping"),  # type: ignore[arg-type]
        (session("b", deep(20)), "expected subagents at most 16 deep"),
        ({"timestamp": 1, "input_length": 1, "hash_ids": [1]}, r":2: id: this key is required"),
    ],
)
def test_a_bad_session_is_named_by_file_line_and_key(tmp_path: Path, entry: Line, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, session("a", call(0, [1])), entry)


def test_a_session_among_lines_with_a_request_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":2: an agents' session"):
        read(tmp_path, {"timestamp": 1, "input_length": 1, "hash_ids": [1]}, session("a"))


# Turns.


def turn(name: str, ids: Sequence[object], **more: object) -> Line:
    return {"session_id": name, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": list(ids), **more}


def test_turns_are_put_together_and_played_by_their_times(tmp_path: Path) -> None:
    requests = read(
        tmp_path,
        turn("a", [0, 1], timestamp=1000),
        turn("a", [2], delay=500),
        turn("a", [], delay=0),
        turn("a", [3], delay=2000),
        turn("b", [0, 5]),
        turn("b", [6], delay=1200.0),
    )
    assert [(each.timestamp_ms, each.session, len(each.hash_ids), each.input_length) for each in requests] == [
        (0, "b", 2, 1024),
        (1000, "a", 2, 1024),
        (1200, "b", 3, 1536),
        (1500, "a", 3, 1536),
        (1500, "a", 3, 1536),
        (3500, "a", 4, 2048),
    ]
    of_a = [each.hash_ids for each in requests if each.session == "a"]
    assert all(later[: len(before)] == before for before, later in pairwise(of_a))
    assert requests[0].hash_ids[0] == of_a[0][0] == 0, "first turns share their first block"


def test_the_same_text_after_other_blocks_is_another_block(tmp_path: Path) -> None:
    first = {"timestamp": 0, "context_mode": "deltas_without_responses"}
    later = {"delay": 1, "context_mode": "deltas_without_responses"}
    lines = [
        line
        for name, ids in (("a", [1]), ("b", [2]), ("c", [1]))
        for line in (turn(name, ids, **first), turn(name, [9], **later))
    ]
    *_, after_1, after_2, again_after_1 = (each.hash_ids for each in read(tmp_path, *lines))
    assert after_1[-1] != after_2[-1]
    assert after_1 == again_after_1


def test_whole_prompts_of_a_session_are_known_by_their_ids(tmp_path: Path) -> None:
    prompts = [[0, 1], [0, 1, 2], [7, 8], [0, 1, 2, 3]]  # the third is of a subagent, or after a compaction
    requests = read(tmp_path, *(turn("a", ids, timestamp=at) for at, ids in enumerate(prompts)))
    assert [list(each.hash_ids) for each in requests] == prompts
    relative = read(tmp_path, turn("a", [0, 1]), turn("a", [0, 1, 2], delay=7))
    assert [(each.timestamp_ms, list(each.hash_ids)) for each in relative] == [(0, [0, 1]), (7, [0, 1, 2])]
    mode = "message_array_with_responses"
    said = read(tmp_path, *(turn("a", ids, timestamp=1, context_mode=mode) for ids in ([1], [2], [2, 1])))
    assert [list(each.hash_ids) for each in said] == [[1], [2], [2, 1]]
    ours = [{**turn("", ids, timestamp=1), "session": "a"} for ids in ([1], [2])]
    assert [list(each.hash_ids) for each in read(tmp_path, *ours)] == [[1], [2]], "our own form has whole prompts"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([turn("a", [1, 2]), turn("a", [2, 3], delay=1)], r":2: hash_ids: some are of earlier turns.*context_mode"),
        ([turn("a", [1]), turn("a", [2], delay=1), turn("a", [1, 2], delay=1)], r":3: hash_ids: some are of earlier"),
        ([turn("a", [1]), turn("a", [2])], r":2: expected a timestamp, or a delay \(ms\)"),
        ([turn("", [1], delay=5)], r":1: timestamp: this key is required.*session_id"),
        ([turn("a", [1]), turn("a", [2], delay=-5)], r":2: delay: expected a value greater"),
        ([turn("a", [1], context_mode="other")], r":1: context_mode: expected"),
        (
            [{"session_id": "a", "input_length": 512, "output_length": 9}],
            r":1: hash_ids: this key is required; .*tokeni",
        ),
    ],
)
def test_turns_of_which_the_prompt_cannot_be_known_are_refused(tmp_path: Path, lines: list[Line], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, *lines)


# Chats, and logs of lookups.


def test_chats_of_bailian_are_whole_prompts_with_blocks_of_16_tokens(tmp_path: Path) -> None:
    common: Line = {"output_length": 5, "type": "text"}
    lines = [
        {
            **common,
            "chat_id": 7,
            "parent_chat_id": -1,
            "turn": 1,
            "timestamp": 61.114,
            "input_length": 90,
            "hash_ids": [*range(6)],
        },
        {
            **common,
            "chat_id": 8,
            "parent_chat_id": 7,
            "turn": 2,
            "timestamp": 62.5,
            "input_length": 150,
            "hash_ids": [*range(10)],
        },
        {
            **common,
            "chat_id": 9,
            "parent_chat_id": -1,
            "turn": 1,
            "timestamp": 63,
            "input_length": 200,
            "hash_ids": [*range(13)],
        },
    ]
    requests = read(tmp_path, *lines)
    assert [(each.timestamp_ms, each.session) for each in requests] == [(61_114, "7"), (62_500, "7"), (63_000, "9")]
    assert block_tokens(requests) == 16
    assert hit_curve(requests).rate(100) == (6 + 10) / 29


def test_a_log_of_lookups_is_read(tmp_path: Path) -> None:
    line = {"timestamp": 1711929600.5, "request_id": "r", "model_name": "m", "chunk_size": 256, "seq_len": 600}
    one, two = read(tmp_path, {**line, "chunk_hashes": ["0xab", "0xcd"]}, {**line, "chunk_hashes": ["0xab"]})
    assert (one.timestamp_ms, one.input_length, one.hash_ids[:1]) == (1_711_929_600_500, 600, two.hash_ids)


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [([(6758, 14), (7322, 15)], 512), ([(20064, 313), (29372, 458)], 64), ([(100, 1), (100, 99)], 0), ([], 0)],
)
def test_the_tokens_of_a_block_are_known_by_the_lengths(sizes: list[tuple[int, int]], tokens: int) -> None:
    assert block_tokens([Request(0, length, 1, tuple(range(blocks))) for length, blocks in sizes]) == tokens


# What cannot be read.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x", "BurstGPT"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", "Azure's trace"),
        ('[{"id": "a", "conversations": [{"from": "human", "value": "hello"}]}]', "ShareGPT"),
        ('[\n  {\n    "id": "a",\n    "conversations": []\n  }\n]\n', "ShareGPT"),
        ('{"id": "a", "conversations": []}', "ShareGPT"),
        (json.dumps({"backend": "vllm", "request_throughput": 5.0, "input_lens": [4]}), "result of a benchmark"),
        (json.dumps({"backend": "vllm", "request_throughput": 5.0}, indent=1), "result of a benchmark"),
        ('{"custom_id": "1", "body": {}}', "requests of an API"),
        ('{"messages": []}', "requests of an API"),
        ("[2025-01-01 10:00:00] LMCache INFO: Reqid: 0, Total tokens 512, LMCache hit tokens: 256", "lookup_hashes_"),
        ("LMCache INFO: Reqid: 0", "lookup_hashes_"),
        ("a,b\n1,2\n", "a CSV file is not read"),
        ("timestamp,hash_ids\n1,2\n", "CSV file is not read.*hash_ids as a list"),
        (json.dumps([{"timestamp": 1, "input_length": 1, "hash_ids": [1]}]), "JSON array is not read.*jq -c"),
        ("[\n{}\n]", "JSON array is not read.*jq -c"),
        ("[" * 100_000, "JSON array is not read"),
        ("[]", "JSON array"),
        ("{\n}{\n}", "not a JSON object.*jq -c"),
        ("{", "not a JSON object"),
        ("hello", "not a JSON object"),
        ("5", "expected a mapping"),
        (b"PAR1\x00\xff", "Parquet"),
        (b"PK\x03\x04\xff", "compressed with zip: decompress it"),
        (lzma.compress(b"{}"), "compressed with xz: decompress it"),
        (bz2.compress(b"{}"), "compressed with bzip2: decompress it"),
        ("{}".encode("utf-16"), "UTF-16: write it in UTF-8"),
        (b"\xff\xff\x00", "not a JSON object"),
    ],
)
def test_a_file_of_another_form_is_named_with_what_to_do(tmp_path: Path, text: str | bytes, problem: str) -> None:
    found = error(tmp_path, text)
    assert found.location == f"{tmp_path / 'trace.jsonl'}:1"
    with pytest.raises(ConfigError, match=problem):
        raise found


@pytest.mark.parametrize("verb", ["simulate", "replay"])
def test_the_command_says_it_without_a_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str) -> None:
    (tmp_path / "stack.yaml").write_text("namespace: {model: any}\nblock: {bytes: 4KiB}\nprimary: {capacity: 1MiB}\n")
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    said = Command(capsys, verb).err(str(tmp_path / "stack.yaml"), "--trace", str(tmp_path / "trace.csv"))
    assert "trace.csv:1: Azure's trace of LLM inference has the lengths of prompts, and no ids of blocks" in said


# The shortest LRU agrees.

CHATS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=30)
"""Turns: which of four sessions has it, and how many blocks it adds."""


def added(turns: Sequence[tuple[int, int]]) -> list[tuple[int, list[int], list[int]]]:
    """Return for each turn its session, the ids that it adds, and the whole prompt; the first block is shared."""
    prompts: dict[int, list[int]] = {}
    found = []
    for number, blocks in turns:
        before = prompts.setdefault(number, [])
        at = 1000 * (number + 1) + len(before)
        new = [*([] if before else [0]), *range(at, at + blocks)]
        before += new
        found.append((number, new, list(before)))
    return found


@pytest.mark.parametrize("form", ["mooncake", "bailian", "turns", "delays", "agents", "lookups"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(turns=CHATS, size=st.integers(1, 60))
def test_lru_of_each_form_hits_what_the_shortest_lru_hits(
    tmp_path: Path, form: str, turns: list[tuple[int, int]], size: int
) -> None:
    lines: list[Line] = []
    prompts: list[list[object]] = []
    last_s: dict[int, int] = {}
    for at_s, (number, new, whole) in enumerate(added(turns)):
        prompts.append(list(whole))
        length = {"input_length": 512 * len(whole), "output_length": 1}
        since_s = at_s - last_s.get(number, 0)
        if form == "mooncake":
            lines.append({"timestamp": 1000 * at_s, **length, "hash_ids": whole})
        elif form == "bailian":
            parent = 100 * number + last_s[number] if number in last_s else -1
            lines.append(
                {
                    "chat_id": 100 * number + at_s,
                    "parent_chat_id": parent,
                    "timestamp": at_s,
                    **length,
                    "hash_ids": whole,
                }
            )
        elif form == "turns":
            lines.append(turn(f"s{number}", new, timestamp=1000 * at_s))
        elif form == "delays":
            lines.append(turn(f"s{number}", new, delay=1000 * since_s))
        elif form == "lookups":
            lines.append({"timestamp": at_s, "seq_len": 1, "chunk_hashes": [f"0x{each:x}" for each in whole]})
        else:
            prompts[-1] = [(number, each) for each in whole]
            lines.append({"number": number, "call": call(at_s, whole)})
        last_s[number] = at_s
    if form == "delays":
        lines.sort(key=lambda line: line["session_id"])  # a session after the other, as such traces have them
    if form == "agents":
        numbers = sorted({line["number"] for line in lines})
        lines = [session(f"s{each}", *(line["call"] for line in lines if line["number"] == each)) for each in numbers]
    requests = read(tmp_path, *lines)
    curve = hit_curve(requests)
    assert curve.blocks == sum(map(len, prompts))
    assert hit_rate("lru", max(size, curve.longest_blocks), requests, curve).hit_rate == pytest.approx(
        hits_by_lru(prompts, max(size, curve.longest_blocks)) / curve.blocks, abs=1e-6
    )


@pytest.mark.parametrize("requests_max", [400, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["conversation_trace", "agents_trace"])
def test_lru_of_a_published_trace_hits_what_the_shortest_lru_hits(name: str, requests_max: int | None) -> None:
    file = TRACES / f"{name}.jsonl"
    if not file.exists():
        pytest.skip("the published trace is not here")
    requests = list(read_trace(file, requests_max=requests_max))
    curve = hit_curve(requests)
    for size in (curve.longest_blocks, 1000, 10_000):
        size = max(size, curve.longest_blocks)
        hits = hits_by_lru((request.hash_ids for request in requests), size)
        assert hit_rate("lru", size, requests, curve).hit_rate == pytest.approx(hits / curve.blocks, abs=1e-6)
    assert block_tokens(requests) == 512
