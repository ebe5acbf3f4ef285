"""The built-in workload: reproducible chats that share what they should."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import BLOCK_TOKENS, ChatWorkload, Request, block_key
from tiered_kv.workload.trace import LINE_BYTES_MAX, read_trace

SMALL = ChatWorkload(chats=10, turns=4, active_chats=3, turn_blocks=2, system_prompts=2, system_blocks=5)


def chats_of(workload: ChatWorkload) -> dict[int, list[Request]]:
    """The requests of each chat, by the first block after the system prompt."""
    chats: dict[int, list[Request]] = {}
    for request in workload.requests():
        chats.setdefault(request.hash_ids[workload.system_blocks], []).append(request)
    return chats


def test_another_process_gives_the_same_requests() -> None:
    program = "from tiered_kv.workload.request import ChatWorkload as W; print(list(W(chats=3).requests()))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(list(ChatWorkload(chats=3).requests()))


def test_another_seed_shares_no_block() -> None:
    def blocks(seed: int) -> set[int]:
        return {id for request in ChatWorkload(seed=seed, chats=5).requests() for id in request.hash_ids}

    assert not blocks(0) & blocks(1)


def test_there_are_as_many_requests_as_announced() -> None:
    requests = list(SMALL.requests())
    assert len(requests) == SMALL.requests_total == 40
    chats = chats_of(SMALL)
    assert len(chats) == 10
    assert {len(turns) for turns in chats.values()} == {4}


def test_each_turn_has_the_one_before_as_prefix() -> None:
    for turns in chats_of(SMALL).values():
        for earlier, later in itertools.pairwise(turns):
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids
            assert 1 <= len(later.hash_ids) - len(earlier.hash_ids) <= 3
            assert later.timestamp_ms > earlier.timestamp_ms
            assert later.input_length == len(later.hash_ids) * BLOCK_TOKENS


def test_chats_share_system_prompts_and_nothing_else() -> None:
    last_turns = [turns[-1].hash_ids for turns in chats_of(SMALL).values()]
    assert len({ids[:5] for ids in last_turns}) == 2
    own = [id for ids in last_turns for id in ids[5:]]
    assert len(own) == len(set(own))


def test_as_many_chats_are_active_as_asked_for() -> None:
    seen: dict[int, int] = {}
    for request in SMALL.requests():
        seen[request.hash_ids[5]] = seen.get(request.hash_ids[5], 0) + 1
        assert sum(turns < SMALL.turns for turns in seen.values()) <= 3


@pytest.mark.parametrize("name", ["chats", "turns", "active_chats", "turn_blocks", "system_prompts"])
def test_a_number_out_of_its_range_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1, found 0"):
        ChatWorkload(**{name: 0})


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 20, "hash_ids": [0, 7]}
REAL_TRACE = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl"


def written(path: Path, *lines: object) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_lines_become_requests_in_their_order(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, "", GOOD | {"timestamp": 6, "hash_ids": [], "type": "a field that is not known"})
    assert list(read_trace(file)) == [Request(5, 600, 20, (0, 7)), Request(6, 600, 20, ())]


WITHOUT_OUTPUT = {name: value for name, value in GOOD.items() if name != "output_length"}


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        (GOOD | {"timestamp": 5.75}, Request(5, 600, 20, (0, 7))),
        (GOOD | {"timestamp": 5.0, "input_length": 600.0, "output_length": 20.0}, Request(5, 600, 20, (0, 7))),
        (GOOD | {"hash_ids": [0.0, 7.0]}, Request(5, 600, 20, (0, 7))),
        (GOOD | {"hash_ids": ["0", "7"]}, Request(5, 600, 20, (0, 7))),
        (WITHOUT_OUTPUT, Request(5, 600, 0, (0, 7))),
        (GOOD | {"output_length": None}, Request(5, 600, 0, (0, 7))),
    ],
)
def test_what_has_one_meaning_is_read(tmp_path: Path, line: object, request_: Request) -> None:
    assert list(read_trace(written(tmp_path, line))) == [request_]


def test_ids_that_are_texts_name_the_same_blocks_in_every_line(tmp_path: Path) -> None:
    ids = ["a3f", "007", "7", "\udc80"]
    first, second = read_trace(written(tmp_path, GOOD | {"hash_ids": ids}, GOOD | {"hash_ids": ids[:2]}))
    assert len(set(first.hash_ids)) == 4
    assert first.hash_ids[:2] == second.hash_ids


@pytest.mark.parametrize("end", ["\r\n", "\n\n  \n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_files_of_other_programs_are_read(tmp_path: Path, end: str, mark: str, is_compressed: bool) -> None:
    file = tmp_path / "trace"  # without an ending: its first bytes say what it is
    text = (mark + end.join([json.dumps(GOOD)] * 3)).encode()
    file.write_bytes(gzip.compress(text) if is_compressed else text)
    assert list(read_trace(file)) == [Request(5, 600, 20, (0, 7))] * 3


def test_a_trace_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "pipe")
    writer = threading.Thread(target=file.write_bytes, args=(gzip.compress(json.dumps(GOOD).encode()),))
    writer.start()
    assert len(list(read_trace(file))) == 1
    writer.join()


def test_a_compressed_trace_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(json.dumps(GOOD).encode() * 100)
    for damaged in (whole[:-9], whole[:20], whole[:15] + b"\xff" * 9 + whole[24:], whole[:-8] + bytes(8)):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot decompress the trace .*trace\.jsonl\.gz: |trace\.jsonl\.gz:1: "):
            list(read_trace(file))
    file.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(ConfigError, match="compressed with zstd: decompress it"):
        list(read_trace(file))


def test_a_bad_line_of_a_compressed_trace_has_its_number(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b"\n{\n"))
    with pytest.raises(ConfigError) as caught:
        list(read_trace(file))
    assert caught.value.location == f"{file}:2"


def test_it_stops_after_the_requests_that_were_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD, GOOD, "this line is never looked at")
    assert len(list(read_trace(file, requests_max=2))) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("[1]", r"expected a mapping with the keys timestamp, .*hash_ids, found a list"),
        ({"timestamp": 5, "input_length": 600, "output_length": 20}, "hash_ids: this key is required"),
        (GOOD | {"input_length": -1}, "input_length: expected a value greater than or equal to 0, found -1"),
        (GOOD | {"timestamp": float("inf")}, "timestamp: expected .*, found inf"),
        (GOOD | {"hash_ids": [1, -2]}, "hash_ids: expected ids from 0 to"),
        (GOOD | {"hash_ids": [2**64]}, "hash_ids: expected ids from 0 to"),
        (GOOD | {"hash_ids": [1.5]}, "hash_ids: expected ids that are whole numbers"),
        (GOOD | {"hash_ids": ["7", 7]}, "cannot be repeated, as 7 is"),
        (GOOD | {"hash_ids": [""]}, "hash_ids: expected ids that are whole numbers"),
        (GOOD | {"hash_ids": [True]}, "hash_ids: expected ids that are whole numbers"),
        (GOOD | {"input_length": 12.5}, "input_length: expected a whole number, found 12.5"),
        (GOOD | {"input_length": None}, "input_length: expected a whole number, found nothing"),
        (GOOD | {"timestamp": -1.5}, "timestamp: expected a value greater than or equal to 0, found -1.5"),
        (GOOD | {"hash_ids": [3, 1, 2, 1, 3]}, "cannot be repeated, as 1 is"),
    ],
)
def test_a_bad_line_says_where_and_what(tmp_path: Path, line: object, problem: str) -> None:
    file = tmp_path / "trace.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_bytes((json.dumps(GOOD) + "\n" + text + "\n").encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=problem) as caught:
        list(read_trace(file))
    assert caught.value.location == f"{file}:2"


def test_a_line_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 4MiB"):
        list(read_trace(written(tmp_path, "1" * (LINE_BYTES_MAX + 1))))


def test_an_absent_trace_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*absent: No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"the folder has no file that ends with \.json"):
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
