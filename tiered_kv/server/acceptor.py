"""The acceptance of connections: which processes may connect to a server, and which are refused with a word.

`CacheServer` owns it, and calls it on the server's thread. What must stay true: the user and the end of a process come
from the kernel, and no client can make the server wait. A shortage of descriptors costs a pause, and no processor.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

from tiered_kv.server.channel import Channel
from tiered_kv.server.process import Process
from tiered_kv.server.users import Users

UNREAD_BYTES_MAX: Final = 8 << 20  # that a client may leave unread; then it loses its connection
ACCEPT_PAUSE_S: Final = 0.5  # how long no connection is taken after the system had no descriptor or memory for one
_ACCEPTED_A_PASS: Final = 16
_SNDBUF_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)


class Acceptor:
    """Takes connections from a listening socket.

    Args:
        listener: A listening unix socket of packets (SOCK_SEQPACKET); `close` closes it.
        users: Who may connect.
        pidfd_of: Returns a descriptor that is readable once the peer of a socket has ended, or -1.
        selector: Watches the listener, but for pauses.
        on_connecting: Called by the selector's owner when processes connect.
        on_unsent: Called with a process's channel when messages wait in it.
    """

    def __init__(
        self,
        listener: socket.socket,
        users: Users,
        pidfd_of: Callable[[socket.socket, int], int],
        selector: selectors.BaseSelector,
        *,
        on_connecting: Callable[[int], None],
        on_unsent: Callable[[Channel], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self.users = users
        self._pidfd_of = pidfd_of
        self._selector = selector
        self._on_connecting, self._on_unsent = on_connecting, on_unsent
        self._paused_until_s: float | None = None
        self._watch()

    def take(self, processes: Collection[Process], most: int) -> Iterator[Process]:
        """Yield the processes that connect now; refuse those beyond `most`. `processes` has those of before."""
        for _ in range(_ACCEPTED_A_PASS):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # to try again at once would take all of the processor
                self._pause(error)
                return
            process = self._taken(sock, len(processes), most)
            if process is not None:
                yield process

    def go_on(self, now_s: float) -> None:
        """Take connections again, once a pause is over."""
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._paused_until_s = None
            self._watch()

    def close(self) -> None:
        self._listener.close()

    def _watch(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connecting)

    def _pause(self, error: OSError) -> None:
        _log.warning("no connection can be taken: %s", error.strerror)
        self._paused_until_s = time.monotonic() + ACCEPT_PAUSE_S
        self._selector.unregister(self._listener)

    def _taken(self, sock: socket.socket, connected: int, most: int) -> Process | None:
        """Return the process of a connection; None if it is refused, or has gone."""
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SNDBUF_BYTES)
            pid, uid, _gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            refusal = self.users.refusal(uid)
            if not refusal and connected >= most:  # those without a connection count too
                refusal = f"{most} processes are connected, and there can be no more; raise its limit of descriptors"
            pidfd = -1 if refusal else self._pidfd_of(sock, pid)
            if pidfd < 0 and not refusal:
                refusal = "the server cannot see when this process ends; share its PID namespace, or use Linux 6.5"
        except OSError:
            sock.close()
            return None
        channel = Channel(sock, UNREAD_BYTES_MAX, on_unsent=self._on_unsent)
        if refusal:
            channel.refuse(refusal)
            channel.close()
            return None
        return Process(channel, pid, pidfd, time.monotonic())
