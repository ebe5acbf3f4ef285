"""Objects in and out of the bucket: signed, retried within a deadline, and never copied on the way."""

from __future__ import annotations

import email.utils
import hashlib
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tiered_kv_s3.account import Account
from tiered_kv_s3.connection import Answer, BadAnswerError, Connection, Patience
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.endpoint import tls_context
from tiered_kv_s3.pool import ConnectionPool
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.signer import EMPTY_PAYLOAD, UNSIGNED_PAYLOAD, Credentials, Signer
from tiered_kv_s3.verdict import ABSENCE, RETRYABLE, Verdict, region_in, verdict_of, verdict_of_error

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
HEADS_IN_FLIGHT_MAX = 16
"""Connections over which one batch of presence requests travels."""

_UNEXPLAINED = frozenset({400, 401, 403})
"""Expired credentials, a clock that is wrong, or another region, if the answer's body says so."""

_SAYS_NOTHING = frozenset({Verdict.DENIED, Verdict.REFUSED, Verdict.MOVED})
"""What an answer to HEAD comes to whose reason would stand in its body."""

Sink = Callable[[int], Sequence[memoryview] | None]
"""Where a body of so many bytes goes; None if it is not wanted."""


class Bucket:
    """One bucket. Any thread may call; each call opens at most one connection, `are_there` up to 16.

    Args:
        settings: The tier's YAML entry.
        account: Who signs, and where the bucket is.
        counters: Where requests are counted.
    """

    def __init__(self, settings: S3Settings, account: Account, counters: Counters) -> None:
        self._account = account
        self._counters = counters
        self._attempts = settings.attempts
        self._stall_s = settings.request_timeout
        self._ttl_s = settings.ttl
        self._signs_payload = settings.sign_payload
        self._put_headers = _put_headers(settings)
        endpoint = account.endpoint(account.region)
        self._pool = ConnectionPool(endpoint, tls_context(settings.ca_file) if endpoint.is_tls else None, counters)
        self._signer = Signer(account.region)
        self._clock_offset_s = 0.0  # the server's clock less ours
        self._closing = threading.Event()
        self._moving = threading.Lock()

    @property
    def open_connections(self) -> int:
        return self._pool.open_connections

    @property
    def authority(self) -> str:
        """The server's name and port."""
        return self._pool.endpoint.authority

    @property
    def is_tls(self) -> bool:
        """Whether the server is spoken to over TLS, with its certificate checked."""
        return self._pool.endpoint.is_tls

    def put(
        self, name: str, pieces: Sequence[bytes | memoryview], deadline: float, *, only_if_absent: bool = False
    ) -> Verdict:
        """Store an object of `pieces`, whole or not at all; PRESENT where it was to be absent and is not."""
        headers = {**self._put_headers, "content-length": str(sum(map(len, pieces)))}
        if only_if_absent:
            headers["if-none-match"] = "*"
        payload_hash = _hash_of(pieces) if self._signs_payload else UNSIGNED_PAYLOAD

        def put(connection: Connection, credentials: Credentials, patience: Patience) -> tuple[Answer, bytes]:
            head = self._head_of("PUT", name, headers, payload_hash, connection, credentials)
            self._counters.add("requests_total", "put")
            try:
                connection.send([head, *pieces], patience)
            except ConnectionError as error:  # it may have answered before it closed
                return _early_answer(connection, patience, error)
            answer = connection.receive_head(patience)
            return answer, connection.receive_error(answer, patience)

        return self._persist(put, deadline)

    def get(self, name: str, sink: Sink, deadline: float, *, expires: bool = True) -> Verdict:
        """Read an object into what `sink` gives for its length; AGED past half its `ttl`, if it `expires`."""

        def get(connection: Connection, credentials: Credentials, patience: Patience) -> tuple[Answer, bytes]:
            head = self._head_of("GET", name, {}, EMPTY_PAYLOAD, connection, credentials)
            self._counters.add("requests_total", "get")
            connection.send([head], patience)
            answer = connection.receive_head(patience)
            if answer.status != 200:
                return _unless_success(answer), connection.receive_error(answer, patience)
            age_s = self._age_s(answer) if expires and self._ttl_s is not None else 0.0
            if self._ttl_s is not None and age_s > self._ttl_s:
                raise _Settled(Verdict.EXPIRED)
            if answer.body_bytes is None:
                raise _Settled(Verdict.UNSIZED)
            parts = sink(answer.body_bytes)
            if parts is None:
                raise _Settled(Verdict.OVERSIZED)
            connection.receive_body(parts, patience)
            if self._ttl_s is not None and age_s > self._ttl_s / 2:
                raise _Settled(Verdict.AGED)
            return answer, b""

        return self._persist(get, deadline)

    def delete(self, name: str, deadline: float) -> Verdict:
        """Delete an object; one that is not there is deleted too."""

        def delete(connection: Connection, credentials: Credentials, patience: Patience) -> tuple[Answer, bytes]:
            head = self._head_of("DELETE", name, {}, EMPTY_PAYLOAD, connection, credentials)
            self._counters.add("requests_total", "delete")
            connection.send([head], patience)
            answer = connection.receive_head(patience)
            return answer, connection.receive_error(answer, patience)

        return self._persist(delete, deadline)

    def are_there(self, names: Sequence[str], deadline: float) -> list[Verdict]:
        """Return DONE for each object that is there, ABSENT or EXPIRED for those that are not, or what went wrong.

        The requests travel side by side. Those that fail are tried again side by side, in the first half of the time,
        so that the answers for the others are not too late.
        """
        verdicts = [Verdict.UNASKED] * len(names)
        waiting = list(range(len(names)))
        retry_until_s = (time.monotonic() + deadline) / 2
        for attempt in range(self._attempts):
            if attempt:
                self._counters.add("retried_requests_total", count=len(waiting))
            self._ask_side_by_side(names, waiting, verdicts, deadline)
            self._counters.add(
                "slow_down_answers_total", count=sum(verdicts[index] is Verdict.SLOW_DOWN for index in waiting)
            )
            waiting = self._explain(names, waiting, verdicts, deadline)
            pause_s = random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt))
            if not waiting or time.monotonic() + pause_s >= retry_until_s or self._closing.wait(pause_s):
                break
        return verdicts

    def close(self) -> None:
        """Make what is in flight fail, and close every connection."""
        self._closing.set()
        self._pool.close()

    # One request.

    def _head_of(
        self,
        method: str,
        name: str,
        headers: dict[str, str],
        payload_hash: str,
        connection: Connection,
        credentials: Credentials,
    ) -> bytes:
        """Return the signed head of a request for an object."""
        endpoint = connection.endpoint
        path = endpoint.path_of(name)
        now_s = time.time() + self._clock_offset_s
        signed = self._signer.sign(
            method, path, {"host": endpoint.authority, **headers}, payload_hash, credentials, now_s
        )
        lines = "".join([f"{header}: {value}\r\n" for header, value in signed.items()])
        if endpoint.proxy is None or endpoint.is_tls:  # TLS goes through a tunnel
            return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()
        target = f"http://{endpoint.authority}{path}"
        return f"{method} {target} HTTP/1.1\r\n{endpoint.proxy.authorization}{lines}\r\n".encode()

    def _head(self, name: str) -> _Exchange:
        def head(connection: Connection, credentials: Credentials, patience: Patience) -> tuple[Answer, bytes]:
            self._send_head(connection, name, credentials, patience)
            answer = connection.receive_head(patience, has_body=False)
            if answer.status == 200 and self._is_expired(answer):
                raise _Settled(Verdict.EXPIRED)
            if answer.status not in _UNEXPLAINED or not connection.is_reusable:
                return answer, b""
            # What is wrong stands in the body, which answers to HEAD have not: ask for the first byte.
            text = self._head_of("GET", name, {"range": "bytes=0-0"}, EMPTY_PAYLOAD, connection, credentials)
            self._counters.add("requests_total", "get")
            connection.send([text], patience)
            answer = connection.receive_head(patience)
            return answer, connection.receive_error(answer, patience)

        return head

    def _send_head(self, connection: Connection, name: str, credentials: Credentials, patience: Patience) -> None:
        self._counters.add("requests_total", "head")
        connection.send([self._head_of("HEAD", name, {}, EMPTY_PAYLOAD, connection, credentials)], patience)

    def _is_expired(self, answer: Answer) -> bool:
        return self._ttl_s is not None and self._age_s(answer) > self._ttl_s

    def _age_s(self, answer: Answer) -> float:
        """Return how old an object is, both times by the server's clock; 0 where it does not tell."""
        modified = seconds_of(answer.headers.get("last-modified", ""))
        now = seconds_of(answer.headers.get("date", "")) or time.time() + self._clock_offset_s
        return now - modified if modified is not None else 0.0

    def _persist(self, exchange: _Exchange, deadline: float) -> Verdict:
        """Try a request until it succeeds, fails for good, or its attempts or its time are over."""
        verdict = Verdict.TIMEOUT
        for attempt in range(self._attempts):
            if attempt:
                pause_s = random.uniform(0, min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**attempt))
                if time.monotonic() + pause_s >= deadline or self._closing.wait(pause_s):
                    break
                self._counters.add("retried_requests_total")
            verdict = self._try(exchange, Patience(deadline, self._stall_s))
            if verdict is Verdict.SLOW_DOWN:
                self._counters.add("slow_down_answers_total")
            if verdict not in RETRYABLE:
                break
        return verdict

    def _try(self, exchange: _Exchange, patience: Patience) -> Verdict:
        credentials = self._account.credentials(patience.deadline)
        region = self._signer.region
        try:
            connection = self._pool.take(patience)
        except OSError as error:
            return verdict_of_error(error)
        try:
            answer, body = exchange(connection, credentials, patience)
        except _Settled as settled:
            return settled.verdict
        except OSError as error:
            return verdict_of_error(error)
        finally:
            self._pool.give_back(connection)
        if 200 <= answer.status < 300:
            return Verdict.DONE
        verdict = verdict_of(answer, body)
        if verdict is Verdict.MOVED:
            return self._follow(region, region_in(answer, body))
        if verdict is Verdict.CREDENTIALS and not self._account.renew(credentials, patience.deadline):
            return Verdict.CREDENTIALS_EXPIRED
        if verdict is Verdict.SKEWED:
            return self._set_clock(answer)
        return verdict

    def _follow(self, asked: str, region: str) -> Verdict:
        """Ask in `region` from now on, since the bucket is not where it was asked for."""
        with self._moving:
            if region == asked:
                return Verdict.REFUSED  # it is where we asked: a redirect that leads nowhere
            if region != self._signer.region:  # else another thread has been told the same
                self._pool.move(self._account.endpoint(region))
                self._account.region = region
                self._signer = Signer(region)
        return Verdict.MOVED

    def _set_clock(self, answer: Answer) -> Verdict:
        """Sign with the server's time from now on."""
        server_s = seconds_of(answer.headers.get("date", ""))
        if server_s is None:
            return Verdict.REFUSED
        self._clock_offset_s = server_s - time.time()
        return Verdict.SKEWED

    # Many requests.

    def _ask_side_by_side(
        self, names: Sequence[str], wanted: Sequence[int], verdicts: list[Verdict], deadline: float
    ) -> None:
        """Fill in the verdicts that can be had without trying twice. One that stalls holds up no other."""
        credentials = self._account.credentials(deadline)
        patience = Patience(deadline, min(self._stall_s, max(0.0, deadline - time.monotonic()) / 2))
        waiting = deque(wanted)
        travelling: dict[int, tuple[int, Connection, float]] = {}  # by file descriptor; in the order of sending
        poll = select.poll()
        try:
            while waiting or travelling:
                while waiting and len(travelling) < HEADS_IN_FLIGHT_MAX:
                    connection = self._pool.take(patience)
                    travelling[connection.fileno] = (waiting[0], connection, time.monotonic() + patience.stall_s)
                    poll.register(connection.fileno, select.POLLIN)
                    self._send_head(connection, names[waiting.popleft()], credentials, patience)
                wait_s = min(next(iter(travelling.values()))[2], deadline) - time.monotonic()
                ready = {number for number, _ in poll.poll(max(0.0, wait_s) * 1000)}
                for number in [*travelling]:
                    index, connection, until_s = travelling[number]
                    if number in ready:
                        verdicts[index] = self._receive_presence(connection, patience)
                    elif time.monotonic() < min(until_s, deadline):
                        continue
                    else:
                        connection.close()
                        verdicts[index] = Verdict.TIMEOUT
                    poll.unregister(number)
                    del travelling[number]
                    self._pool.give_back(connection)
        except OSError as error:  # none can be opened, or the time is over
            unsent = waiting if time.monotonic() < deadline else ()
            for index in (*unsent, *(index for index, _, _ in travelling.values())):
                verdicts[index] = verdict_of_error(error)
        finally:
            for _, connection, _ in travelling.values():
                self._pool.give_back(connection, reuse=False)

    def _receive_presence(self, connection: Connection, patience: Patience) -> Verdict:
        try:
            answer = connection.receive_head(patience, has_body=False)
        except OSError as error:
            return verdict_of_error(error)
        if answer.status == 200:
            return Verdict.EXPIRED if self._is_expired(answer) else Verdict.DONE
        return verdict_of(answer, b"")

    def _explain(
        self, names: Sequence[str], asked: Sequence[int], verdicts: list[Verdict], deadline: float
    ) -> list[int]:
        """Find out why answers to HEAD, which say nothing, were refusals; return what is to be asked again."""
        refused = [index for index in asked if verdicts[index] in _SAYS_NOTHING]
        again = [index for index in asked if verdicts[index] in RETRYABLE and verdicts[index] not in _SAYS_NOTHING]
        if not refused:
            return again
        verdict = self._persist(self._head(names[refused[0]]), deadline)
        verdicts[refused[0]] = verdict
        if verdict is Verdict.DONE or verdict in ABSENCE:  # what was wrong with the requests has been mended
            return again + refused[1:]
        for index in refused[1:]:
            verdicts[index] = verdict
        return again


_Exchange = Callable[[Connection, Credentials, Patience], tuple[Answer, bytes]]
"""Sends one request and receives its answer, with what the server says if that is no success."""


class _Settled(Exception):
    """The answer needs no reading to its end."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict


def _unless_success(answer: Answer) -> Answer:
    """Return an answer that is an error.

    Raises:
        BadAnswerError: It is a success of another kind than was asked for.
    """
    if 200 <= answer.status < 300:
        raise BadAnswerError(f"the answer has status {answer.status}, not 200")
    return answer


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


def _early_answer(connection: Connection, patience: Patience, error: ConnectionError) -> tuple[Answer, bytes]:
    """Return what a server said before it stopped listening.

    Raises:
        ConnectionError: It said nothing; `error`.
    """
    try:
        answer = connection.receive_head(patience)
        body = connection.receive_error(answer, patience)
    except OSError:
        raise error from None
    connection.is_reusable = False
    return answer, body


def seconds_of(date: str) -> float | None:
    """Return an HTTP date as seconds since 1970."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):  # the latter of years beyond all calendars
        return None
