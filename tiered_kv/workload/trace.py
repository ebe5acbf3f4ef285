"""Reads the requests of a trace, from a file or a folder.

A trace has JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: the format of the traces
released with Mooncake (Qin et al., FAST'25). `session` and `hints` may be added. Other fields are ignored. Tools that
write such traces differ, so a value with only one meaning is read: 12.0 for 12, ids that are texts, a file of `gzip`.
Forms of other publishers are read too: `turns` reads forms with a request in each line, `agents` forms with an object
for each session. `known_formats` names formats that cannot be read.

The command calls this, on its thread. A file is read once and forwards, so that it may be a pipe. What stays true: a
line is a request or an error that names the file, the line and the key; a last line that is cut off, as by a crash of
the program that wrote it, is left out.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.workload.agents import AgentSessions, is_session
from tiered_kv.workload.known_formats import array_advice, object_advice, text_advice
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
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

Entry = tuple[object, str]
"""A JSON value, and its place as PATH:LINE."""


def read_trace(path: Path, *, requests_max: int | None = None, time_unit: str = "") -> Iterator[Request]:
    """Yield the requests of a trace, at most `requests_max`; empty lines are skipped.

    Requests come one line at a time, up to the first line with a `session_id` or without a timestamp. Before the
    request of this line, the trace is read to its end. Requests with relative times, or of agents, come in the order of
    their times. `time_unit` is the unit of times, "s" or "ms"; by default the unit of the trace's form.
    """
    with closing(_of_folder(path) if path.is_dir() else _of_file(path)) as entries:
        first = next(entries, None)
        if first is None:
            raise ConfigError("the trace is empty: expected a request in each line", location=str(path))
        if is_session(first[0]):
            sessions = AgentSessions(time_unit, requests_max)
            for entry, where in chain([first], entries):
                sessions.add(entry, where)
            yield from sessions.requests()
        elif path.is_dir():
            problem = "a folder holds agents' sessions (hash_id_scope, requests); give any other trace as one file"
            raise ConfigError(problem, location=first[1])
        else:
            yield from islice(_of_lines(chain([first], entries), time_unit), requests_max)


def _of_lines(entries: Iterator[Entry], time_unit: str) -> Iterator[Request]:
    turns = Turns(time_unit)
    requests = (turns.request(entry, where) for entry, where in entries)
    for request in requests:
        if turns.have_sessions:
            rest = [request, *requests]
            if turns.are_relative:
                rest.sort(key=lambda each: each.timestamp_ms)
            yield from rest
        else:
            yield request


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


def _of_file(path: Path) -> Generator[Entry, None, None]:
    try:
        with path.open("rb") as file, _decompressed(file, path) as plain:
            yield from _entries(plain, str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"cannot decompress the trace {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _decompressed(file: BufferedReader, path: Path) -> BufferedReader | gzip.GzipFile:
    begin = file.peek(8)  # the file may be a pipe
    program = next((name for magic, name in _COMPRESSED.items() if begin.startswith(magic)), "")
    if program:
        problem = f"a file compressed with {program}: decompress it, or compress it with gzip"
        raise ConfigError(problem, location=f"{path}:1")
    if begin.startswith(_UTF_16):
        raise ConfigError("a text in UTF-16: write it in UTF-8 (iconv -f UTF-16 -t UTF-8)", location=f"{path}:1")
    return gzip.GzipFile(fileobj=file) if begin.startswith(_GZIP) else file


def _entries(plain: BufferedReader | gzip.GzipFile, path: str) -> Iterator[Entry]:
    is_first = True
    lines = iter(lambda: plain.readline(LINE_BYTES_MAX + 1), b"")
    for number, begin in enumerate(lines, 1):
        where = f"{path}:{number}"
        line = begin
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
            yield _whole(line, plain, where, error), where
            continue
        if is_first and (advice := _advice_on_value(entry, line)):
            raise ConfigError(advice, location=where)
        is_first = False
        yield entry, where


def _whole(line: bytes, plain: BufferedReader | gzip.GzipFile, where: str, error: Exception) -> object:
    """Return the only object of a file, which is written in several lines."""
    is_object = line.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
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
    head = text[:_HEAD_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n")
    is_array = head[:1] == b"[" and head[1:].lstrip()[:1] in (b"", b"{", b"[", b"]", b'"')  # a log may begin with "["
    return array_advice(head) if is_array else text_advice(head)
