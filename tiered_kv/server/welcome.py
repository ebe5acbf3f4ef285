"""Checks of a server's answer to HELLO: its fields, and the files that come with them.

A client's `Attachment` calls them, on the thread that connects. Another version, a faulty server, or another program at
the socket's path may answer anything. After these checks, no row is outside the memory, and no access behind the end of
a file raises SIGBUS.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from tiered_kv.config.units import format_bytes
from tiered_kv.errors import ConfigError
from tiered_kv.server import protocol
from tiered_kv.server.protocol import ProtocolError, Welcome

_GENERATION_BYTES: Final = 4
_STAT_BLOCK_BYTES: Final = 512  # stat(2)
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_WELCOME: Final = TypeAdapter(Welcome)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the server's answer, and the files that come with it, which the caller closes."""
    try:
        packet, fds, _flags, _address = socket.recv_fds(sock, protocol.PACKET_BYTES_MAX, 3)
    except ConnectionResetError:  # the server left our HELLO unread; its message comes next (unix(7))
        packet, fds, _flags, _address = socket.recv_fds(sock, protocol.PACKET_BYTES_MAX, 3)
    return packet, fds


def welcome_of(packet: bytes) -> Welcome:
    """Return the server's answer to HELLO.

    Raises:
        ConfigError: The server refuses, speaks another version, or gives impossible values.
        OSError: The server ends, or has closed the connection.
    """
    try:
        message = next(iter(protocol.messages_of(memoryview(packet))), None)
        if message is None:
            raise OSError("the server has closed the connection")
        if message.code == protocol.REFUSED:
            raise ConfigError(f"the host's cache refuses this process: {bytes(message.body).decode(errors='replace')}")
        if message.code == protocol.GOODBYE:
            raise OSError("the server ends")
        if message.code != protocol.WELCOME:
            raise ConfigError("the server does not speak the protocol of a host's cache")
        return _checked(protocol.object_of(message.body), bytes(message.body))
    except ProtocolError as error:
        raise ConfigError(f"the server does not speak the protocol of a host's cache: {error}") from None


def check_files(fds: list[int], welcome: Welcome) -> None:
    """Check that the files of the rows and their generations came, are as long as the server says, and cannot be cut.

    A third descriptor, of the resets, must be a regular file: a write to any other kind may wait.

    Raises:
        ConfigError: A file did not come, is too short, or is of a wrong kind.
        OSError: The server may cut a file. Then a stack opens as if there were no server.
    """
    if len(fds) < 2:
        raise ConfigError("the server has sent no memory")
    if not all(stat.S_ISREG(os.fstat(fd).st_mode) for fd in fds[2:]):
        raise ConfigError("expected a file of resets from the server, found none: replace the server")
    wanted = {"rows": welcome.rows * welcome.row_bytes, "generations": welcome.rows * _GENERATION_BYTES}
    for fd, (name, size_bytes) in zip(fds, wanted.items(), strict=False):
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < size_bytes:
            found = format_bytes(status.st_size) if stat.S_ISREG(status.st_mode) else "no file of memory"
            raise ConfigError(f"expected {format_bytes(size_bytes)} of {name} from the server, found {found}")
        if not _has_fixed_size(fd):
            raise OSError(f"expected {name} of a fixed size from the server, found a file that it may cut: replace it")


def check_allocated(fd: int, welcome: Welcome) -> None:
    """Check that all rows are allocated: a pin would charge other rows to this process, which might be killed.

    Raises:
        OSError: The server has not allocated all rows yet.
    """
    if welcome.prefault and os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES < welcome.rows * welcome.row_bytes:
        raise OSError("the server still allocates its rows, and this engine pins all of them")


def _has_fixed_size(fd: int) -> bool:
    """Return whether the kernel refuses to change the size of a file (seals, fcntl(2))."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:  # a file on a disk has no seals
        return False


def _checked(fields: dict[str, Any], body: bytes) -> Welcome:  # Any: JSON
    version = fields.get("version", 0)
    if isinstance(version, int) and version < protocol.VERSION_MIN:
        raise ConfigError(
            f"the server speaks version {version}, this process {protocol.VERSION_MIN} to {protocol.VERSION}: upgrade "
            "the server"
        )
    missing = [name for name in Welcome.__slots__ if name not in fields and name != "prefault"]
    if missing:
        raise ConfigError(f"the server does not say {', '.join(missing)}: upgrade the server")
    try:
        welcome = _WELCOME.validate_json(body, strict=True)
    except ValidationError as error:
        wrong = ", ".join(dict.fromkeys(str(each["loc"][0]) if each["loc"] else "JSON" for each in error.errors()))
        raise ConfigError(f"the server says what cannot be ({wrong}): replace it, or upgrade it") from None
    if not welcome.grant_rows <= welcome.grant_max <= welcome.rows:
        raise ConfigError("the server says what cannot be (grant_rows, grant_max): replace it, or upgrade it")
    return welcome
