"""Requests for the bucket's objects: signed, retried within a deadline, and never copied on the way.

The tier's workers call it, several at once. A request ends by its deadline with a `Verdict`. An object counts as stored
only after the server has confirmed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import select
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tiered_kv.toolkit.objects.retries import Retries
from tiered_kv.toolkit.objects.settings import HEADS_IN_FLIGHT_MAX
from tiered_kv.toolkit.objects.store import ObjectStore, Sink
from tiered_kv.toolkit.objects.verdict import FAILURES, RETRYABLE, Verdict
from tiered_kv.toolkit.resolver import words_of
from tiered_kv_s3.access import BucketAccess
from tiered_kv_s3.connection import (
    EMPTY_PAYLOAD,
    UNSIGNED_PAYLOAD,
    Answer,
    BadAnswerError,
    Connection,
    Credentials,
    Patience,
    Signer,
)
from tiered_kv_s3.pool import ConnectionPool
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.verdict import (
    region_in,
    seconds_of,
    verdict_of,
    verdict_of_error,
    words_in,
)

MOVE_S = 10.0
"""Seconds after a move to another region in which requests to the earlier region are repeated."""

_REFUSALS = frozenset({Verdict.DENIED, Verdict.REFUSED})

_UNSIGNED_HEADERS = "user-agent: tiered-kv\r\naccept-encoding: identity\r\n"
"""Headers that proxies may change, so they are not signed. Without them, some refuse a request, or compress answers."""
_DIGESTS = re.compile(r"md5|digest|checksum|sha-?256|payload|SignatureDoesNotMatch", re.IGNORECASE)
"""Words of servers that refuse a body without its digest, or a body that is not part of the signature."""

Exchange = Callable[[Connection, Credentials], Verdict]  # makes one attempt of a request


class Bucket(ObjectStore):
    """The requests for one bucket. Any thread may call; each call opens at most one connection, `head_all` up to 16.

    Raises `ConfigError`: the file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings, access: BucketAccess) -> None:
        self._access = access
        self._counters = access.failures.counters
        self._retries = Retries(settings.attempts, access.failures)
        self._stall_s = settings.request_timeout
        self._ttl_s = settings.ttl or math.inf
        self._has_ages = settings.ttl is not None or settings.capacity is not None
        self._sends_digests = settings.sign_payload
        headers = {
            "content-type": "application/octet-stream",
            "x-amz-storage-class": settings.storage_class,
            "x-amz-server-side-encryption": settings.server_encryption,
            "x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key_id,
        }
        self._put_headers = {name: value for name, value in headers.items() if value}
        self.pool = ConnectionPool(access.endpoint(), settings.ca_file, access.failures.counters)
        self._signer = Signer(access.region)
        self._moved_s = -math.inf
        """When the signer and the pool last got another region, in seconds of `time.monotonic()`."""
        self._words = self._retries.words
        self._heard_s = -math.inf  # any thread assigns it

    @property
    def heard_s(self) -> float:
        return self._heard_s

    def put(
        self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, *, only_if_absent: bool = False
    ) -> Verdict:
        """Store an object of `pieces`, whole or not at all. Return PRESENT if it exists and `only_if_absent` is set."""
        headers = {**self._put_headers, "content-length": str(sum(map(len, pieces)))}
        if only_if_absent:
            headers["if-none-match"] = "*"
        sends_digests = self._sends_digests
        verdict = self._put(name, pieces, headers, deadline, sends_digests)
        if verdict in _REFUSALS and not sends_digests and _DIGESTS.search(self._words.get(verdict, "")):
            verdict = self._put(name, pieces, headers, deadline, True)
            self._sends_digests = verdict not in _REFUSALS
        return verdict

    def _put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        headers: Mapping[str, str],
        deadline: float,
        sends_digests: bool,
    ) -> Verdict:
        payload_hash = UNSIGNED_PAYLOAD
        if sends_digests:
            sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
            for piece in pieces:
                sha256.update(piece)
                md5.update(piece)
            payload_hash = sha256.hexdigest()
            headers = {**headers, "content-md5": b64encode(md5.digest()).decode()}

        def put(connection: Connection, credentials: Credentials) -> Verdict:
            with contextlib.suppress(ConnectionError):  # the server may have answered before it closed
                self._send(connection, credentials, "PUT", name, headers, payload_hash, pieces)
            return self._settle(connection, credentials, connection.receive_head())

        return self._retry("put", put, deadline)

    def get(
        self,
        name: str,
        sink: Sink,
        bytes_max: int,
        deadline: float,
        *,
        expires: bool = True,
        on_age: Callable[[float], None] = lambda age_s: None,
    ) -> Verdict:
        """Read an object into the memory that `sink` returns. If it `expires`, it is not read when older than `ttl`.

        `on_age` is called with the object's age in seconds, after it was read.

        `bytes_max` limits a body whose length the server does not give in advance. If the end of the connection ends
        the body, it may be cut off, so the server has to send it twice.
        """
        earlier: bytearray | None = None

        def get(connection: Connection, credentials: Credentials) -> Verdict:
            nonlocal earlier
            self._send(connection, credentials, "GET", name)
            answer = connection.receive_head()
            if not 200 <= answer.status < 300:
                return self._settle(connection, credentials, answer)
            if answer.status != 200:
                raise BadAnswerError(f"status {answer.status}: not the answer to a GET")
            age_s = self._age_s(answer) if expires else 0.0
            if age_s > self._ttl_s:
                return Verdict.EXPIRED
            size, body = answer.body_bytes, None
            if size is None:
                body = connection.receive_unsized(answer, bytes_max)
                size = len(body)
                if not answer.is_chunked and body != earlier:
                    earlier = body
                    return Verdict.BROKEN
            parts = sink(size)
            if parts is None:
                found = Verdict.DONE if body is not None else self._settle(connection, credentials, answer)
                return Verdict.OVERSIZED if found is Verdict.DONE else found
            if body is None:
                connection.receive_body(parts)
            else:
                rest = memoryview(body)
                for part in parts:
                    part[:], rest = rest[: len(part)], rest[len(part) :]
            on_age(age_s)
            return Verdict.DONE

        return self._retry("get", get, deadline)

    def delete(self, name: str, deadline: float) -> Verdict:
        """Delete an object. The verdict is DONE also if it does not exist."""

        def delete(connection: Connection, credentials: Credentials) -> Verdict:
            self._send(connection, credentials, "DELETE", name)
            return self._settle(connection, credentials, connection.receive_head())

        verdict = self._retry("delete", delete, deadline)
        return Verdict.DONE if verdict is Verdict.ABSENT else verdict

    def head_all(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        """Return for each object DONE if it exists, ABSENT or EXPIRED if it does not, or why it is unknown.

        The requests run in parallel. Failed ones are tried again in the first half of the time, so that the answers
        for the others are not too late.
        """
        now_s = time.monotonic()
        # Two connections in a row may stall before the deadline.
        patience = Patience(deadline, min(self._stall_s, max(0.0, deadline - now_s) / 2))
        verdicts = [Verdict.UNASKED] * len(names)
        waiting = deque(range(len(names)))
        for attempt in self._retries.attempts((now_s + deadline) / 2):
            self._counters.add("retried_requests_total", count=len(waiting) if attempt else 0)
            self._head_each(names, waiting, verdicts, patience)
            self._counters.add("slow_down_answers_total", count=verdicts.count(Verdict.SLOW_DOWN))
            waiting = deque(at for at, verdict in enumerate(verdicts) if verdict in RETRYABLE)
            if not waiting:
                break
        for verdict in FAILURES.intersection(verdicts):
            self._access.failures.note("head", verdict, self._words.get(verdict, ""))
        return verdicts

    def _head_each(
        self, names: Sequence[str], waiting: deque[int], verdicts: list[Verdict], patience: Patience
    ) -> None:
        """Ask for the `waiting` names until the deadline, and put each verdict into its place.

        Requests travel on several connections at once: all are sent before the first answer is awaited.
        """
        credentials = self._access.credentials(patience.deadline)
        may_open = True
        while waiting and time.monotonic() < patience.deadline:
            wanted = min(len(waiting), HEADS_IN_FLIGHT_MAX)
            try:
                connections = self.pool.take_many(wanted, patience, may_open=may_open)
            except OSError as error:
                verdict = self._verdict_of_error(error)
                for at in waiting if time.monotonic() < patience.deadline else ():
                    verdicts[at] = verdict
                return
            may_open = len(connections) == wanted  # connections that failed to open are not tried again
            try:
                self._head_on(connections, names, waiting, verdicts, credentials)
            finally:
                for connection in connections:
                    self.pool.give_back(connection)

    def _head_on(
        self,
        connections: Sequence[Connection],
        names: Sequence[str],
        waiting: deque[int],
        verdicts: list[Verdict],
        credentials: Credentials,
    ) -> None:
        """Send one request on each connection, and receive the answers as they come."""
        poll, patience = select.poll(), connections[0].patience
        unanswered: dict[int, tuple[int, Connection]] = {}
        for connection in connections:
            at = waiting.popleft()
            verdicts[at] = Verdict.TIMEOUT  # an answer replaces it
            try:
                self._send(connection, credentials, "HEAD", names[at])
            except OSError as error:
                verdicts[at] = self._verdict_of_error(error)
            else:
                poll.register(connection.fileno, select.POLLIN)
                unanswered[connection.fileno] = at, connection
        until_s = min(time.monotonic() + patience.stall_s, patience.deadline)
        while unanswered and (ready := poll.poll(max(0.0, until_s - time.monotonic()) * 1000)):
            for descriptor, _ in ready:
                poll.unregister(descriptor)
                at, connection = unanswered.pop(descriptor)
                try:
                    verdicts[at] = self._receive_presence(connection, credentials)
                except OSError as error:
                    verdicts[at] = self._verdict_of_error(error)

    def _receive_presence(self, connection: Connection, credentials: Credentials) -> Verdict:
        answer = connection.receive_head(has_body=False)
        if answer.status == 200:
            return Verdict.EXPIRED if self._age_s(answer) > self._ttl_s else Verdict.DONE
        verdict = self._verdict_of(answer, b"")
        # The answer has no body that could say that the credentials have expired.
        if verdict in _REFUSALS and self._access.renew(credentials, connection.patience.deadline):
            return Verdict.CREDENTIALS
        return verdict

    def sentence(self, verdict: Verdict, operation: str) -> str:
        """Return the verdict's meaning, the server's last words, and the remedy."""
        return self._access.sentence(verdict, self._words.get(verdict, ""), operation)

    def close(self) -> None:
        """Make the requests in flight fail, and close every connection."""
        self._retries.closing.set()
        self.pool.close()

    # One request.

    def _send(
        self,
        connection: Connection,
        credentials: Credentials,
        method: str,
        name: str,
        headers: Mapping[str, str] | None = None,
        payload_hash: str = EMPTY_PAYLOAD,
        pieces: Sequence[bytes | memoryview] = (),
    ) -> None:
        endpoint = connection.endpoint
        path = endpoint.path_of(name)
        headers = {"host": endpoint.authority, **(headers or {})}
        signed = self._signer.sign(method, path, headers, payload_hash, credentials, time.time())
        lines = "".join([f"{header}: {value}\r\n" for header, value in signed.items()])
        if endpoint.proxy is not None and not endpoint.is_tls:  # TLS goes through a tunnel
            path = f"http://{endpoint.authority}{path}"
            lines = f"{endpoint.proxy.authorization}{lines}"
        self._counters.add("requests_total", method.lower())
        connection.send([f"{method} {path} HTTP/1.1\r\n{lines}{_UNSIGNED_HEADERS}\r\n".encode(), *pieces])

    def _settle(self, connection: Connection, credentials: Credentials, answer: Answer) -> Verdict:
        """Return the verdict on a success without a body, or on a failure; read refused credentials again."""
        body = connection.receive_error(answer)
        if 200 <= answer.status < 300:
            if b"<Error" not in body[:200]:
                return Verdict.DONE
            answer = replace(answer, status=500)  # S3 may fail after it has sent the status
        verdict = self._verdict_of(answer, body)
        if verdict in (Verdict.CREDENTIALS, Verdict.DENIED):  # a replaced key gives DENIED, too
            are_expired = verdict is Verdict.CREDENTIALS
            if self._access.renew(credentials, connection.patience.deadline, are_expired=are_expired):
                return Verdict.CREDENTIALS
            return Verdict.DENIED if verdict is Verdict.DENIED else Verdict.CREDENTIALS_EXPIRED
        return verdict

    def _verdict_of(self, answer: Answer, body: bytes) -> Verdict:
        """Return the verdict on a failure; go to another region if the server names it."""
        self._heard_s = time.monotonic()
        verdict = verdict_of(answer, body)
        self._words[verdict] = words_in(answer, body)
        region = region_in(answer, body) if verdict is Verdict.MOVED else ""
        if region and region != self._signer.region:
            self._access.region, self._moved_s = region, time.monotonic()
            self._signer = Signer(region)
            self.pool.move(self._access.endpoint())
        return Verdict.REDIRECTED if region and time.monotonic() - self._moved_s < MOVE_S else verdict

    def _retry(self, method: str, exchange: Exchange, deadline: float) -> Verdict:
        return self._retries.run(method, lambda: self._try(exchange, Patience(deadline, self._stall_s)), deadline)

    def _try(self, exchange: Exchange, patience: Patience) -> Verdict:
        credentials = self._access.credentials(patience.deadline)
        try:
            connection = self.pool.take(patience)
            try:
                return exchange(connection, credentials)
            finally:
                self.pool.give_back(connection)
        except OSError as error:
            return self._verdict_of_error(error)

    def _verdict_of_error(self, error: OSError) -> Verdict:
        verdict = verdict_of_error(error)
        self._words[verdict] = words_of(error)
        return verdict

    def _age_s(self, answer: Answer) -> float:
        """Return an object's age by the server's clock; 0 if nothing depends on it, or the age is unknown."""
        modified = seconds_of(answer.headers.get("last-modified", "")) if self._has_ages else None
        if modified is None:
            return 0.0
        return (seconds_of(answer.headers.get("date", "")) or time.time()) - modified
