"""The prompts in the logs of engines: vLLM's and SGLang's.

vLLM writes the tokens of a prompt with `--enable-log-requests` and the level DEBUG; SGLang with `--log-requests
--log-requests-level 3`, as text or as JSON. `trace` gives each line of a log, on the command's thread; lines of other
kinds are passed over. What must stay true: a prompt that the engine cut off is an error, not a shorter prompt.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from tiered_kv.errors import ConfigError
from tiered_kv.workload.forms import Form
from tiered_kv.workload.prompts import Content, Prompt, PromptBlocks, contents_of
from tiered_kv.workload.request import Request

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VLLM_TIME = re.compile(r"(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))? \[")
_VLLM_PROMPT = re.compile(
    r"\] Request (\S+) details: prompt: (.*), prompt_token_ids: (None|\[[\d, ]*\]), prompt_embeds"
)
_VLLM_OUTPUT = re.compile(r"\] Generated response (\S+?)(?: \(streaming (\w+)\))?[ :].*output_token_ids: \[([\d, ]*)\]")
_VLLM_BARE = re.compile(r"\] Received request \S+: ")
_SGLANG_JSON = re.compile(r'\{"timestamp": "[^"]*", "event": "request\.(received|finished)"')
_SGLANG_TEXT = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] (Receive|Finish): obj=GenerateReqInput\(")
_PIECES = re.compile(r"""\[[\d, ]*\]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[\](){},]|[^'"\[\](){},]+""", re.DOTALL)
_NUMBERS = re.compile(r"\[[\d, ]*\]")
_HEALTH_CHECK = "HEALTH_CHECK"
_CUT = " ... "
_CUT_CHARACTERS: Final = 2048
"""The longest text, and the longest list, that SGLang's level 2 writes whole."""
_APART = ("lora_path", "image_data", "video_data", "audio_data", "extra_key")
"""Fields of SGLang's requests on which the blocks depend, beside the tokens."""
_HALF_A_YEAR_S: Final = 182 * 86_400
_YEAR_S: Final = 366 * 86_400  # times without a year are read as of 2000, which has a 29th of February

_NO_VLLM_PROMPTS = "vLLM's log has no prompts: start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
_NO_SGLANG_PROMPTS = "SGLang's log has no whole prompts: start SGLang with --log-requests --log-requests-level 3"


class EngineLog:
    """Collects the requests of one log. One thread calls."""

    def __init__(self, blocks: PromptBlocks) -> None:
        self._blocks = blocks
        self._found: list[Request] = []
        self._by_id: dict[str, int] = {}
        """The place in `_found` of the last request with an id."""
        self._is_bare = False
        self._year_s = 0
        self._last_s = 0.0
        self.form: Form | None = None

    def add(self, line: str, where: str) -> None:
        """Take a line; raise `ConfigError` if it is of a request whose prompt cannot be known."""
        if "\x1b" in line:
            line = _COLOUR.sub("", line)
        if found := _VLLM_PROMPT.search(line):
            self.form = Form.VLLM
            name, text, tokens = found.groups()
            content = _literal(text if tokens == "None" else tokens, where)
            if content is not None:  # otherwise the prompt is embeddings
                self._append(name, Prompt(self._vllm_ms(line, where), content), where)
        elif found := _VLLM_OUTPUT.search(line):
            name, part, tokens = found.groups()
            length = len(tokens.split(",")) if tokens else 0
            self._set_output(name, length, adds=part == "delta")
        elif _VLLM_BARE.search(line):
            self._is_bare = True
        elif found := _SGLANG_JSON.search(line):
            self._add_sglang(json_object(line[found.start() :]), where)
        elif found := _SGLANG_TEXT.search(line):
            self._add_sglang(_text_event(line, found, where), where)

    def requests(self, where: str) -> list[Request]:
        """Return the requests by their times; `where` is the place of the log, for messages."""
        if not self._found and self._is_bare:
            raise ConfigError(_NO_VLLM_PROMPTS, location=where)
        return sorted(self._found, key=lambda request: request.timestamp_ms)

    def _append(self, name: str, prompt: Prompt, where: str) -> None:
        self._by_id[name] = len(self._found)
        self._found.append(self._blocks.request(prompt, where))

    def _set_output(self, name: str, length: int, *, adds: bool = False) -> None:
        place = self._by_id.get(name)
        if place is not None and length:
            before = self._found[place]
            self._found[place] = replace(before, output_length=length + (before.output_length if adds else 0))

    def _vllm_ms(self, line: str, where: str) -> int:
        """Return a time of vLLM's log, which has no year."""
        found = _VLLM_TIME.search(line)
        if found is None:
            raise ConfigError("expected vLLM's time before the message, such as 11-30 10:00:00", location=where)
        month, day, hour, minute, second = map(int, found.groups()[:5])
        try:
            at_s = datetime(2000, month, day, hour, minute, second, tzinfo=UTC).timestamp() + self._year_s
        except ValueError as error:
            raise ConfigError(f"expected a time: {error}", location=where) from error
        if at_s < self._last_s - _HALF_A_YEAR_S:
            self._year_s += _YEAR_S
            at_s += _YEAR_S
        self._last_s = max(self._last_s, at_s)
        return round(1000 * (at_s + float(f"0.{found[6] or 0}")))

    def _add_sglang(self, event: Mapping[str, object], where: str) -> None:
        obj, out = _mapping(event.get("obj")), _mapping(event.get("out"))
        meta = _mapping(out.get("meta_info"))
        names = obj.get("rid")
        is_batch = isinstance(names, list)
        names = names if isinstance(names, list) else [names]
        if _HEALTH_CHECK in str(names[:1]):
            return
        self.form = Form.SGLANG
        output = meta.get("completion_tokens")
        length = output if type(output) is int and output >= 0 else 0
        if event.get("event") == "request.finished" and str(names[0]) in self._by_id:
            self._set_output(str(names[0]), length)
            return
        at_s = _seconds(event.get("timestamp"), where)
        latency_s = meta.get("e2e_latency")
        if isinstance(latency_s, (int, float)) and 0 <= latency_s <= at_s:
            at_s -= latency_s
        contents = contents_of(obj)
        if not {"text", "input_ids"} & obj.keys() or any(map(_is_cut, contents)):
            raise ConfigError(_NO_SGLANG_PROMPTS, location=where)
        if len(contents) != len(names) or (len(contents) > 1 and not is_batch):
            return  # embeddings; or a batch, of which each request has a line of its own when it ends
        session = obj.get("session_id")
        apart = {name: obj[name] for name in _APART if obj.get(name)}
        for name, content in zip(names, contents, strict=True):
            prompt = Prompt(
                round(1000 * at_s),
                content,
                length,
                session if isinstance(session, str) else "",
                json.dumps(apart, default=str, sort_keys=True) if apart else "",
            )
            self._append(str(name), prompt, where)


def json_object(text: str) -> Mapping[str, object]:
    """Return the JSON object of a text; an empty one if it is none."""
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _seconds(time: object, where: str) -> float:
    try:
        found = datetime.fromisoformat(str(time))
    except ValueError as error:
        raise ConfigError(f"timestamp: expected a time in ISO 8601, found {time!r:.40}", location=where) from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _is_cut(content: Content) -> bool:
    """Return whether SGLang left out the middle of a prompt."""
    if isinstance(content, str):
        half = _CUT_CHARACTERS // 2
        return len(content) == _CUT_CHARACTERS + 3 and content[half : half + 3] == "..."
    return isinstance(content, list) and "..." in content


def _text_event(line: str, found: re.Match[str], where: str) -> dict[str, object]:
    """Return the event of a line of SGLang's text format, as its JSON format has it."""
    obj: dict[str, object] = {}
    end = found.end()
    for after, name, value in _fields(line, found.end()):
        end = after
        if name in ("rid", "session_id", "text", "input_ids", *_APART):
            obj[name] = None if value == "None" else value if name in _APART else _literal(value, where)
    lengths = re.findall(r"'completion_tokens': (\d+)", line[end:])
    latencies = re.findall(r"'e2e_latency': ([\d.]+)", line[end:])
    meta: dict[str, object] = {}
    if lengths:
        meta["completion_tokens"] = int(lengths[-1])
    if latencies:
        meta["e2e_latency"] = float(latencies[-1])
    event = "request.received" if found[2] == "Receive" else "request.finished"
    return {"timestamp": found[1], "event": event, "obj": obj, "out": {"meta_info": meta}}


def _fields(line: str, begin: int) -> Iterator[tuple[int, str, str]]:
    """Yield the end, the name and the text of each argument in Python's text of a call, whose first one is at
    `begin`."""
    depth, start = 0, begin
    for piece in _PIECES.finditer(line, begin):
        text = piece[0]
        if text in ("[", "(", "{"):
            depth += 1
        elif (text == "," and not depth) or (text in ("]", ")", "}") and not depth):
            name, _, value = line[start : piece.start()].strip().partition("=")
            yield piece.end(), name, value
            if text != ",":
                return
            start = piece.end()
        elif text in ("]", ")", "}"):
            depth -= 1


def _literal(text: str, where: str) -> Content | None:
    """Return the value that Python wrote as `text`: a text, a list of numbers or texts, or None."""
    try:
        value = json.loads(text) if _NUMBERS.fullmatch(text) else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        if _CUT in text:
            raise ConfigError(_NO_SGLANG_PROMPTS, location=where) from error
        value = ...
    if value is None or isinstance(value, (str, list)):
        return value
    raise ConfigError("expected a prompt as Python writes a text or a list", location=where)
