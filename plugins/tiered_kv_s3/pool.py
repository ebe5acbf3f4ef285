"""The connections to the bucket's server: kept for the next request, and all closed at the end."""

from __future__ import annotations

import ssl
import threading
import time

from tiered_kv.errors import ConfigError
from tiered_kv_s3.connection import Connection, Patience
from tiered_kv_s3.counters import Counters
from tiered_kv_s3.endpoint import Endpoint

IDLE_S_MAX = 15.0
"""A connection that was not used for longer is not used again: S3 closes them after 20 seconds or so."""


class ConnectionPool:
    """Connections to one endpoint, the one that was used last first. Any thread may call.

    The callers bound how many are in use.

    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """

    def __init__(self, endpoint: Endpoint, ca_file: str | None, counters: Counters) -> None:
        self._tls = tls_context(ca_file) if endpoint.is_tls else None
        self._counters = counters
        self._lock = threading.Lock()  # guards the rest; never held across I/O
        self._endpoint = endpoint
        self._idle: list[tuple[float, Connection]] = []
        self._used: set[Connection] = set()
        self._is_closed = False

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def open_connections(self) -> int:
        return len(self._idle) + len(self._used)

    def move(self, endpoint: Endpoint) -> None:
        """Connect to `endpoint` from now on."""
        with self._lock:
            self._endpoint = endpoint
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def take(self, patience: Patience) -> Connection:
        """Return a connection that is nobody else's until `give_back`.

        Raises:
            OSError: None could be opened.
        """
        while self._idle:
            with self._lock:
                if not self._idle:
                    break
                since, connection = self._idle.pop()
                self._used.add(connection)
            if time.monotonic() - since < IDLE_S_MAX and connection.is_usable():
                return connection
            self.give_back(connection, reuse=False)
        endpoint = self._endpoint
        connection = Connection(endpoint, self._tls if endpoint.is_tls else None, patience)
        self._counters.add("opened_connections_total")
        with self._lock:
            if not self._is_closed:
                self._used.add(connection)
                return connection
        connection.close()
        raise ConnectionAbortedError("the tier is being shut down")

    def give_back(self, connection: Connection, *, reuse: bool = True) -> None:
        """Take a connection back, to be used again if it can be."""
        with self._lock:
            self._used.discard(connection)
            if reuse and connection.is_reusable and connection.endpoint == self._endpoint and not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle, make what is in use fail, and open no more."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._used:  # under the lock, so that none is closed, and its number reused, meanwhile
                connection.abort()
        for _, connection in idle:
            connection.close()


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return what server certificates are verified with: the system's authorities, or those in `ca_file` alone.

    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(f"no certificates can be read: {error.strerror}", location="ca_file") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
