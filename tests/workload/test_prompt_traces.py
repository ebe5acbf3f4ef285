"""Prompts in the logs of engines and the results of benchmarks become requests with the blocks of their tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_kv.errors import ConfigError
from tiered_kv.workload.forms import Form
from tiered_kv.workload.prompts import PromptBlocks, open_tokenizer
from tiered_kv.workload.request import Request
from tiered_kv.workload.trace import Trace, read_trace

Line = dict[str, Any]


class Letters:
    """A tokenizer for tests: a token for each character."""

    def encode(self, text: str) -> Sequence[int]:
        return [*map(ord, text)]

    def encode_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> Sequence[int]:
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages if isinstance(each, dict)))


def read(path: Path, *lines: str, block_tokens: int = 4, tokenizer: bool = True) -> tuple[Trace, list[Request]]:
    file = path / "log"
    file.write_text("\n".join(lines) + "\n")
    trace = Trace(file, blocks=PromptBlocks(block_tokens, Letters() if tokenizer else None))
    return trace, list(trace.requests())


def vllm(at: str, name: str, text: str | None, tokens: list[int] | None) -> str:
    about = f"prompt: {text!r}, prompt_token_ids: {tokens}, prompt_embeds shape: None."
    return f"(APIServer pid=7) DEBUG {at} [request_logger.py:52] Request {name} details: {about}"


def shared(first: Request, second: Request) -> int:
    """Return how many blocks at the head two requests share."""
    return sum(one == other for one, other in zip(first.hash_ids, second.hash_ids, strict=False))


def test_the_tokens_in_a_log_of_vllm_are_read(tmp_path: Path) -> None:
    tokens = [*range(10)]
    trace, (first, second, third) = read(
        tmp_path,
        "INFO 11-30 10:00:00 [api_server.py:5] vLLM API server, version 0.33.0",
        vllm("11-30 10:00:01", "cmpl-1-0", "it's, prompt_token_ids: [9], prompt_embeds", tokens),
        "(APIServer pid=7) INFO 11-30 10:00:01 [request_logger.py:66] Received request cmpl-1-0: params: x.",
        f"\x1b[1;36m{vllm('11-30 10:00:04', 'cmpl-2-0', None, [*tokens[:8], 5, 5])}\x1b[0;0m",
        "(APIServer pid=7) DEBUG 11-30 10:00:05 [request_logger.py:99] Generated response cmpl-1-0 details: "
        "output_token_ids: [7, 8, 9]",
        "DEBUG 11-30 10:00:05 [request_logger.py:99] Generated response cmpl-2-0 (streaming delta): output: 'a', "
        "output_token_ids: [7], finish_reason: None",
        "DEBUG 11-30 10:00:05 [request_logger.py:99] Generated response cmpl-2-0 (streaming delta): output: 'a', "
        "output_token_ids: [8, 1], finish_reason: stop",
        vllm("11-30 10:00:06", "cmpl-3-0", "text", None),
        tokenizer=True,
    )
    assert trace.form is Form.VLLM
    assert [each.timestamp_ms - first.timestamp_ms for each in (second, third)] == [3000, 5000]
    assert [(each.input_length, len(each.hash_ids), each.output_length) for each in (first, second, third)] == [
        (10, 2, 3),
        (10, 2, 3),
        (4, 1, 0),
    ]
    assert shared(first, second) == 2
    assert shared(first, third) == 0


def test_a_log_of_vllm_goes_on_in_the_new_year(tmp_path: Path) -> None:
    _, (first, second) = read(
        tmp_path, vllm("12-31 23:59:59", "a", "", [1] * 4), vllm("01-01 00:00:01", "b", "", [1] * 4)
    )
    assert second.timestamp_ms - first.timestamp_ms == 2000


def sglang(event: str, at_s: float, name: str, **more: object) -> Line:
    obj = {"rid": name, "session_id": None, "text": None, "input_ids": None, "image_data": None, **more}
    return {"timestamp": f"2026-11-30T10:00:{at_s:09.6f}", "event": f"request.{event}", "rid": name, "obj": obj}


def as_text(line: Line) -> str:
    """Return what SGLang's text format has of an event."""
    obj = ", ".join(f"{name}={value!r}" for name, value in line["obj"].items())
    end = f", out={line['out']!r}" if "out" in line else ""
    verb = "Receive" if line["event"] == "request.received" else "Finish"
    return f"[2026-11-30 {line['timestamp'][11:19]}] {verb}: obj=GenerateReqInput({obj}){end}"


def as_json(line: Line) -> str:
    return f"[2026-11-30 {line['timestamp'][11:19]}] {json.dumps(line)}"


@pytest.mark.parametrize("write", [as_text, as_json])
def test_both_formats_of_sglang_s_log_are_read(tmp_path: Path, write: Any) -> None:
    tokens = [*range(10)]
    odd = "it's \"input_ids=[1, 2]\", rid='x', text=(\n\\ ["
    out = {"text": "'completion_tokens': 99", "meta_info": {"completion_tokens": 6, "e2e_latency": 2.5}}
    trace, (late, first, text, image) = read(
        tmp_path,
        "some other line, with commas",
        write(sglang("received", 1, "HEALTH_CHECK_5", input_ids=tokens)),
        write(sglang("received", 3, "r1", input_ids=tokens, session_id="s")),
        write(sglang("received", 4, "r2", text=odd)),
        write({**sglang("finished", 5, "r1", input_ids=tokens, session_id="s"), "out": out}),
        write({**sglang("finished", 5, "r0", input_ids=tokens), "out": out}),
        write(sglang("received", 6, "r3", input_ids=tokens, image_data=["a.png"])),
    )
    assert trace.form is Form.SGLANG
    assert [each.timestamp_ms - first.timestamp_ms for each in (late, text, image)] == [-500, 1000, 3000]
    assert (first.session, first.output_length, late.output_length, text.output_length) == ("s", 6, 6, 0)
    assert text.input_length == len(odd)
    assert shared(first, late) == 2
    assert shared(first, image) == 0, "an image's blocks depend on the image"


@pytest.mark.parametrize("write", [as_text, as_json])
@pytest.mark.parametrize("content", ["text", "input_ids"])
def test_a_prompt_that_sglang_cut_off_is_refused(tmp_path: Path, write: Any, content: str) -> None:
    line = sglang("received", 3, "r1", **{content: "CUT"})
    if write is as_json:
        cut: object = [*range(1024), "...", *range(1024)] if content == "input_ids" else "a" * 1024 + "..." + "b" * 1024
        text = write(sglang("received", 3, "r1", **{content: cut}))
    else:
        half = "[1, 2] ... [3, 4]" if content == "input_ids" else "'aa' ... 'bb'"
        text = write(line).replace("'CUT'", half)
    with pytest.raises(ConfigError, match=r"log:2: SGLang's log has no whole prompts.*--log-requests-level 3"):
        read(tmp_path, "first", text)
    left_out = as_json(sglang("received", 3, "r1")).replace('"text": null, "input_ids": null, ', "")
    with pytest.raises(ConfigError, match="--log-requests-level 3"):
        read(tmp_path, left_out)


def test_a_log_without_prompts_says_which_option_writes_them(tmp_path: Path) -> None:
    line = "INFO 11-30 10:00:01 [request_logger.py:66] Received request cmpl-1-0: params: x, lora_request: None."
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        read(tmp_path, line)
    with pytest.raises(ConfigError, match=r"log:1: it has the text of prompts: give --tokenizer"):
        read(tmp_path, vllm("11-30 10:00:01", "a", "text", None), tokenizer=False)


def test_aiperf_s_raw_records_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    def record(at_s: int, name: str, **payload: object) -> str:
        about = {"session_num": 0, "request_start_ns": at_s * 10**9, "x_correlation_id": name, "worker_id": "w"}
        return json.dumps({"metadata": about, "payload": {"model": "m", **payload}, "responses": []})

    chat = [{"role": "user", "content": "hello"}]
    trace, (first, second, third) = read(
        tmp_path,
        record(5, "b", prompt="hello, you"),
        record(3, "a", messages=[*chat, {"role": "user", "content": "more"}]),
        record(1, "a", messages=chat),
    )
    assert trace.form is Form.AIPERF
    assert [(each.timestamp_ms, each.session) for each in (first, second, third)] == [
        (1000, "a"),
        (3000, "a"),
        (5000, "b"),
    ]
    assert shared(first, second) == len("<user>hello") // 4
    with pytest.raises(ConfigError, match="log:1: payload: expected messages or a prompt"):
        read(tmp_path, record(5, "b", input="x"))


@pytest.mark.parametrize("indent", [None, 2])
def test_guidellm_s_report_is_read_but_for_requests_without_arguments(tmp_path: Path, indent: int | None) -> None:
    def request(at_s: float | None, body: object) -> Line:
        arguments = None if body is None else json.dumps({"method": "POST", "body": body})
        info = {"conversation_id": "c"}
        return {
            "request_args": arguments,
            "request_start_time": at_s,
            "info": info,
            "output_metrics": {"text_tokens": 7},
        }

    requests = {
        "successful": [request(2.5, {"prompt": [1, 2, 3, 4]}), request(9, None), request(None, {"prompt": "a"})],
        "errored": [request(1.5, {"messages": [{"role": "user", "content": "hello"}]})],
        "incomplete": [],
        "total": None,
    }
    report = json.dumps({"metadata": {}, "config": {}, "benchmarks": [{"requests": requests}]}, indent=indent)
    trace, (first, second) = read(tmp_path, report)
    assert (trace.form, trace.left_out) == (Form.GUIDELLM, 2)
    assert [(each.timestamp_ms, each.input_length) for each in (first, second)] == [(1500, 11), (2500, 4)]
    assert (second.session, second.output_length) == ("c", 7)
    requests["successful"], requests["errored"] = [request(9, None)], []
    with pytest.raises(ConfigError, match="1 requests, and none has its prompt"):
        read(tmp_path, json.dumps({"metadata": {}, "benchmarks": [{"requests": requests}]}))


def test_texts_in_a_trace_of_aiperf_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    lines: list[Line] = [
        {"timestamp": 0, "text_input": "hello, you", "output_length": 3},
        {"timestamp": 1000, "messages": chat, "session_id": "s"},
        {"delay": 500, "messages": [*chat, *chat], "session_id": "s"},
        {"timestamp": 2000, "payload": {"prompt": "hello, you two"}},
    ]
    trace, requests = read(tmp_path, *map(json.dumps, lines))
    assert trace.form is Form.TEXTS
    assert [(each.timestamp_ms, each.session, each.input_length) for each in requests] == [
        (0, "", 10),
        (1000, "s", 11),
        (1500, "s", 22),
        (2000, "", 14),
    ]
    assert shared(requests[1], requests[2]) == 2
    turns = [{"session_id": "s", "text_input": "a", "timestamp": 1}, {"session_id": "s", "text_input": "b", "delay": 1}]
    with pytest.raises(ConfigError, match="log:2: expected a whole prompt in each line"):
        read(tmp_path, *map(json.dumps, turns))


@pytest.mark.parametrize(
    "line",
    [
        vllm("11-30 10:00:01", "a", None, [1]),
        as_json(sglang("received", 1, "a", text="b")),
        json.dumps({"timestamp": 1, "messages": []}),
        json.dumps({"metadata": {"request_start_ns": 5}, "payload": {"prompt": "a"}}),
    ],
)
def test_a_simulation_asks_for_a_trace(tmp_path: Path, line: str) -> None:
    (tmp_path / "log").write_text(line)
    with pytest.raises(ConfigError, match="make a trace of it by 'tiered-kv trace FILE"):
        list(read_trace(tmp_path / "log"))


def test_aiperf_s_records_of_metrics_name_the_file_with_prompts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--export-level raw"):
        read(tmp_path, json.dumps({"metadata": {"request_start_ns": 5}, "metrics": {}}))


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9))
def test_prompts_share_the_whole_blocks_of_their_common_head(one: list[int], other: list[int], size: int) -> None:
    blocks = PromptBlocks(size)
    (_, first), (_, second) = (blocks.ids_of(tokens, "") for tokens in (one, other))
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert [a == b for a, b in zip(first, second, strict=False)].count(True) == same // size
    assert (len(first), len(second)) == (len(one) // size, len(other) // size)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 2**32), line=st.sampled_from(["vllm", "text", "json"]))
def test_a_damaged_line_is_passed_over_or_refused(tmp_path: Path, seed: int, line: str) -> None:
    chance = random.Random(seed)
    event = {**sglang("finished", 5, "r1", input_ids=[1, 2, 3], text="a'b"), "out": {"meta_info": {"e2e_latency": 1.5}}}
    texts = {"vllm": vllm("11-30 10:00:01", "a", "te'xt", [1, 2, 3]), "text": as_text(event), "json": as_json(event)}
    text = texts[line]
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(["", "'", "]", "{", ",", "9", "\\", "\n"]) + text[at + chance.randint(0, 3) :]
    try:
        read(tmp_path, text or "x")
    except ConfigError:
        pass


@pytest.mark.slow  # imports Transformers
def test_the_tokens_are_those_of_the_model_s_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 5, "you": 6, "<u>": 7, "?": 0}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    about: Line = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("hello you") == [5, 6]
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "you"}], None)
    about["chat_template"] = "{% for each in messages %}<u> {{ each['content'] }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert open_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "hello"}], None) == [7, 5]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="reads no tokenizer"):
        open_tokenizer(tmp_path)
