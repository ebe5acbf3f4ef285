"""Shortages: the system refuses a thread, a descriptor, a mapping or a server's pages, at one call or several in a row.

with Shortage(Resource.THREAD, 3) as shortage:      # the third thread does not start
    stack.put(keys, blocks)
assert shortage.refused

with DescriptorsLeft(2):                            # also for what libraries open in C
    stack.put(keys, blocks)
"""

from __future__ import annotations

import _thread
import builtins
import errno
import io
import math
import mmap
import os
import resource
import selectors
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Self

import pytest

from tiered_kv.server import allocation


class Resource(Enum):
    THREAD = "thread"
    DESCRIPTOR = "descriptor"
    MEMORY = "memory"
    PAGES = "pages"
    """Of a server's rows: a limit of its cgroup, or of the reserved huge pages, is reached."""


_CALLS: dict[Resource, list[tuple[Any, str]]] = {  # Any: modules and classes
    Resource.THREAD: [(threading.Thread, "start"), (_thread, "start_new_thread")],
    Resource.DESCRIPTOR: [
        *((os, name) for name in ("open", "scandir", "listdir", "pipe", "dup", "eventfd", "memfd_create")),
        *((socket, name) for name in ("socketpair", "getaddrinfo")),
        (socket.socket, "__init__"),
        (socket.socket, "accept"),
        (selectors.EpollSelector, "_selector_cls"),
        (builtins, "open"),
        (io, "open"),
    ],
    Resource.MEMORY: [(mmap, "mmap")],
    Resource.PAGES: [(allocation, "populate")],
}
"""What asks the system for each."""


_SOCKET = socket.socket.__init__


def _error(kind: Resource) -> Exception:
    """Return what Python raises."""
    if kind is Resource.THREAD:
        return RuntimeError("can't start new thread")
    code = {Resource.DESCRIPTOR: errno.EMFILE, Resource.MEMORY: errno.ENOMEM, Resource.PAGES: errno.EFAULT}[kind]
    return OSError(code, os.strerror(code))


class Shortage:
    """A context in which the calls of a kind from the `first`-th on are refused, `count` of them."""

    def __init__(self, kind: Resource, first: int, count: float = 1) -> None:
        self._kind = kind
        self._first, self._count = first, count
        self._lock = threading.Lock()
        self._calls = 0
        self.refused = 0

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        for owner, name in _CALLS[self._kind]:
            call = getattr(owner, name)
            refusing = self._refusing(call)
            self._patch.setattr(owner, name, staticmethod(refusing) if owner is selectors.EpollSelector else refusing)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:  # Any: as the call
        def refusing(*arguments: Any, **keywords: Any) -> Any:
            has_descriptor = call is _SOCKET and (len(arguments) > 4 or keywords.get("fileno") is not None)
            if not has_descriptor:
                self._count_call()
            return call(*arguments, **keywords)

        return refusing

    def _count_call(self) -> None:
        with self._lock:
            self._calls += 1
            if not self._first <= self._calls < self._first + self._count:
                return
            self.refused += 1
        raise _error(self._kind)


class DescriptorsLeft:
    """A context in which this process can open so many more descriptors, whoever asks for them."""

    def __init__(self, count: int) -> None:
        self._count_left = count

    def __enter__(self) -> Self:
        self._taken = [os.open(os.devnull, os.O_RDONLY)]
        last = max(map(int, os.listdir("/proc/self/fd")))
        while self._taken[-1] < last:  # no free number below
            self._taken.append(os.open(os.devnull, os.O_RDONLY))
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = max(last, self._taken[-1]) + 1 + self._count_left
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self._limits[1]))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        for fd in self._taken:
            os.close(fd)


def outage(kind: Resource) -> Shortage:
    """Return a context in which all calls of a kind are refused."""
    return Shortage(kind, 1, math.inf)
