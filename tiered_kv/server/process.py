"""A process that is connected to a server: how the server knows it from others, and sees its end.

The server's thread owns it. The server learns the user and the end of a process from the kernel, never from a message.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final

from tiered_kv.server.channel import Channel
from tiered_kv.server.protocol import Hello
from tiered_kv.server.session import Session

READS_AFTER_END_MAX: Final = 256
"""Limit of the passes that read messages of a process after its end: its child may have its socket, and send on."""
_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in Python's socket module


@dataclass(slots=True, eq=False)
class Process:
    """A connected process, or one that has left its connection and may still copy. Owned by the server's thread."""

    channel: Channel
    pid: int
    """The number of the process in the server's PID namespace; 0 for a process outside of this PID namespace."""
    pidfd: int
    """Readable once the process has ended; -1 if the system gives none."""
    since_s: float
    """When the process connected, in seconds of `time.monotonic`."""
    hello: Hello | None = None
    session: Session | None = None
    """None until its stack is open."""
    is_connected: bool = True
    """Whether this side has not closed the connection."""
    is_mapped: bool = False  # whether it has said MAPPED
    has_ended: bool = False
    """Whether the kernel has shown its end."""
    is_closed: bool = False
    """Whether it has closed its side of the connection. No message of it is left."""
    is_unread: bool = False
    """Whether the server will look for its messages."""
    is_leaving: bool = False
    """Whether the server will act on the end of the process or of its connection."""
    reads_left: int = READS_AFTER_END_MAX

    @property
    def role(self) -> str:
        return "" if self.hello is None else self.hello.role

    @property
    def name(self) -> str:
        role = "" if self.hello is None else f" ({self.role} of {self.hello.name})"
        return f"process {self.pid or 'of another PID namespace'}{role}"

    def is_same_as(self, other: Process) -> bool:
        """Return whether both are connections of one process, for certain."""
        mine, others = _identity_of(self.pidfd), _identity_of(other.pidfd)
        if mine is not None and others is not None:
            return mine == others
        return self.pid == other.pid > 0


def open_pidfd(sock: socket.socket, pid: int) -> int:
    """Return a descriptor that is readable once the peer has ended; -1 if there is none."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1


def _identity_of(pidfd: int) -> tuple[int, int] | None:
    """Return a value that only descriptors of one process share: from Linux 6.9 on, the inode. None before."""
    status, shared = os.fstat(pidfd), _anonymous_device()
    return None if shared is None or status.st_dev == shared else (status.st_dev, status.st_ino)


def _anonymous_device() -> int | None:
    """Return the device of descriptors without an inode of their own; None if no descriptor is left to find it."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return None
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
