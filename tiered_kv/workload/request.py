"""Requests of a workload: from a trace, or the built-in chats; and the keys of their blocks.

A trace has JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`: the format of the traces
released with Mooncake (Qin et al., FAST'25). `session` and `hints` may be added. Other fields are ignored. Tools that
write such traces differ, so whatever has one meaning is read: 12.0 for 12, ids that are texts, a file that `gzip` made,
`session_id`, and the chats of Qwen-Bailian's traces (`chat_id`, `parent_chat_id`), whose times are seconds.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, Field

from tiered_kv.base import OffloadKey, make_offload_key
from tiered_kv.config.units import format_bytes
from tiered_kv.config.validation import check
from tiered_kv.errors import ConfigError
from tiered_kv.hints import Hints

HASH_ID_MAX = 2**64 - 1
BLOCK_TOKENS = 512
"""Tokens in a block, as in the published traces."""

_KEY_PERSON = b"tiered-kv replay"
_KEY_HASH_BYTES = 16
LINE_BYTES_MAX = 4 << 20
"""A longer line is an error; a prompt of a hundred thousand blocks fits."""
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


_COMMON_REQUESTS_MIN = 50
_COMMON_SHARE = 0.01
"""A block that more requests than both of these have belongs to no session."""
_ROUGH_S = (1, 4, 16, 64, 256, 1024)
"""The times of `hints_from_sessions`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Args:
        timestamp_ms: Arrival, in milliseconds since the workload began.
        input_length: Tokens in the prompt.
        output_length: Tokens that were generated.
        hash_ids: One id for each block of the prompt, in order. An id identifies the block and all blocks
            before it, so no id occurs twice.
        session: Its requests run one after another; empty if unknown.
        hints: The request's hints, as `Hints.parse` takes them.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str = ""
    hints: Mapping[str, object] | None = None


def block_key(hash_id: int) -> OffloadKey:
    """Return the key of a block: the same in every process and on every machine."""
    digest = hashlib.blake2b(hash_id.to_bytes(8, "little"), digest_size=_KEY_HASH_BYTES, person=_KEY_PERSON).digest()
    return make_offload_key(digest, 0)


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """Multi-turn chats that share system prompts: equal settings give equal requests, in every process.

    A chat starts with one of a few system prompts. Each turn appends blocks to the prompt, so it has all earlier
    prompts of its chat as prefixes. Each request belongs to a random one of `active_chats` chats. A new chat replaces
    one that has ended. The more chats are active, the more is stored between two turns of a chat, and the lower the
    tier that still has its prefix.

    `docs/reference/command.md` describes each setting.
    """

    seed: int = 0
    chats: int = 240
    turns: int = 8
    active_chats: int = 64
    turn_blocks: int = 5
    system_prompts: int = 4
    system_blocks: int = 8

    def __post_init__(self) -> None:
        for name in ("chats", "turns", "active_chats", "turn_blocks", "system_prompts", "system_blocks"):
            found, least = getattr(self, name), 0 if name == "system_blocks" else 1
            if found < least:
                raise ConfigError(f"expected at least {least}, found {found}", location=name)

    @property
    def requests_total(self) -> int:
        return self.chats * self.turns

    def requests(self) -> Iterator[Request]:
        """Yield the requests, in order of arrival: ten in a second."""
        chance = random.Random(self.seed)
        waiting = (self._chat(number, chance) for number in range(self.chats))
        active = list(islice(waiting, self.active_chats))
        timestamp_ms = 0
        while active:
            chat = chance.choice(active)
            ids = next(chat, None)
            if ids is None:
                active.remove(chat)
                active += islice(waiting, 1)
            else:
                yield Request(timestamp_ms, len(ids) * BLOCK_TOKENS, BLOCK_TOKENS, ids)
                timestamp_ms += 100

    def _chat(self, number: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
        """Yield the blocks of each prompt of a chat."""
        prompt = chance.randrange(self.system_prompts)
        ids = [_block_id(self.seed, "system", prompt, index) for index in range(self.system_blocks)]
        for _ in range(self.turns):
            added = chance.randint(1, 2 * self.turn_blocks - 1)
            ids += [_block_id(self.seed, "chat", number, index) for index in range(len(ids), len(ids) + added)]
            yield tuple(ids)


def _block_id(*parts: int | str) -> int:
    """Return a 64-bit id, practically unique to these parts, and not one of the small ids of traces."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _numbers(ids: list[object]) -> tuple[int, ...]:
    """Return the ids as numbers: an id that is a text as its decimal digits, or the hash of another text."""
    numbers = tuple(each if type(each) is int else _number(each) for each in ids)
    if numbers and not (min(numbers) >= 0 and max(numbers) <= HASH_ID_MAX):
        raise ValueError(f"expected ids from 0 to {HASH_ID_MAX}")
    if len(set(numbers)) != len(numbers):
        raise ValueError("an id stands for a block with all before it, so it cannot be repeated")
    return numbers


def _number(hash_id: object) -> int:
    if isinstance(hash_id, float) and hash_id.is_integer():
        return int(hash_id)
    if not isinstance(hash_id, str) or not hash_id:
        raise ValueError("expected ids that are whole numbers or texts")
    if hash_id.isascii() and hash_id.isdecimal() and str(number := int(hash_id[:20])) == hash_id:
        return number
    return int.from_bytes(hashlib.blake2b(hash_id.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


_MS_PER_S = 1000
_Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]


def _valid_hints(hints: dict[str, object] | None) -> dict[str, object] | None:
    if hints is not None:
        Hints.parse(hints)
    return hints


class _Line(BaseModel):
    timestamp: Annotated[float, Field(ge=0, lt=2**53)]
    input_length: _Whole
    output_length: _Whole | None = 0
    session: str | int | None = ""
    session_id: str | int | None = ""
    chat_id: str | int | None = None
    parent_chat_id: str | int | None = None
    hints: Annotated[dict[str, object] | None, AfterValidator(_valid_hints)] = None
    hash_ids: Annotated[list[object], AfterValidator(_numbers)]


def read_trace(path: Path, *, requests_max: int | None = None, time_unit: str = "") -> Iterator[Request]:
    """Yield the requests of a trace, at most `requests_max`, one line at a time; empty lines are skipped.

    A file that was compressed with gzip is decompressed. `time_unit` is that of `timestamp`, "s" or "ms"; by default
    seconds in lines with `parent_chat_id`, and else milliseconds.
    """
    count = 0
    chats: dict[str, str] = {}  # the first chat of each one's chain
    if path.is_dir():
        raise ConfigError(f"cannot read the trace {path}: Is a directory; {_AGENTS}")
    try:
        with path.open("rb") as file, _decompressed(file, path) as plain:
            lines = iter(lambda: plain.readline(LINE_BYTES_MAX + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > LINE_BYTES_MAX:
                    problem = f"the line is longer than {format_bytes(LINE_BYTES_MAX)}"
                    raise ConfigError(problem, location=f"{path}:{number}")
                if line.strip():
                    yield _parse(line, f"{path}:{number}", chats, time_unit)
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


_AGENTS = (
    "agents' traces with an object for each session (hash_id_scope, requests) cannot be read: write a line for each of "
    "its requests, also of subagents, with timestamp (from t), input_length, output_length, session, and hash_ids that "
    "differ by session"
)


def _parse(line: bytes, where: str, chats: dict[str, str], time_unit: str) -> Request:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a JSON object: {error}", location=where) from error
    if isinstance(entry, dict) and "timestamp" not in entry:
        if "requests" in entry or "hash_id_scope" in entry:
            raise ConfigError(_AGENTS, location=where)
        if "delay" in entry:
            raise ConfigError(
                "a turn with delay has no timestamp, and only the blocks that it adds: write each request with its "
                "timestamp and all blocks of its prompt",
                location=where,
            )
    checked = check(_Line, entry)
    if isinstance(checked, list):
        raise ConfigError(str(checked[0]), location=where)
    session = next((str(each) for each in (checked.session, checked.session_id) if each not in (None, "")), "")
    if not session and checked.chat_id is not None:
        session = chats.get(str(checked.parent_chat_id), str(checked.chat_id))
        chats[str(checked.chat_id)] = session
    is_in_seconds = time_unit == "s" or (not time_unit and checked.parent_chat_id is not None)
    prompt = (
        int(checked.timestamp * (_MS_PER_S if is_in_seconds else 1)),
        checked.input_length,
        checked.output_length or 0,
        cast(tuple[int, ...], checked.hash_ids),
    )
    return Request(*prompt, session, checked.hints)


def sessions(requests: Sequence[Request]) -> list[int]:
    """Return the session of each request: the first block that only the session has; if there is none, the last one."""
    uses = Counter(each for request in requests for each in request.hash_ids)
    limit = max(_COMMON_REQUESTS_MIN, _COMMON_SHARE * len(requests))
    common = {each for each, count in uses.items() if count > limit}
    prompts = (request.hash_ids for request in requests)
    return [next((each for each in ids if each not in common), ids[-1] if ids else 0) for ids in prompts]


def session_names(requests: Sequence[Request]) -> list[str | int]:
    """Return the session of each request: as the trace names it, or else a block by which `sessions` knows it."""
    return [request.session or root for request, root in zip(requests, sessions(requests), strict=True)]


def numbered(session: str | int) -> int:
    """Return a number of 64 bits for a session."""
    return _number(f"session {session}") if isinstance(session, str) else session


def hints_from_sessions(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the hints of clients that know roughly when their session returns, and when it ends."""
    names = session_names(requests)
    returns_ms: dict[str | int, int] = {}
    hinted = []
    for request, name in zip(reversed(requests), reversed(names), strict=True):
        hints: dict[str, object] = {"ttl": 0}
        if name in returns_ms:
            wait_s = max(returns_ms[name] - request.timestamp_ms, 1) / 1000
            hints = {"expect_return": min(_ROUGH_S, key=lambda rough_s: abs(math.log(wait_s / rough_s)))}
        returns_ms[name] = request.timestamp_ms
        hinted.append(replace(request, hints=hints))
    return hinted[::-1]
