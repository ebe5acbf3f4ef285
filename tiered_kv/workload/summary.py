"""What a trace has, and the trace in our own form.

The command `trace` calls it, on its thread. What must stay true: what `write_trace` writes, `read_trace` reads as the
same requests, but for the numbers of blocks, and times that count from the first request.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.workload.request import Request, block_tokens
from tiered_kv.workload.trace import LINE_BYTES_MAX

_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of a trace.

    Args:
        requests: Requests.
        sessions: Sessions that the trace names.
        span_seconds: Between the first and the last request.
        block_tokens: Tokens of a block by the lengths of the prompts; 0 if these do not tell.
        prompt_tokens: Tokens of all prompts.
        output_tokens: Tokens of all outputs that are known.
        blocks: Blocks that requests ask for.
        distinct_blocks: Of these, different ones.
        repeated_share: Share of the different blocks that more than one request asks for.
        hit_rate: Share of the blocks that a cache which keeps everything has.
    """

    requests: int
    sessions: int
    span_seconds: float
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    blocks: int
    distinct_blocks: int
    repeated_share: float
    hit_rate: float


def summarize(requests: Sequence[Request]) -> Summary:
    """Return the counts of all requests of a trace."""
    uses = Counter[int]()
    hits = blocks = 0
    for request in requests:
        ids = request.hash_ids
        hits += next((at for at, each in enumerate(ids) if each not in uses), len(ids))
        blocks += len(ids)
        uses.update(ids)
    times = [request.timestamp_ms for request in requests]
    return Summary(
        requests=len(requests),
        sessions=len({request.session for request in requests} - {""}),
        span_seconds=(max(times, default=0) - min(times, default=0)) / 1000,
        block_tokens=block_tokens(requests),
        prompt_tokens=sum(request.input_length for request in requests),
        output_tokens=sum(request.output_length for request in requests),
        blocks=blocks,
        distinct_blocks=len(uses),
        repeated_share=round(sum(count > 1 for count in uses.values()) / max(len(uses), 1), 6),
        hit_rate=round(hits / max(blocks, 1), 6),
    )


def write_trace(requests: Sequence[Request], path: Path) -> None:
    """Write the requests as JSON lines into a new file; one that cannot be written whole is removed again.

    Blocks are numbered in the order in which requests ask for them, so the file does not tell their ids. Times count
    from the first request. Names of sessions and hints are kept.

    Raises:
        ConfigError: The file is there already, or cannot be written.
    """
    numbers: dict[int, int] = {}
    begin_ms = min((request.timestamp_ms for request in requests), default=0)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already; remove it, or name another file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with open(fd, "w", encoding="utf-8") as file:
            for request in requests:
                line = _line(request, numbers, begin_ms)
                if len(line) > LINE_BYTES_MAX:
                    problem = f"a prompt of {len(request.hash_ids)} blocks: a line has at most"
                    raise ConfigError(f"{problem} {format_bytes(LINE_BYTES_MAX)}", location=str(path))
                file.write(line)
    except BaseException as error:
        with suppress(OSError):
            path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        raise


def _line(request: Request, numbers: dict[int, int], begin_ms: int) -> str:
    fields: dict[str, object] = {
        "timestamp": request.timestamp_ms - begin_ms,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": [numbers.setdefault(each, len(numbers)) for each in request.hash_ids],
    }
    if request.session:
        fields["session"] = request.session
    if request.hints is not None:
        fields["hints"] = request.hints
    return json.dumps(fields, separators=(",", ":")) + "\n"
