"""A small S3 on loopback: objects in a dictionary, and any other answer that a test sets."""

from __future__ import annotations

import email.utils
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl

import pytest

from tests.support.entries import rig_of
from tests.support.loopback import LoopbackServer
from tiered_kv.testing.rig import TierRig
from tiered_kv.toolkit.epoch import EpochMark

WAIT_S = 60.0
"""How long a job or a lookup may take before the test fails."""
BLOCK_BYTES = 4096
EPOCH = "00000000000000aa"
MARK = EpochMark(0, EPOCH).encode()


@dataclass(frozen=True, slots=True)
class Request:
    """A request; header names and values in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Then:
    """Bytes that are sent before the connection ends, and how it ends: "close", "reset" or "stall"."""

    data: bytes
    end: str


Reply = bytes | Then
OpenRig = Callable[..., TierRig]


def answer(status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> bytes:
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status} x", f"content-length: {size}", f"date: {email.utils.formatdate(usegmt=True)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(status: int, code: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code></Error>".encode())


def hours_ago(hours: float) -> str:
    return email.utils.formatdate(time.time() - hours * 3600, usegmt=True)


def _cut_off(data: bytes) -> bytes:
    return answer(200, data[: len(data) // 2], length=len(data), etag='"e"', last_modified=hours_ago(0))


FAULTS: dict[str, Callable[[bytes], Reply]] = {  # by name, from the object's bytes
    "slow_down": lambda _: error(503, "SlowDown"),
    "throttled": lambda _: error(429, "TooManyRequests"),
    "error_500": lambda _: error(500, "InternalError"),
    "chunked_503": lambda _: b"HTTP/1.1 503 x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n<Code\r\n2\r\n>a\r\n0\r\n\r\n",
    "reset": lambda _: Then(b"", "reset"),
    "close": lambda _: Then(b"", "close"),
    "garbage": lambda _: Then(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "close"),
    "denied": lambda _: error(403, "AccessDenied"),
    "no_bucket": lambda _: error(404, "NoSuchBucket"),
    "expired": lambda _: error(400, "ExpiredToken"),
    "moved": lambda _: answer(301, x_amz_bucket_region="eu-west-1"),
    "truncate": lambda data: Then(_cut_off(data), "close"),
    "stall": lambda data: Then(_cut_off(data) if data else b"", "stall"),
    "flip": lambda data: answer(
        200, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], etag='"e"', last_modified=hours_ago(0)
    ),
}


class FakeS3(LoopbackServer):
    """Serves stored objects, unless `reply` or a fault replaces the answer; the epoch mark is a day old."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reply: Callable[[Request], Reply | None] = lambda request: None
        """Called first; None for the answer of a bucket."""
        self.faults: dict[str, deque[str]] = {method: deque() for method in ("GET", "PUT", "HEAD", "DELETE")}
        """Names of `FAULTS`, each for one request for a block."""
        self.always: dict[str, str] = {}
        """Faults for all requests of a method for blocks."""
        self.bad_objects: dict[str, str] = {}
        """Faults for all requests for one block, by the end of its name."""
        self.written_s: dict[str, float] = {}
        """When each object was written, by its target; others are new."""
        self.page_objects = 1000
        self.seen: list[Request] = []
        self.has_mark = True
        self._stopping = threading.Event()
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def entry(self) -> dict[str, object]:
        """The YAML entry of an s3 tier in its one bucket, without a presence cache."""
        secrets = {"access_key_id": "id", "secret_access_key": "secret"}
        bucket = {"type": "s3", "bucket": "bucket", "endpoint_url": self.url, "connections": 4}
        return {**bucket, **secrets, "presence_ttl": 0}

    def count(self, method: str) -> int:
        """Return the number of requests for blocks."""
        return sum(request.method == method and "/blocks/" in request.target for request in self.seen)

    def close(self) -> None:
        self._stopping.set()
        super().close()

    def serve(self, sock: socket.socket) -> None:
        # A request that is no HTTP, or whose method is unknown, ends the connection.
        with suppress(ValueError, KeyError), sock.makefile("rb") as reading:
            while line := reading.readline():
                method, target, _ = line.decode().split()
                fields = iter(reading.readline, b"\r\n")
                headers = dict(field.decode().strip().lower().split(": ", 1) for field in fields)
                body = reading.read(int(headers.get("content-length", "0")))
                request = Request(method, target, headers, body)
                self.seen.append(request)
                reply = self._reply(request)
                sock.sendall(reply.data if isinstance(reply, Then) else reply)
                if isinstance(reply, Then):
                    if reply.end == "stall":
                        self._stopping.wait()
                    if reply.end == "reset":
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return

    def _reply(self, request: Request) -> Reply:
        method, target = request.method, request.target
        if self.has_mark and method == "GET" and target.endswith("/epoch"):
            return answer(200, MARK, etag='"e"', last_modified=hours_ago(24))
        reply = self.reply(request)
        if reply is None:
            fault = self._fault_of(request)
            reply = FAULTS[fault](self.objects.get(target, b"")) if fault else self.served(request)
        if method == "HEAD" and isinstance(reply, bytes):
            return reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return reply

    def _fault_of(self, request: Request) -> str:
        if "/blocks/" not in request.target:
            return ""
        waiting = self.faults[request.method]
        bad = self.bad_objects.get(request.target[-32:], "")
        return bad or (waiting.popleft() if waiting else self.always.get(request.method, ""))

    def served(self, request: Request) -> bytes:
        """Answer as a bucket does."""
        target, _, query = request.target.partition("?")
        if query and request.method != "DELETE":
            return self._listed(dict(parse_qsl(query, keep_blank_values=True)), request.body)
        if request.method == "PUT":
            if "x-amz-copy-source" not in request.headers:
                self.objects[target] = request.body
            self.written_s[target] = time.time()
            return answer(200, b"<CopyObjectResult/>" if "x-amz-copy-source" in request.headers else b"")
        if request.method == "DELETE":
            self.objects.pop(target, None)
            return answer(204)
        data = self.objects.get(target)
        written_s = self.written_s.get(target, time.time())
        modified = email.utils.formatdate(written_s, usegmt=True)
        return error(404, "NoSuchKey") if data is None else answer(200, data, last_modified=modified)

    def _listed(self, query: Mapping[str, str], body: bytes) -> bytes:
        """Answer a request for the whole bucket: to delete objects, or to list objects or versions."""
        if "delete" in query:
            for name in re.findall("<Key>(.*?)</Key>", body.decode()):
                self.objects.pop(f"/bucket/{name}", None)
            return answer(200, b"<DeleteResult/>")
        after = max(query.get(name, "") for name in ("continuation-token", "start-after", "marker", "key-marker"))
        names = sorted(target.removeprefix("/bucket/") for target in self.objects)
        names = [name for name in names if name.startswith(query.get("prefix", "")) and name > after]
        limit = min(self.page_objects, int(query.get("max-keys", 1000)))
        page, more = names[:limit], len(names) > limit
        kind, entry = ("ListVersionsResult", "Version") if "versions" in query else ("ListBucketResult", "Contents")
        texts = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
        if more:
            first_next = {"Version": "NextKeyMarker", "Contents": "NextContinuationToken"}[entry]
            texts.append(f"<{first_next}>{page[-1]}</{first_next}>")
        for name in page:
            written_s = self.written_s.get(f"/bucket/{name}", time.time())
            modified = datetime.fromtimestamp(written_s, UTC).isoformat()
            size = len(self.objects.get(f"/bucket/{name}", b""))
            version = "<VersionId>null</VersionId><IsLatest>true</IsLatest>" if entry == "Version" else ""
            texts.append(
                f"<{entry}><Key>{name}</Key><LastModified>{modified}</LastModified><ETag>e</ETag><Size>{size}</Size>"
                f"{version}</{entry}>"
            )
        return answer(200, f"<{kind}>{''.join(texts)}</{kind}>".encode())


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture
def open_rig(server: FakeS3, closing: ExitStack) -> OpenRig:
    """Opens tiers with timeouts that a busy machine does not reach.

    A stalled server is left after `request_timeout`: a test with such a server sets it.
    """
    patience = {"job_timeout": 10 * WAIT_S, "request_timeout": WAIT_S, "lookup_timeout": WAIT_S}

    def open_one(**changes: object) -> TierRig:
        rig = rig_of({**server.entry, **patience, **changes}, block_bytes=BLOCK_BYTES, wait_s=2 * WAIT_S)
        closing.callback(rig.close)
        return rig

    return open_one
