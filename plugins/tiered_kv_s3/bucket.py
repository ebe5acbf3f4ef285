"""Requests for the bucket's objects: signed, retried within a deadline, and never copied on the way."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import math
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from tiered_kv.counters import Counters
from tiered_kv_s3.account import Account
from tiered_kv_s3.connection import Answer, BadAnswerError, Connection, ConnectionPool, Patience
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.signer import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Credentials, Signer
from tiered_kv_s3.verdict import RETRYABLE, Verdict, verdict_of, verdict_of_error

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
HEADS_IN_FLIGHT_MAX = 16
"""Connections over which one batch of HEAD requests travels."""

_MAY_BE_EXPIRED = frozenset({Verdict.DENIED, Verdict.REFUSED})
"""The verdict on expired credentials where the answer has no body that says so: to HEAD."""

Sink = Callable[[int], Sequence[memoryview] | None]
"""Called with the length of a body in bytes; returns the memory for it, or None to refuse it."""
Exchange = Callable[[Connection, Credentials], Verdict]
"""Makes one attempt of a request."""


class Bucket:
    """One bucket. Any thread may call; each call opens at most one connection, `head_all` up to 16.

    Raises:
        ConfigError: The file of authorities cannot be read.
    """

    def __init__(self, settings: S3Settings, account: Account, counters: Counters) -> None:
        self._account = account
        self._counters = counters
        self._attempts_max = settings.attempts
        self._stall_s = settings.request_timeout
        self._ttl_s = settings.ttl or math.inf
        self._signs_payload = settings.sign_payload
        self._put_headers = _put_headers(settings)
        self.pool = ConnectionPool(account.endpoint(), settings.ca_file, counters)
        self._signer = Signer(account.region)
        self._closing = threading.Event()

    def put(
        self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, *, only_if_absent: bool = False
    ) -> Verdict:
        """Store an object of `pieces`, whole or not at all; PRESENT if `only_if_absent` and it exists."""
        headers = {**self._put_headers, "content-length": str(sum(map(len, pieces)))}
        if only_if_absent:
            headers["if-none-match"] = "*"
        payload_hash = _hash_of(pieces) if self._signs_payload else UNSIGNED_PAYLOAD

        def put(connection: Connection, credentials: Credentials) -> Verdict:
            with contextlib.suppress(ConnectionError):  # the server may have answered before it closed
                self._send(connection, credentials, "PUT", name, headers, payload_hash, pieces)
            return self._settle(connection, credentials, connection.receive_head())

        return self._retry(put, deadline)

    def get(self, name: str, sink: Sink, deadline: float, *, expires: bool = True) -> Verdict:
        """Read an object into the memory that `sink` returns; AGED past half its `ttl`, if it `expires`."""

        def get(connection: Connection, credentials: Credentials) -> Verdict:
            self._send(connection, credentials, "GET", name)
            answer = connection.receive_head()
            if not 200 <= answer.status < 300:
                return self._settle(connection, credentials, answer)
            if answer.status != 200 or answer.body_bytes is None:
                raise BadAnswerError(f"status {answer.status}, or no length: not the answer to a GET")
            age_s = self._age_s(answer) if expires else 0.0
            if age_s > self._ttl_s:
                return Verdict.EXPIRED
            parts = sink(answer.body_bytes)
            if parts is None:
                return Verdict.OVERSIZED
            connection.receive_body(parts)
            return Verdict.AGED if age_s > self._ttl_s / 2 else Verdict.DONE

        return self._retry(get, deadline)

    def read(self, name: str, bytes_max: int, deadline: float) -> tuple[Verdict, bytes]:
        """Return a small object of any age; no bytes unless the verdict is DONE, OVERSIZED beyond `bytes_max`."""
        data = bytearray()

        def sink(size_bytes: int) -> list[memoryview] | None:
            nonlocal data
            if size_bytes > bytes_max:
                return None
            data = bytearray(size_bytes)
            return [memoryview(data)]

        verdict = self.get(name, sink, deadline, expires=False)
        return verdict, bytes(data) if verdict is Verdict.DONE else b""

    def delete(self, name: str, deadline: float) -> Verdict:
        """Delete an object; DONE if it does not exist, too."""

        def delete(connection: Connection, credentials: Credentials) -> Verdict:
            self._send(connection, credentials, "DELETE", name)
            return self._settle(connection, credentials, connection.receive_head())

        return self._retry(delete, deadline)

    def head_all(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        """Return for each object DONE if it exists, ABSENT or EXPIRED if it does not, or why it is unknown.

        The requests run in parallel. Failed ones are tried again in parallel, in the first half of the time,
        so that the answers for the others are not too late.
        """
        verdicts = [Verdict.UNASKED] * len(names)
        waiting = list(range(len(names)))
        for attempt in self._attempts((time.monotonic() + deadline) / 2):
            self._counters.add("retried_requests_total", count=len(waiting) if attempt else 0)
            credentials = self._account.credentials(deadline)
            self._head_in_parallel(names, waiting, verdicts, credentials, deadline)
            self._counters.add(
                "slow_down_answers_total", count=sum(verdicts[index] is Verdict.SLOW_DOWN for index in waiting)
            )
            again = RETRYABLE
            if any(verdicts[index] in _MAY_BE_EXPIRED for index in waiting):
                again |= _MAY_BE_EXPIRED if self._account.renew(credentials, deadline) else set()
            waiting = [index for index in waiting if verdicts[index] in again]
            if not waiting:
                break
        return verdicts

    def close(self) -> None:
        """Make the requests in flight fail, and close every connection."""
        self._closing.set()
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
        connection.send([f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode(), *pieces])

    def _settle(self, connection: Connection, credentials: Credentials, answer: Answer) -> Verdict:
        """Return the verdict on a success without a body, or on a failure; get new credentials if these expired."""
        body = connection.receive_error(answer)
        if 200 <= answer.status < 300:
            return Verdict.DONE
        verdict = verdict_of(answer, body)
        if verdict is Verdict.CREDENTIALS and not self._account.renew(credentials, connection.patience.deadline):
            return Verdict.CREDENTIALS_EXPIRED
        return verdict

    def _attempts(self, until_s: float) -> Iterator[int]:
        """Yield the number of each attempt, after a pause for all but the first, while there is time for another."""
        yield 0
        for number in range(1, self._attempts_max):
            pause_s = random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** (number - 1)))
            if time.monotonic() + pause_s >= until_s or self._closing.wait(pause_s):
                return
            yield number

    def _retry(self, exchange: Exchange, deadline: float) -> Verdict:
        """Repeat a request until it succeeds or fails for good, or its attempts or its time are over."""
        verdict = Verdict.TIMEOUT
        for attempt in self._attempts(deadline):
            self._counters.add("retried_requests_total", count=min(attempt, 1))
            verdict = self._try(exchange, Patience(deadline, self._stall_s))
            self._counters.add("slow_down_answers_total", count=verdict is Verdict.SLOW_DOWN)
            if verdict not in RETRYABLE:
                break
        return verdict

    def _try(self, exchange: Exchange, patience: Patience) -> Verdict:
        credentials = self._account.credentials(patience.deadline)
        try:
            connection = self.pool.take(patience)
        except OSError as error:
            return verdict_of_error(error)
        try:
            return exchange(connection, credentials)
        except OSError as error:
            return verdict_of_error(error)
        finally:
            self.pool.give_back(connection)

    def _age_s(self, answer: Answer) -> float:
        """Return an object's age by the server's clock; 0 if objects do not expire, or the age is unknown."""
        modified = seconds_of(answer.headers.get("last-modified", "")) if self._ttl_s < math.inf else None
        if modified is None:
            return 0.0
        return (seconds_of(answer.headers.get("date", "")) or time.time()) - modified

    # Many requests.

    def _head_in_parallel(
        self,
        names: Sequence[str],
        wanted: Sequence[int],
        verdicts: list[Verdict],
        credentials: Credentials,
        deadline: float,
    ) -> None:
        """Make one attempt for each wanted index, and fill in its verdict. A request that stalls delays no other."""
        patience = Patience(deadline, min(self._stall_s, max(0.0, deadline - time.monotonic()) / 2))
        waiting = deque(wanted)
        in_flight: dict[int, tuple[int, Connection, float]] = {}  # by file descriptor; in the order of sending
        poll = select.poll()
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < HEADS_IN_FLIGHT_MAX:
                    connection = self.pool.take(patience)
                    in_flight[connection.fileno] = (waiting[0], connection, time.monotonic() + patience.stall_s)
                    poll.register(connection.fileno, select.POLLIN)
                    self._send(connection, credentials, "HEAD", names[waiting[0]])
                    waiting.popleft()
                wait_s = min(next(iter(in_flight.values()))[2], deadline) - time.monotonic()
                ready = {number for number, _ in poll.poll(max(0.0, wait_s) * 1000)}
                for number in [*in_flight]:
                    index, connection, until_s = in_flight[number]
                    if number in ready:
                        verdicts[index] = self._receive_presence(connection)
                    elif time.monotonic() < min(until_s, deadline):
                        continue
                    else:
                        connection.close()
                        verdicts[index] = Verdict.TIMEOUT
                    poll.unregister(number)
                    del in_flight[number]
                    self.pool.give_back(connection)
        except OSError as error:  # no connection can be opened, or the time is over
            unsent = waiting if time.monotonic() < deadline else ()
            for index in (*unsent, *(index for index, _, _ in in_flight.values())):
                verdicts[index] = verdict_of_error(error)
        finally:
            for _, connection, _ in in_flight.values():
                self.pool.give_back(connection, reuse=False)

    def _receive_presence(self, connection: Connection) -> Verdict:
        try:
            answer = connection.receive_head(has_body=False)
        except OSError as error:
            return verdict_of_error(error)
        if answer.status == 200:
            return Verdict.EXPIRED if self._age_s(answer) > self._ttl_s else Verdict.DONE
        return verdict_of(answer, b"")


def _put_headers(settings: S3Settings) -> dict[str, str]:
    headers = {
        "content-type": "application/octet-stream",
        "x-amz-storage-class": settings.storage_class,
        "x-amz-server-side-encryption": settings.server_encryption,
        "x-amz-server-side-encryption-aws-kms-key-id": settings.kms_key_id,
    }
    return {name: value for name, value in headers.items() if value}


def _hash_of(pieces: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def seconds_of(date: str) -> float | None:
    """Return an HTTP date as seconds since 1970; None if it is no valid date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):  # the latter of years beyond all calendars
        return None
