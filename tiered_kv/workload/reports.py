"""Prompts in the results of benchmarks: aiperf's raw records, and guidellm's report.

`trace` gives the JSON values, on the command's thread. What must stay true: a request whose prompt the tool did not
keep is counted as left out, and never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import BaseModel, Field

from tiered_kv.errors import ConfigError
from tiered_kv.workload.fields import Whole, checked, milliseconds
from tiered_kv.workload.prompts import Prompt, contents_of

_NS_PER_MS = 1_000_000
_Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class _AiperfMetadata(BaseModel):
    request_start_ns: Whole
    x_correlation_id: str | None = None
    conversation_id: str | None = None


class _AiperfRecord(BaseModel):
    metadata: _AiperfMetadata
    payload: dict[str, object]


class _Usage(BaseModel):
    text_tokens: int | None = Field(default=None, ge=0)


class _GuidellmInfo(BaseModel):
    conversation_id: str | None = None


class _GuidellmRequest(BaseModel):
    request_args: str | None = None
    request_start_time: _Seconds | None = None
    info: _GuidellmInfo = _GuidellmInfo()
    output_metrics: _Usage = _Usage()


class _GuidellmRequests(BaseModel):
    successful: list[_GuidellmRequest] | None = None
    incomplete: list[_GuidellmRequest] | None = None
    errored: list[_GuidellmRequest] | None = None


class _GuidellmBenchmark(BaseModel):
    requests: _GuidellmRequests


class _GuidellmReport(BaseModel):
    benchmarks: list[_GuidellmBenchmark]


def is_aiperf_record(entry: object) -> bool:
    """Return whether an entry is a line of aiperf's `profile_export_raw.jsonl`."""
    return isinstance(entry, dict) and {"metadata", "payload"} <= entry.keys()


def is_guidellm_report(entry: object) -> bool:
    """Return whether an entry is guidellm's `benchmarks.json`."""
    return isinstance(entry, dict) and isinstance(entry.get("benchmarks"), list)


def aiperf_prompts(entry: object, where: str) -> list[Prompt]:
    """Return the prompts of one record: several if the request asked for several."""
    record = checked(_AiperfRecord, entry, where)
    about = record.metadata
    session = about.x_correlation_id or about.conversation_id or ""
    contents = contents_of(record.payload)
    if not contents:
        raise ConfigError("payload: expected messages or a prompt", location=where)
    return [Prompt(about.request_start_ns // _NS_PER_MS, content, 0, session) for content in contents]


def guidellm_prompts(entry: object, where: str) -> Iterator[Prompt | None]:
    """Yield the prompts of a report; None for a request whose arguments were not kept."""
    for benchmark in checked(_GuidellmReport, entry, where).benchmarks:
        by_status = benchmark.requests
        for request in (*(by_status.successful or ()), *(by_status.incomplete or ()), *(by_status.errored or ())):
            contents = contents_of(_body(request.request_args))
            if not contents or request.request_start_time is None:
                yield None
                continue
            at_ms = milliseconds(request.request_start_time, is_in_seconds=True)
            session = request.info.conversation_id or ""
            for content in contents:
                yield Prompt(at_ms, content, request.output_metrics.text_tokens or 0, session)


def _body(arguments: str | None) -> Mapping[str, object]:
    try:
        found = json.loads(arguments or "null")
    except (ValueError, RecursionError):
        return {}
    body = found.get("body") if isinstance(found, dict) else None
    return body if isinstance(body, dict) else {}
