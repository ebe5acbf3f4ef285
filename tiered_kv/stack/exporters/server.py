"""The HTTP server of a stack, and its pages. It answers GET and HEAD, and the calls of `/prefetch`, one a connection.

The opening of a stack starts it, with threads of its own. It reads snapshots that any thread may take, and never calls
the manager: it leaves prefetch orders in the manager's inbox. The number of open connections has a limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tiered_kv.config.stack_config import MetricsSettings
from tiered_kv.errors import ConfigError, ShutdownError, needing_resources, remedy_of
from tiered_kv.metrics.series import Snapshot
from tiered_kv.stack.exporters.hottest import PATH as HOTTEST_PATH
from tiered_kv.stack.exporters.hottest import HottestPages
from tiered_kv.stack.exporters.limits import PATH as LIMITS_PATH
from tiered_kv.stack.exporters.limits import answer_change, limits_page
from tiered_kv.stack.exporters.metrics import CONTENT_TYPE, StackCollector, exposition
from tiered_kv.stack.exporters.prefetch import BODY_BYTES_MAX, PrefetchPages
from tiered_kv.stack.exporters.prefetch import PATH as PREFETCH_PATH
from tiered_kv.stack.exporters.removal import PATHS as REMOVAL_PATHS
from tiered_kv.stack.exporters.removal import answer_removal
from tiered_kv.stack.exporters.status import Observed, explain_query, status
from tiered_kv.system.log_limit import LogLimit

CONNECTIONS_MAX: Final = 8
LINE_BYTES_MAX: Final = 128 << 10
"""Limit of a request's first line. http.server reads up to 100 more, of up to 64 KiB each."""
QUERY_FIELDS_MAX: Final = 2048
THREADS_MAX: Final = 4 * CONNECTIONS_MAX
"""Limit of the threads that answer, with those whose connection was shut down and that have not ended yet."""
SILENCE_S: Final = 5.0
"""Longest pause, in seconds, of a client while it sends its request or reads the answer."""
LIFETIME_S: Final = 15.0
"""A connection that is older, in seconds, is closed when the next one comes."""
_RETRY_S: Final = 0.1
_DIGEST_CHARACTERS: Final = 12
_STATUS_PATH: Final = "/status"

_log = logging.getLogger(__name__)


class Body(NamedTuple):
    body: bytes
    content_type: str


Query = Mapping[str, list[str]]
Routes = Mapping[str, Callable[[Query], Body]]
"""For each path, a function that any thread may call. The text of a `ConfigError` is sent to the client."""


def routes_of(stacks: Callable[[], Mapping[str, Observed]]) -> Routes:
    """Return the pages of stacks, by the digests of their namespaces. Which stacks are open may change.

    `/metrics` has all stacks, with a label `namespace` if there are several. The other pages take a query `namespace`:
    the first characters of a digest. With a single stack they need no query. Raises `MissingExtraError` without
    `prometheus_client`.
    """
    StackCollector(Snapshot)

    def metrics(_: Query) -> Body:
        found = stacks()
        collectors = [
            StackCollector(
                stack.snapshot,
                labels={"namespace": digest[:_DIGEST_CHARACTERS]} if len(found) > 1 else None,
                secrets=stack.config.secret_texts(),
            )
            for digest, stack in found.items()
        ]
        return Body(exposition(*collectors), CONTENT_TYPE)

    def chosen(query: Query) -> Observed:
        return _chosen(stacks(), _namespace_of(query))

    hottest = HottestPages()
    return {
        "/metrics": metrics,
        _STATUS_PATH: lambda query: _json(status(chosen(query))),
        "/explain": lambda query: _json(explain_query(chosen(query), query)),
        HOTTEST_PATH: lambda query: _json(hottest.answer(chosen(query), query)),
        LIMITS_PATH: lambda query: _json(limits_page(chosen(query), query)),
        "/healthz": lambda _: _text("ok"),
    }


def prefetch_of(stacks: Callable[[], Mapping[str, Observed]], settings: MetricsSettings) -> PrefetchPages:
    """Return the calls of `/prefetch` for stacks, by the digests of their namespaces. Which are open may change."""
    token = None if settings.token is None else settings.token.get_secret_value()
    return PrefetchPages(lambda start: _chosen(stacks(), start), token)


def _namespace_of(query: Query) -> str:
    return "".join(query.get("namespace", []))


def _chosen(found: Mapping[str, Observed], start: str) -> Observed:
    fitting = [stack for digest, stack in found.items() if digest.startswith(start)]
    if len(fitting) != 1:
        digests = " ".join(digest[:_DIGEST_CHARACTERS] for digest in found) or "none is open yet"
        raise ConfigError(f"namespace: expected the first characters of one of the open namespaces: {digests}")
    return fitting[0]


@dataclass(slots=True, eq=False)
class _OpenConnection:
    """A connection, and the state of its thread. The server's lock guards it."""

    thread: threading.Thread
    began_s: float = field(default_factory=time.monotonic)
    has_asked: bool = False  # whether its request has been read
    waits_for_client: bool = True
    """Whether the client has to send its request, or to read the answer."""
    is_ending: bool = False
    """Whether it was shut down: its thread ends as soon as it sees that."""


class StatusServer(ThreadingTCPServer):
    """Listens once it is made, and answers from `start` to `close`. Any thread may call its methods.

    With port 0 it takes any free one; the attribute `port` has its number. Raises `ConfigError` if it cannot listen.
    """

    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.routes: Routes = {}
        self.prefetch: PrefetchPages | None = None
        self.log_limit = LogLimit()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _OpenConnection] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="tiered-kv-status", daemon=True)
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:  # the latter if the name is no host name
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else getattr(error, "strerror", "this is no host name")
            remedy = remedy_of(error) or "; give another address, or stop what listens there"
            raise ConfigError(f"cannot listen on {shown}: {reason}{remedy}", location="metrics.listen") from error
        self.port: int = self.socket.getsockname()[1]

    def start(self, routes: Routes, prefetch: PrefetchPages | None = None) -> None:
        """Answer requests for these paths, and the calls of `/prefetch`, from now on."""
        self.routes, self.prefetch = routes, prefetch
        with needing_resources(f"the thread '{self._thread.name}' cannot be started"):
            self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Close all connections, and wait up to `timeout` seconds for their threads. Does nothing in a forked child."""
        if os.getpid() != self._pid:  # the socket is the parent's too: to shut it down would end the parent's server
            return
        with self._lock:
            self._is_closed = True
            threads = [self._thread, *(each.thread for each in self._connections.values())]
            for each in (self.socket, *self._connections):
                _wake(each)
        end_s = time.monotonic() + timeout
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
        self.server_close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self.handle_request()
            except Exception:  # the system may lack memory: the next request may succeed
                _log.exception("a request for metrics or status was not answered")
                time.sleep(_RETRY_S)

    def get_request(self) -> tuple[socket.socket, Any]:  # Any: an address
        try:
            return super().get_request()
        except OSError:
            if not self._is_closed:
                time.sleep(_RETRY_S)  # too many open files, most likely
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # Any: a socket, and an address
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="tiered-kv-answer", daemon=True
        )
        with self._lock:
            self._make_room()
            if self._is_closed or len(self._open()) >= CONNECTIONS_MAX or len(self._connections) >= THREADS_MAX:
                raise ConnectionRefusedError  # ends the connection, as an error of `thread.start` does
            thread.start()
            self._connections[request] = _OpenConnection(thread)

    def _open(self) -> list[_OpenConnection]:
        return [each for each in self._connections.values() if not each.is_ending]

    def _make_room(self) -> None:
        """End connections that last too long, with the lock held. If all are taken, end one that waits for a client."""
        now_s = time.monotonic()
        for request, each in self._connections.items():
            if each.began_s + LIFETIME_S < now_s:
                each.is_ending = True
                _wake(request)
        if len(self._open()) >= CONNECTIONS_MAX:
            # First one that has sent no request, then the oldest one: to send a request takes no time.
            waiting = [each for each in self._connections.items() if each[1].waits_for_client and not each[1].is_ending]
            for request, each in sorted(waiting, key=lambda each: (each[1].has_asked, each[1].began_s))[:1]:
                each.is_ending = True
                _wake(request)

    def note(self, request: socket.socket, *, waits_for_client: bool) -> None:
        """Note that a request has been read, or that its answer is being sent. The connection's thread calls."""
        with self._lock:
            connection = self._connections.get(request)
            if connection is not None:
                connection.has_asked, connection.waits_for_client = True, waits_for_client

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client has gone, took too long, or was refused."""


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = SILENCE_S

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(LINE_BYTES_MAX)
        if self.raw_requestline.endswith(b"\n") and self.parse_request():
            is_call = self.server.prefetch is not None and (
                f"{self._path}/".startswith(f"{PREFETCH_PATH}/")
                or (self._path == LIMITS_PATH and self.command == "POST")
                or self._path in REMOVAL_PATHS
            )
            body = self._body() if is_call else b""
            self.server.note(self.request, waits_for_client=False)
            status, answer = self._answer_call(body) if is_call else self._answer()
            self.server.note(self.request, waits_for_client=True)
            self.send_response_only(status)
            for name, value in {
                "Content-Type": answer.content_type,
                "Content-Length": str(len(answer.body)),
                "Cache-Control": "no-store",
                "X-Content-Type-Options": "nosniff",
                "Allow": "GET, HEAD, POST, DELETE" if is_call else "GET, HEAD",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body if self.command != "HEAD" else b"")

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _body(self) -> bytes | None:
        """Return the body of a call; None if it is too long, or its length is not given."""
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or len(length) > 9:
            return None
        return self.rfile.read(int(length)) if int(length) <= BODY_BYTES_MAX else None

    def _answer_call(self, body: bytes | None) -> tuple[HTTPStatus, Body]:
        prefetch = self.server.prefetch
        assert prefetch is not None, "the caller has looked"
        try:
            refused = self._refusal()
            if refused is None and body is None:
                refused = (
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    {"error": f"expected a body of up to {BODY_BYTES_MAX} bytes"},
                )
            if refused is None and self._path == LIMITS_PATH:
                status, answer = answer_change(prefetch.choose, self.headers, body or b"")
            elif refused is None and self._path in REMOVAL_PATHS:
                status, answer = answer_removal(prefetch.choose, self.command, self._path, self.headers, body or b"")
            else:
                status, answer = refused or prefetch.answer(self.command, self._path, self.headers, body or b"")
        except ConfigError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except Exception as error:  # as of a page
            return self._failed(error)
        return status, _json(answer)

    def _refusal(self) -> tuple[HTTPStatus, object] | None:
        """Return why a caller gets no keys, and can ask for nothing; None if it is heard."""
        prefetch = self.server.prefetch
        if prefetch is None:
            return HTTPStatus.FORBIDDEN, {"error": "nobody is heard here"}
        return prefetch.refusal(self.server.socket.getsockname()[0], self.headers)

    def _failed(self, error: Exception) -> tuple[HTTPStatus, Body]:
        """Log an error of ours, without its text, into which a tier may have put a secret."""
        limit = self.server.log_limit
        if limit.take(type(error).__name__) is not None:
            _log.error("%s could not be answered: %s; %s", self._path, type(error).__name__, limit.about)
        return HTTPStatus.INTERNAL_SERVER_ERROR, _text("the log says why")

    def _answer(self) -> tuple[HTTPStatus, Body]:
        routes = self.server.routes
        try:
            parts = urlsplit(self.path)
            if parts.path not in routes:
                return HTTPStatus.NOT_FOUND, _text(f"there are: {' '.join(routes)}")
            if self.command not in ("GET", "HEAD"):
                return HTTPStatus.METHOD_NOT_ALLOWED, _text("only GET and HEAD are answered")
            if parts.path == HOTTEST_PATH and (refused := self._refusal()) is not None:
                return refused[0], _json(refused[1])
            query = parse_qs(parts.query, max_num_fields=QUERY_FIELDS_MAX)
            prefetch = self.server.prefetch
            if parts.path == _STATUS_PATH and prefetch is not None and self._refusal() is None:
                return HTTPStatus.OK, _json(status(prefetch.choose(_namespace_of(query)), with_errors=True))
            return HTTPStatus.OK, routes[parts.path](query)
        except ConfigError as error:
            return HTTPStatus.BAD_REQUEST, _text(str(error))
        except ValueError:
            return HTTPStatus.BAD_REQUEST, _text("the query cannot be read")
        except ShutdownError:
            return HTTPStatus.SERVICE_UNAVAILABLE, _text("the stack is closed")
        except Exception as error:
            return self._failed(error)

    def log_message(self, format: str, *args: Any) -> None:  # Any: as http.server has it
        """Do not log requests."""


def _wake(connection: socket.socket) -> None:
    """Shut a connection down, so that the thread that waits for it goes on."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _text(text: str) -> Body:
    return Body(f"{text}\n".encode(), "text/plain; charset=utf-8")


def _json(value: object) -> Body:
    return Body(json.dumps(value, allow_nan=False).encode(), "application/json")
