"""The file that keeps the resets for which engines ask while their server is away or ends.

A namespace has one file, beside the server's socket. It begins with a number: how many resets the secondary tiers have
written. An engine that wants a reset appends a byte, and then sends RESET. So the file's length says how many resets
were asked for. A server resets the namespace if length and number differ at its start, or if the length grows later. It
changes the number once all tiers have written the reset. A damaged file, or another user's, counts as a wanted reset.

The server hands schedulers a descriptor of the file. With it they can append as any user, from any container, and after
the server has gone. The file is never replaced or cut while it has a name.

In each pass the server's thread makes these calls of a `ServedStack`, in this order:

1. `see_resets` notes how many resets the file has. An engine counts its reset in the file before it sends the message.
2. The messages are read. A message of a reset calls `reset`, which moves `begun` up to that reset.
3. `reset_unasked` compares the counts. If the file had a reset in step 1 whose message did not come in step 2, the
   reset is carried out now. The message is late, or never comes: the engine has ended, or knew no server. If a reset
   came after step 1, a lookup of step 2 may have been sent after it: the next pass answers (`has_waited`). In that pass
   all resets are carried out, with or without their messages, so that resets without end cannot keep the server from
   answering.
4. `step` answers lookups: no answer is from before a reset that came before its lookup was sent. If all begun resets
   are written, `step` tells the file so, once for each change of `begun`.

So the number of written resets in the file is at most `begun`, and `begun` is at most the number of resets that the
file asks for.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tiered_kv.config.namespace import Namespace
from tiered_kv.config.stack_config import BlockSettings
from tiered_kv.config.validation import validate
from tiered_kv.errors import TieredKVError
from tiered_kv.system.permissions import FILE_MODE, check_file

_WRITTEN: Final = struct.Struct("<q")
_DIGEST_CHARACTERS: Final = 16
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in place of the file lets no call wait

_log = logging.getLogger(__name__)


def reset_path(socket_path: str | os.PathLike[str], namespace: str) -> Path:
    """Return where the file of a namespace is; `namespace` is its digest in hexadecimal."""
    return Path(f"{os.fspath(socket_path)}.resets-{namespace[:_DIGEST_CHARACTERS]}")


class ResetFile:
    """A server's side of the file. Owned by the server's thread, once it is made.

    Attributes:
        fd: Descriptor with which clients append; -1 if the file cannot be used. Then a reset ends with its process.
        begun: How many resets of the file the manager has begun. A tier may still be writing the last of these resets.
        has_noted: Whether the file has been told that all tiers have written the begun resets.
        has_waited: Whether a pass has left its messages to the next one, since a reset came while it read them.
    """

    def __init__(self, socket_path: Path | None, namespace: str) -> None:
        self._find(socket_path, namespace)
        self.begun = self._seen = self.written
        self.has_noted, self.has_waited = True, False

    def _find(self, socket_path: Path | None, namespace: str) -> None:
        self.fd = self._own_fd = -1
        self._asked = 0
        self._is_unknown = False  # whether a file exists that cannot be used
        folders = [] if socket_path is None else [socket_path.parent]
        folders += [Path(each) for each in os.environ.get("STATE_DIRECTORY", "").split(":")[:1] if each and folders]
        why = ""
        for folder in folders:
            assert socket_path is not None
            path = reset_path(folder / socket_path.name, namespace)
            try:
                self._open(path)
                self._is_unknown = False
                return
            except OSError as error:
                self.close()
                if os.path.lexists(path):
                    self._is_unknown, why = True, f"{path}, which is taken for a reset: {error.strerror or error}"
                why = why or f"{folder}: {error.strerror or error}"
        if why:
            _log.warning(
                "a reset that is asked for while no server runs is lost when its process ends: cannot write to %s", why
            )

    def _open(self, path: Path) -> None:
        self._own_fd = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, FILE_MODE)
        status = check_file(self._own_fd, str(path))
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | _FLAGS)
        if not os.path.samestat(status, os.fstat(self.fd)):
            raise FileExistsError(f"{path} was replaced")
        if not status.st_size:
            os.write(self.fd, _WRITTEN.pack(0))  # behind a client's byte it is no header, but a reset
        elif status.st_size < _WRITTEN.size:  # the header is lost: a reset counts as asked for
            os.pwrite(self._own_fd, _WRITTEN.pack(-1), 0)

    def add(self) -> None:
        """Note a reset for a client that could not."""
        if self.fd >= 0:
            with suppress(OSError):
                os.write(self.fd, b"r")

    def asked(self) -> int:
        """Return how many resets were asked for. It takes a microsecond."""
        if self._own_fd >= 0:
            with suppress(OSError):  # the file system has gone: the last number holds
                self._asked = max(0, os.fstat(self._own_fd).st_size - _WRITTEN.size)
        return self._asked

    @property
    def are_all_begun(self) -> bool:
        return self.asked() == self.begun

    def see(self) -> None:
        """Note how many resets were asked for, before messages are read."""
        self._seen = self.asked()

    def is_one_left(self) -> bool:
        """Return, after messages were read, whether a reset has to be carried out without its message."""
        has_waited, self.has_waited = self.has_waited, False
        if has_waited or self._seen != self.begun:
            return not self.are_all_begun
        self.has_waited = not self.are_all_begun
        return False

    def begin(self, number: int) -> None:
        """Note that the manager begins a reset: of all that were asked for, or those up to `number` if it is not 0.

        A message carries out the file's resets up to the message's own reset, and no later reset. An engine that has
        sent two messages counts two epochs. If one epoch served both messages, the engine's next requests would have an
        epoch that is unknown here, and would store nothing.
        """
        asked = self.asked()
        self.begun, self.has_noted = min(number or asked, asked), False

    @property
    def is_unnoted(self) -> bool:
        """Whether the file is to be told of begun resets, once the tiers have written them."""
        return not self.has_noted and self._seen == self.begun

    def note_begun(self) -> None:
        """Note that the tiers have written all begun resets."""
        self.has_noted = True
        self.note_written(self.begun)

    @property
    def written(self) -> int:
        """How many resets the tiers have written; -1 if that is not known."""
        if self._is_unknown:
            return -1
        data = os.pread(self._own_fd, _WRITTEN.size, 0) if self._own_fd >= 0 else _WRITTEN.pack(0)
        return int(_WRITTEN.unpack(data)[0]) if len(data) == _WRITTEN.size else -1

    def note_written(self, count: int) -> None:
        """Note that the tiers have written the first `count` resets."""
        if self._own_fd >= 0:
            with suppress(OSError):  # if the write fails, the next server resets once more
                os.pwrite(self._own_fd, _WRITTEN.pack(count), 0)

    def close(self) -> None:
        for fd in (self.fd, self._own_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._own_fd = -1


class ResetNotes:
    """A client's side of the file. Any thread may call.

    Args:
        socket_path: The server's.
        settings: The namespace and the block of the client; None for the server's own.
    """

    def __init__(self, socket_path: str, settings: Mapping[str, Any] | None) -> None:  # Any: JSON
        self._socket_path = socket_path
        self._settings = settings
        self._lock = threading.Lock()  # guards the next two; held for the append of a byte
        self._fd = -1
        self._noted: tuple[int, int, int] | None = None
        """Device and inode of the file with the last note, and the place of the note; None before the first note."""
        self._has_warned = False
        self.count = 0
        """How many resets were noted. The manager's thread alone changes it, after the note."""

    def adopt(self, fd: int) -> None:
        """Use a copy of a server's descriptor from now on; the caller closes `fd`."""
        own = os.dup(fd)
        with self._lock:
            before, self._fd = self._fd, own
        if before >= 0:
            os.close(before)

    def note(self, namespace: str) -> None:
        """Append a reset to the file of a namespace; \"\" means the settings' namespace. It waits for no server."""
        try:
            self._note(namespace)
        finally:
            self.count += 1

    def _note(self, namespace: str) -> None:
        is_kept = False
        with suppress(OSError), self._lock:
            self._noted = None
            if self._fd >= 0:
                os.write(self._fd, b"r")
                status = os.fstat(self._fd)
                self._noted = status.st_dev, status.st_ino, status.st_size - _WRITTEN.size
                is_kept = status.st_nlink > 0  # if not, the directory was removed after the end of its server
        if is_kept:
            return
        try:
            path = reset_path(self._socket_path, namespace or self._digest())
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS, FILE_MODE)
            try:
                os.write(fd, b"r")
            finally:
                os.close(fd)
        except (OSError, TieredKVError) as error:
            if not self._has_warned:
                self._has_warned = True
                why = error.strerror if isinstance(error, OSError) else str(error)
                _log.warning(
                    "a reset is lost if this process ends while no server runs: %s: %s", self._socket_path, why
                )

    @property
    def number(self) -> int:
        """The place of the last note in the server's present file; 0 if the note is not in that file."""
        with self._lock:
            if self._noted is None or self._fd < 0:
                return 0
            status = os.fstat(self._fd)
            return self._noted[2] if self._noted[:2] == (status.st_dev, status.st_ino) else 0

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _digest(self) -> str:
        settings = self._settings or {}
        namespace = validate(Namespace, settings.get("namespace"), ("namespace",))
        block = validate(BlockSettings, settings.get("block"), ("block",))
        return namespace.identify(block_bytes=block.bytes, block_tokens=block.tokens).digest.hex()
