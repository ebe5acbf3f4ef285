"""A small HTTP server for what is read only: GET and HEAD, one answer a connection, bounded in all.

It is written on sockets, because it needs the first line of a request only. `http.server` reads up to 6 MB of headers,
and limits neither connections nor the time of a whole request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tiered_kv.errors import ConfigError, ShutdownError, TieredKVError

CONNECTIONS_MAX: Final = 8
HEAD_BYTES_MAX: Final = 128 << 10
"""The request line and all headers."""
QUERY_FIELDS_MAX: Final = 2048
READ_TIMEOUT_S: Final = 5.0
"""For the whole head of a request."""
WRITE_TIMEOUT_S: Final = 10.0
"""For the whole answer."""
_BACKLOG: Final = 16
_RETRY_S: Final = 0.1
_END: Final = b"\r\n\r\n"

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a route answers: bytes, and their type."""

    body: bytes
    content_type: str


Query = Mapping[str, list[str]]
"""The values of each name."""
Routes = Mapping[str, Callable[[Query], Answer]]
"""By path, what answers a query."""


class QueryError(TieredKVError):
    """A query asks for what there is not; its text is the answer."""


class _Refusal(Exception):
    """A request that is answered with a status of its own."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        self.status = status
        super().__init__(why)


class StatusServer:
    """Listens from the start, and answers from `start` to `close`. Any thread may call its methods.

    Args:
        host: Address or name to listen on.
        port: The port; 0 for any that is free.

    Attributes:
        host, port: Where it listens.

    Raises:
        ConfigError: The address cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._routes: Routes = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._logged: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._accept, name="tiered-kv-status", daemon=True)

    def start(self, routes: Routes) -> None:
        """Answer these paths from now on."""
        self._routes = routes
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Close all connections, and wait up to `timeout` seconds for their threads. In a forked child, do nothing."""
        if os.getpid() != self._pid:  # the socket is the parent's too: to shut it down would end the parent's server
            return
        with self._lock:
            self._is_closed = True
            threads = [self._thread, *self._connections.values()]
            for each in (self._socket, *self._connections):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        end_s = time.monotonic() + timeout
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_RETRY_S)  # too many open files, most likely
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="tiered-kv-answer", daemon=True)
            with self._lock:
                is_refused = self._is_closed or len(self._connections) >= CONNECTIONS_MAX
                if not is_refused:
                    self._connections[connection] = thread
                    try:
                        thread.start()
                    except RuntimeError:  # the process cannot have another thread now
                        del self._connections[connection]
                        is_refused = True
            if is_refused:
                with contextlib.suppress(OSError), connection:
                    connection.setblocking(False)
                    connection.sendall(_response(HTTPStatus.SERVICE_UNAVAILABLE, _text("too many connections")))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):  # they went away, or took too long
                response = self._response_to(connection)
                connection.settimeout(WRITE_TIMEOUT_S)
                connection.sendall(response)
                connection.shutdown(socket.SHUT_WR)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _response_to(self, connection: socket.socket) -> bytes:
        method = ""
        try:
            method, target = _request_line(_head(connection))
            status, answer = HTTPStatus.OK, self._answer(method, target)
        except _Refusal as refusal:
            status, answer = refusal.status, _text(str(refusal))
        return _response(status, answer, has_body=method != "HEAD")

    def _answer(self, method: str, target: str) -> Answer:
        try:
            parts = urlsplit(target)
        except ValueError:  # such as "//[": its text has a part of the target, which is a stranger's
            raise _Refusal(HTTPStatus.BAD_REQUEST, "the target cannot be read") from None
        route = self._routes.get(parts.path)
        if route is None:
            raise _Refusal(HTTPStatus.NOT_FOUND, f"there are: {' '.join(self._routes)}")
        if method not in ("GET", "HEAD"):
            raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        try:
            return route(parse_qs(parts.query, max_num_fields=QUERY_FIELDS_MAX))
        except (QueryError, ValueError) as error:
            told = str(error) if isinstance(error, QueryError) else "the query cannot be read"
            raise _Refusal(HTTPStatus.BAD_REQUEST, told) from None
        except ShutdownError:
            raise _Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the stack is closed") from None
        except Exception as error:
            if type(error) not in self._logged:  # its text may hold what a stranger's tier put there
                self._logged.add(type(error))
                _log.error(
                    "%s could not be answered: %s; further ones are not logged", parts.path, type(error).__name__
                )
            raise _Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the log says why") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(
            f"cannot listen on {shown}: {reason}; give another address, or stop what listens there",
            location="metrics.listen",
        ) from error


def _head(connection: socket.socket) -> bytes:
    """Return a request up to the end of its headers.

    Raises:
        OSError: It did not come in time.
    """
    end_s, head = time.monotonic() + READ_TIMEOUT_S, bytearray()  # one byte at a time must not cost the square
    while _END not in head[-len(_END) - 4096 :] and b"\n\n" not in head[-4098:]:
        if len(head) >= HEAD_BYTES_MAX:
            raise _Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {HEAD_BYTES_MAX} bytes are read")
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        part = connection.recv(4096)
        if not part:
            raise ConnectionResetError
        head += part
    return bytes(head)


def _request_line(head: bytes) -> tuple[str, str]:
    words = head.split(b"\n", 1)[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refusal(HTTPStatus.BAD_REQUEST, "expected a request of HTTP/1.1")
    return words[0], words[1]


def _text(text: str) -> Answer:
    return Answer(f"{text}\n".encode(), "text/plain; charset=utf-8")


def _response(status: HTTPStatus, answer: Answer, *, has_body: bool = True) -> bytes:
    head = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["Allow: GET, HEAD"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    return "\r\n".join(head).encode() + _END + (answer.body if has_body else b"")
