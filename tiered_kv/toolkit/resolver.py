"""Connections to servers, with a deadline that includes the look-up of the name; and the words of their failures.

The tiers redis and s3 call it on their workers. A look-up that hangs keeps one daemon thread; each caller waits until
its own deadline at most.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tiered_kv.errors import ResourceError
from tiered_kv.system.threads import start_thread

Addresses = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]  # Any: an address of any family

_lock = threading.Lock()
_lookups: dict[tuple[str, int], Future[Addresses]] = {}
"""Running look-ups, one for each server; guarded by the lock. Several callers may wait for one look-up."""


def addresses_of(host: str, port: int, timeout_s: float) -> Addresses:
    """Return the addresses of a server, or raise `OSError`. A look-up that times out continues for the next caller."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):  # a name, or invalid
        pass
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = Future()
            name = f"tiered-kv-lookup-{host}"
            try:
                start_thread(_look_up, name, host, port, lookup)
            except ResourceError as error:
                del _lookups[host, port]
                raise OSError(f"{host} cannot be looked up: {error}") from None
    return lookup.result(timeout_s)


def connect(host: str, port: int, next_timeout_s: Callable[[], float]) -> socket.socket:
    """Return a socket that is connected to a server's first address that answers, or raise `OSError`. Any thread.

    `next_timeout_s` returns how long the next step may take; it raises `TimeoutError` if no time is left.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in addresses_of(host, port, next_timeout_s()):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(next_timeout_s())
            connected.connect(address)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
        except OSError as error:
            connected.close()
            failure = error
    raise failure


def causes_of(error: BaseException) -> list[BaseException]:
    causes: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in causes:  # an exception that was raised again may be among its own causes
        causes.append(link)
        link = link.__cause__ or link.__context__
    return causes


def words_of(error: BaseException) -> str:
    """Return the first words of TLS or of the operating system in an exception and its causes; else the exception's own
    text."""
    for each in causes_of(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return each.verify_message.rstrip(".")
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
    return str(error)


def _look_up(host: str, port: int, lookup: Future[Addresses]) -> None:
    try:
        lookup.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as error:
        lookup.set_exception(error)
    except Exception:  # UnicodeError too, of an invalid name
        lookup.set_exception(OSError(f"{host} is no name"))
    with _lock:
        del _lookups[host, port]
