"""A stub that serves a process's status, and statuses to serve."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from tests.support.loopback import LoopbackServer
from tiered_kv.cli.ask import StackStatus, read_status

Status = dict[str, Any]  # Any: JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("9" * 400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
"""Any JSON."""

BUCKETS = ("0.001", "0.01", "0.1", "+Inf")


def tier(name: str, counters: Mapping[str, object] | None = None, **fields: object) -> Status:
    """Return the status of an idle tier, with the given counters and fields."""
    budgets = {each: {"used_bytes": 64, "limit_bytes": 128} for each in ("store", "load")}
    idle: Status = {
        "name": name,
        "type": name,
        "breaker": "" if name == "cpu" else "closed",
        "is_disabled": False,
        "removal": "",
        "note": "",
        "used_bytes": 1 << 20,
        "capacity_bytes": 4 << 20,
        "counters": dict(counters or {}),
    }
    return {**idle, **({} if name == "cpu" else {"budgets": budgets}), **fields}


def status(*tiers: Status, uptime_s: float = 10.0, pid: int = 1, **fields: object) -> Status:
    return {
        "version": "1.2.3",
        "namespace": "ab" * 16,
        "pid": pid,
        "uptime_seconds": uptime_s,
        "time": 1000.0 + uptime_s,
        "tiers": list(tiers),
        "notices": [],
        **fields,
    }


def histogram(*counts: int) -> Status:
    """Return a histogram with these counts up to 1, 10, and 100 ms, and above."""
    return {"sum": 1.0, "count": sum(counts), "buckets": dict(zip(BUCKETS, counts, strict=True))}


def response(body: bytes | Status, line: str = "HTTP/1.1 200 OK") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"{line}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def answer(source: object) -> StackStatus:
    return read_status(json.dumps(source).encode())


def busy(uptime_s: float, times: int, **fields: Any) -> Status:
    """Return the status of a stack in which the same events happened `times` times."""
    cpu = {
        "blocks_total": {"hit": 60 * times, "miss": 40 * times},
        "loaded_bytes_total": 4_000_000 * times,
        "stored_bytes_total": 1_000_000 * times,
        "restored_tokens_total": 1600 * times,
        "misses_total": {"evicted": 40 * times, "absent": 0},
        "step_seconds": histogram(100 * times, 0, 0, 0),
    }
    disk = {
        "blocks_total": {"hit": 30 * times, "miss": 10 * times},
        "loaded_bytes_total": 2_000_000 * times,
        "misses_total": {"absent": 10 * times},
        "skipped_blocks_total": {"budget": 5 * times},
        "failed_blocks_total": {"load": {"checksum": times}},
        "job_seconds": {"load": histogram(0, 0, 100 * times, 0), "store": histogram(0, 0, 0, 0)},
    }
    return status(tier("cpu", cpu), tier("disk", disk), uptime_s=uptime_s, **fields)


class StatusServer(LoopbackServer):
    """Answers each connection with the bytes of `answer`, and closes it; `requests` has the raw request heads."""

    def __init__(self, answer: Callable[[], bytes]) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        super().__init__()

    def serve(self, sock: socket.socket) -> None:
        self.requests.append(sock.recv(1 << 16))
        sock.sendall(self.answer())
