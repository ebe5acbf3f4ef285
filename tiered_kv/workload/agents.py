"""Agents' traces: an object for each session, with all requests of the session and of its subagents.

The form is that of the traces published with kv-cache-tester: `id`, `block_size` (tokens), `hash_id_scope`, and
`requests` with `t` (seconds), `in`, `out` and `hash_ids`. An entry of type "subagent" has further `requests`. With the
scope "local", as without one, ids are those of the session: two sessions share no block. With "global" they do.

`trace` adds the objects one after the other, and takes the requests when it has read all objects. Both happen on the
command's thread. What must stay true: the requests come in the order of their times. Every request, also one of a
subagent, has the name of its session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, cast

from pydantic import BaseModel, Field

from tiered_kv.errors import ConfigError
from tiered_kv.workload.fields import HashIds, Time, Whole, checked, milliseconds
from tiered_kv.workload.request import Request, id_number

_DEPTH_MAX = 16
"""How deep subagents may start others."""


class _AgentSession(BaseModel):
    id: str | int
    block_size: int | None = Field(default=None, ge=1, le=1 << 20)
    hash_id_scope: Literal["local", "global"] | None = None
    requests: list[object]


class _AgentCall(BaseModel):
    t: Time
    input_length: Whole = Field(alias="in")
    output_length: Whole | None = Field(alias="out", default=0)
    hash_ids: HashIds


class _Subagent(BaseModel):
    t: Time
    requests: list[object]


class _LocalIds(dict[int, int]):
    """Numbers of blocks that differ between all sessions, by the ids in one session's `hash_ids`."""

    def __init__(self, session: str) -> None:
        super().__init__()
        self._session = session

    def __missing__(self, hash_id: int) -> int:
        number = self[hash_id] = id_number(f"block {hash_id} of {self._session}")
        return number


def is_session(entry: object) -> bool:
    """Return whether an entry of a trace is one of an agents' trace."""
    return isinstance(entry, dict) and ("requests" in entry or "hash_id_scope" in entry) and "timestamp" not in entry


class AgentSessions:
    """Sessions that were read. Of their requests, at most `requests_max` are kept if it is given: the earliest."""

    def __init__(self, time_unit: str, requests_max: int | None) -> None:
        self._is_in_seconds = time_unit != "ms"
        self._requests_max = requests_max
        self._found: list[Request] = []
        self._names: set[str] = set()
        self._block_size: int | None = None

    def add(self, entry: object, where: str) -> None:
        """Add the requests of a session. `where` is the place of `entry` in the trace, for messages."""
        session = checked(_AgentSession, entry, where, "")
        if session.block_size != (self._block_size or session.block_size):
            problem = f"expected blocks of {self._block_size} tokens, as in sessions before, found {session.block_size}"
            raise ConfigError(problem, location=f"{where}: block_size")
        self._block_size = session.block_size
        name = str(session.id)
        if name in self._names:
            raise ConfigError(f"expected another id for each session, found '{name}' again", location=f"{where}: id")
        self._names.add(name)
        calls = self._calls(session.requests, where, "requests", 0)
        if session.hash_id_scope != "global":
            ids = _LocalIds(name)
            calls = (replace(call, hash_ids=tuple(map(ids.__getitem__, call.hash_ids))) for call in calls)
        self._found += (replace(call, session=name) for call in calls)
        if self._requests_max is not None and len(self._found) > 2 * self._requests_max:
            self._found = self.requests()

    def requests(self) -> list[Request]:
        """Return the requests in the order of their times."""
        return sorted(self._found, key=lambda request: request.timestamp_ms)[: self._requests_max]

    def _calls(self, entries: Sequence[object], where: str, place: str, depth: int) -> Iterator[Request]:
        for number, entry in enumerate(entries):
            here = f"{place}.{number}"
            has_requests = isinstance(entry, dict) and "requests" in entry
            if has_requests:
                if depth == _DEPTH_MAX:
                    raise ConfigError(f"expected subagents at most {_DEPTH_MAX} deep", location=f"{where}: {here}")
                yield from self._of_subagent(checked(_Subagent, entry, where, here), where, here, depth)
            is_started = isinstance(entry, dict) and entry.get("type") == "subagent"
            if (has_requests or is_started) and "hash_ids" not in cast("dict[str, object]", entry):
                continue  # it has no prompt of its own
            call = checked(_AgentCall, entry, where, here)
            at_ms = milliseconds(call.t, is_in_seconds=self._is_in_seconds)
            ids = cast("tuple[int, ...]", call.hash_ids)
            yield Request(at_ms, call.input_length, call.output_length or 0, ids)

    def _of_subagent(self, subagent: _Subagent, where: str, here: str, depth: int) -> Iterator[Request]:
        calls = list(self._calls(subagent.requests, where, f"{here}.requests", depth + 1))
        began_ms = milliseconds(subagent.t, is_in_seconds=self._is_in_seconds)
        # Times of a subagent's requests count from its start in the published traces, and from the session's in others.
        since_ms = began_ms if any(call.timestamp_ms < began_ms for call in calls) else 0
        return (replace(call, timestamp_ms=call.timestamp_ms + since_ms) for call in calls)
