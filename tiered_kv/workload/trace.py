"""Reads the requests of a trace, from a file or a folder.

A trace has JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: the format of the traces
released with Mooncake (Qin et al., FAST'25). `session` and `hints` may be added. Other fields are ignored. Tools that
write such traces differ, so a value with only one meaning is read: 12.0 for 12, ids that are texts, a file of `gzip`.
Forms of other publishers are read too: `turns` reads forms with a request in each line, `agents` forms with an object
for each session, `logs` and `reports` the prompts in what engines and benchmarks write. `known_formats` names formats
that cannot be read.

The command calls this, on its thread. A file is read once and forwards, so that it may be a pipe. What stays true: a
line is a request or an error that names the file, the line and the key; a last line that is cut off, as by a crash of
the program that wrote it, is left out.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.workload.agents import AgentSessions, is_session
from tiered_kv.workload.forms import Form
from tiered_kv.workload.known_formats import array_advice, object_advice, text_advice
from tiered_kv.workload.logs import EngineLog
from tiered_kv.workload.prompts import CONVERT, Content, Prompt, PromptBlocks
from tiered_kv.workload.reports import aiperf_prompts, guidellm_prompts, is_aiperf_record, is_guidellm_report
from tiered_kv.workload.request import Request
from tiered_kv.workload.turns import Turns

_log = logging.getLogger(__name__)

LINE_BYTES_MAX = 4 << 20
"""A longer line is an error; a prompt of a hundred thousand blocks fits."""
SESSION_BYTES_MAX = 64 << 20
"""A longer object with all requests of a session is an error."""
_HEAD_BYTES = 1 << 16
"""Bytes of an unreadable file that are searched, to name its format."""
_GZIP = b"\x1f\x8b"
_COMPRESSED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"7z\xbc\xaf\x27\x1c": "7-Zip",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
"""The first bytes of files that other programs have compressed."""
_SPACE = b"\xef\xbb\xbf \t\r\n"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

Entry = tuple[object, str]
"""A JSON value or a `Request`, and its place as PATH:LINE."""
_Plain = BufferedReader | gzip.GzipFile
_OfLog = Callable[[Iterable[tuple[str, str]], str], Iterator[Entry]]
"""Gets the lines of a text with their places, and yields the requests; none if the text is no log."""


def read_trace(path: Path, *, requests_max: int | None = None, time_unit: str = "") -> Iterator[Request]:
    """Yield the requests of a trace with ids of blocks; see `Trace`."""
    yield from Trace(path, requests_max=requests_max, time_unit=time_unit).requests()


class Trace:
    """A trace, which is read once. One thread calls.

    Args:
        path: A file, or a folder of agents' sessions.
        requests_max: Requests that are read, at most.
        time_unit: The unit of times, "s" or "ms"; by default the unit of the trace's form.
        blocks: Makes ids of prompts; without it a trace that has none is refused.

    Attributes:
        form: What the trace is; known from the first request on.
        left_out: Requests of a report that have no prompt.
    """

    def __init__(
        self,
        path: Path,
        *,
        requests_max: int | None = None,
        time_unit: str = "",
        blocks: PromptBlocks | None = None,
    ) -> None:
        self._path = path
        self._requests_max = requests_max
        self._time_unit = time_unit
        self._blocks = blocks
        self.form: Form | None = None
        self.left_out = 0

    def requests(self) -> Iterator[Request]:
        """Yield the requests; empty lines are skipped.

        Requests come one line at a time, up to the first line with a `session_id` or without a timestamp. Before the
        request of this line, the trace is read to its end. Requests with relative times, of agents, of logs and of
        reports come in the order of their times.
        """
        path = self._path
        with closing(_of_folder(path) if path.is_dir() else _of_file(path, self._of_log)) as entries:
            first = next(entries, None)
            if first is None:
                raise ConfigError("the trace is empty: expected a request in each line", location=str(path))
            yield from islice(self._of_entries(first, entries), self._requests_max)

    def _of_entries(self, first: Entry, rest: Iterator[Entry]) -> Iterator[Request]:
        entries = chain([first], rest)
        if isinstance(first[0], Request):
            yield from (entry for entry, _ in entries if isinstance(entry, Request))
        elif is_aiperf_record(first[0]):
            self.form = Form.AIPERF
            yield from self._by_time(
                (prompt, where) for entry, where in entries for prompt in aiperf_prompts(entry, where)
            )
        elif is_guidellm_report(first[0]):
            self.form = Form.GUIDELLM
            yield from self._by_time(
                (prompt, where) for entry, where in entries for prompt in guidellm_prompts(entry, where)
            )
        elif is_session(first[0]):
            self.form = Form.AGENTS
            sessions = AgentSessions(self._time_unit, self._requests_max)
            for entry, where in entries:
                sessions.add(entry, where)
            yield from sessions.requests()
        elif self._path.is_dir():
            problem = "a folder holds agents' sessions (hash_id_scope, requests); give any other trace as one file"
            raise ConfigError(problem, location=first[1])
        else:
            yield from self._of_lines(entries)

    def _of_lines(self, entries: Iterable[Entry]) -> Iterator[Request]:
        turns = Turns(self._time_unit, self._blocks)
        requests = (turns.request(entry, where) for entry, where in entries)
        for request in requests:
            self.form = self.form or turns.form
            if turns.have_sessions:
                rest = [request, *requests]
                if turns.are_relative:
                    rest.sort(key=lambda each: each.timestamp_ms)
                yield from rest
            else:
                yield request

    def _of_log(self, lines: Iterable[tuple[str, str]], where: str) -> Iterator[Entry]:
        """Yield the requests of an engine's log; none if it is no such log."""
        log = EngineLog(self._blocks or _Refused())
        for line, place in lines:
            log.add(line, place)
        self.form = log.form
        yield from ((request, where) for request in log.requests(where))

    def _by_time(self, prompts: Iterable[tuple[Prompt | None, str]]) -> list[Request]:
        blocks = self._blocks or _Refused()
        found = []
        for prompt, where in prompts:
            if prompt is None:
                self.left_out += 1
            else:
                found.append(blocks.request(prompt, where))
        if not found:
            problem = f"{self.left_out} requests, and none has its prompt: have guidellm keep the requests' arguments"
            raise ConfigError(problem, location=str(self._path))
        return sorted(found, key=lambda request: request.timestamp_ms)


class _Refused(PromptBlocks):
    """Refuses prompts that have no ids of blocks: a simulation or a replay needs a trace."""

    def ids_of(self, content: Content, where: str, apart: str = "") -> tuple[int, tuple[int, ...]]:
        raise ConfigError(CONVERT, location=where)


def _of_folder(path: Path) -> Generator[Entry, None, None]:
    """Yield the entries of the folder's files, in the order of their names; other files are skipped."""
    try:
        files = sorted(each for each in path.iterdir() if each.name.endswith(_ENDINGS) and each.name[0] != ".")
    except OSError as error:
        raise ConfigError(f"cannot read the folder {path}: {error.strerror}") from error
    if not files:
        raise ConfigError(f"the folder has no file that ends with {', '.join(_ENDINGS)}", location=str(path))
    for file in files:
        yield from _of_file(file)


def _of_file(path: Path, of_log: _OfLog | None = None) -> Generator[Entry, None, None]:
    try:
        with path.open("rb") as file, _decompressed(file, path) as plain:
            yield from _entries(plain, str(path), of_log)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"cannot decompress the trace {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _decompressed(file: BufferedReader, path: Path) -> _Plain:
    begin = file.peek(8)  # the file may be a pipe
    program = next((name for magic, name in _COMPRESSED.items() if begin.startswith(magic)), "")
    if program:
        problem = f"a file compressed with {program}: decompress it, or compress it with gzip"
        raise ConfigError(problem, location=f"{path}:1")
    if begin.startswith(_UTF_16):
        raise ConfigError("a text in UTF-16: write it in UTF-8 (iconv -f UTF-16 -t UTF-8)", location=f"{path}:1")
    return gzip.GzipFile(fileobj=file) if begin.startswith(_GZIP) else file


def _entries(plain: _Plain, path: str, of_log: _OfLog | None) -> Iterator[Entry]:
    is_first = True
    for number, line in enumerate(_lines(plain), 1):
        where = f"{path}:{number}"
        if len(line) > LINE_BYTES_MAX and b'"requests"' in line:
            line += plain.readline(SESSION_BYTES_MAX + 1 - len(line))
            _refuse_longer(line, where)
        elif len(line) > LINE_BYTES_MAX:
            advice = _advice_on_text(line) if is_first else ""
            raise ConfigError(
                f"the line is longer than {format_bytes(LINE_BYTES_MAX)}{advice and f': {advice}'}", location=where
            )
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not is_first:
                if line[-1:] != b"\n":
                    _log.warning("%s: the last line is cut off, and left out", where)
                    return
                raise ConfigError(f"not a JSON object: {error}", location=where) from error
            if of_log is not None and _may_be_log(line):
                yield from _of_text(line, plain, where, of_log, error)
            else:
                yield _whole(line, plain, where, error), where
            continue
        if is_first and (advice := _advice_on_value(entry, line)):
            raise ConfigError(advice, location=where)
        is_first = False
        yield entry, where


def _lines(plain: _Plain) -> Iterator[bytes]:
    return iter(lambda: plain.readline(LINE_BYTES_MAX + 1), b"")


def _may_be_log(line: bytes) -> bool:
    """Return whether a text that begins with this line, which is no JSON, may be a log."""
    return line.lstrip(_SPACE)[:1] not in (b"{", b"}") and not _is_array(line) and b"\0" not in line


def _of_text(first: bytes, plain: _Plain, where: str, of_log: _OfLog, error: Exception) -> Iterator[Entry]:
    """Yield the requests of a log; a text that is none is an error, which says what it is."""
    path, _, at = where.rpartition(":")
    head = bytearray(first)

    def lines() -> Iterator[tuple[str, str]]:
        yield first.decode(errors="replace"), where
        for number, line in enumerate(_lines(plain), int(at) + 1):
            place = f"{path}:{number}"
            if len(line) > LINE_BYTES_MAX:
                line += plain.readline(SESSION_BYTES_MAX + 1 - len(line))
                _refuse_longer(line, place)
            if len(head) < _HEAD_BYTES:
                head.extend(line)
            yield line.decode(errors="replace"), place

    requests = of_log(lines(), path)
    first_request = next(requests, None)
    if first_request is None:
        raise ConfigError(_advice_on_text(bytes(head)) or f"not a JSON object: {error}", location=where) from error
    yield first_request
    yield from requests


def _whole(line: bytes, plain: _Plain, where: str, error: Exception) -> object:
    """Return the only object of a file, which is written in several lines."""
    is_object = line.lstrip(_SPACE).startswith(b"{")
    text = line + plain.read(SESSION_BYTES_MAX if is_object else _HEAD_BYTES)
    _refuse_longer(text, where)
    if not is_object:
        raise ConfigError(_advice_on_text(text) or f"not a JSON object: {error}", location=where) from error
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as why:
        advice = "; a file of several objects has each in one line: jq -c . FILE" if b"\n" in text.strip() else ""
        raise ConfigError(f"not a JSON object: {why}{advice}", location=where) from why
    if advice := _advice_on_value(entry, text):
        raise ConfigError(advice, location=where)
    return entry


def _refuse_longer(text: bytes, where: str) -> None:
    if len(text) > SESSION_BYTES_MAX:
        raise ConfigError(f"the session is longer than {format_bytes(SESSION_BYTES_MAX)}", location=where)


def _advice_on_value(entry: object, text: bytes) -> str:
    if isinstance(entry, list):
        return _advice_on_text(text)
    return object_advice(entry.keys()) if isinstance(entry, dict) and not is_session(entry) else ""


def _advice_on_text(text: bytes) -> str:
    """Return what can be done with a text that is no JSON object; empty if it is of no known format."""
    head = text[:_HEAD_BYTES].lstrip(_SPACE)
    return array_advice(head) if _is_array(head) else text_advice(head)


def _is_array(text: bytes) -> bool:
    head = text.lstrip(_SPACE)
    return head[:1] == b"[" and head[1:].lstrip()[:1] in (b"", b"{", b"[", b"]", b'"')  # a log may begin with "["
