"""A trace file: a line for each request, with salted hashes, in the form that `tiered_kv.workload.trace` reads.

The recorder's thread writes; the file is opened on any thread. What must stay true:

- The file has no token, no key and no name of a session. Its ids are hashes with a random salt, which is kept in memory
  only: nobody can tell whether a block of known tokens is in the trace, or compare two traces.
- The file ends with a whole line, unless the machine or the process ends in the middle of a write.
- The file and the one before it have at most `size_max` bytes together.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ConfigError
from tiered_kv.system.step import give_way
from tiered_kv.tiering.recording.requests import AskedRequest, positions

CHUNK_KEYS: Final = 128
"""Keys that are hashed at once, in some 0.1 ms: a scheduler may wait for the interpreter's lock meanwhile."""
REQUEST_KEYS_MAX: Final = 180_000
"""Keys of the longest request that is written: a reader takes lines up to 4 MiB, and a key has 21 characters."""
OLDER: Final = ".1"
"""The end of the name of the file before."""
_BEGIN: Final = b'{"timestamp":'
_SALT_BYTES: Final = 32
_ID_BYTES: Final = 8
_MODE: Final = 0o600


class TraceFile:
    """The lines of one recording. One thread writes.

    Args:
        path: The file. One that is there is kept beside it, with `OLDER` at the end of its name.
        size_max: Limit of the bytes of both files together.
        block_tokens: Tokens of a block.
        start_s: When the recording begins; a line's timestamp counts from it.

    Raises:
        ConfigError: The file cannot be written, is no trace, or another process writes it.
    """

    def __init__(self, path: Path, size_max: int, block_tokens: int, start_s: float) -> None:
        self._path = path
        self._file_max = size_max // 2
        self.block_tokens = block_tokens
        self._start_s = start_s
        self.reset()
        self._fd, self._size = self._opened(), 0
        try:
            if os.fstat(self._fd).st_size:
                self._rotate()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot be replaced: {error.strerror}") from error
            raise

    def reset(self) -> None:
        """Take another salt: from now on no id is one of before."""
        self._hash = blake2b(key=secrets.token_bytes(_SALT_BYTES), digest_size=_ID_BYTES)

    def write(self, request: AskedRequest) -> bool:
        """Write a request's line; return False if it is too long for a reader.

        Raises:
            OSError: The line cannot be written. The file ends with the line before, if the system allows that.
        """
        keys = request.keys
        if len(keys) > REQUEST_KEYS_MAX:
            return False
        line = self._line(request, keys)
        if self._size and self._size + len(line) > self._file_max:
            self._rotate()
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError:
            if written:
                self._cut()
            raise
        self._size += len(line)
        return True

    def close(self) -> None:
        os.close(self._fd)

    def _cut(self) -> None:
        """Remove a part of a line; if that fails too, the next line begins another file."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._size = self._file_max

    def _line(self, request: AskedRequest, keys: Sequence[OffloadKey]) -> bytes:
        ids: list[str] = []
        for first in range(0, len(keys), CHUNK_KEYS):
            give_way()
            ids += map(str, self._ids_of(keys[first : first + CHUNK_KEYS]))
        more: dict[str, object] = {}
        if request.session:
            (session,) = self._ids_of([request.session.encode(errors="surrogatepass")])
            more["session"] = f"{session:016x}"
        if given := request.hints.given():
            more["hints"] = {name: value for name, value in given.items() if value is not None and value != []}
        at_ms = max(0, round(1000 * (request.began_s - self._start_s)))
        tokens = positions(keys) * self.block_tokens
        end = f",{json.dumps(more)[1:-1]}" if more else ""
        head = f'"input_length":{tokens},"output_length":0'
        return b'%s%d,%s,"hash_ids":[%s]%s}\n' % (_BEGIN, at_ms, head.encode(), ",".join(ids).encode(), end.encode())

    def _ids_of(self, names: Sequence[bytes]) -> tuple[int, ...]:
        """Return the salted ids of names. Most of the thread's time goes by here: no call but the hash's own."""
        digests: list[bytes] = []
        for name in names:
            each = self._hash.copy()
            each.update(name)
            digests.append(each.digest())
        return struct.unpack(f"<{len(digests)}Q", b"".join(digests))

    def _opened(self) -> int:
        """Return a descriptor of the file, which this process has locked."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = os.open(self._path, flags, _MODE)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{self._path} is no file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_trace(self._path):
                raise ConfigError(f"{self._path} is there and is no recorded trace: give another path")
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"another process records into {self._path}: give each its own path") from error
            if isinstance(error, OSError):
                raise ConfigError(f"cannot write {self._path}: {error.strerror}") from error
            raise
        return fd

    def _rotate(self) -> None:
        """Keep the file as the one before, and begin another."""
        older = self._path.with_name(self._path.name + OLDER)
        if older.exists() and not _is_trace(older):
            raise ConfigError(f"{older} is there and is no recorded trace: give another path")
        with suppress(FileNotFoundError):  # the last try has moved it, and could not open another
            self._path.rename(older)
        fd, self._fd = self._fd, self._opened()
        self._size = 0
        os.close(fd)


def check_place(path: Path) -> None:
    """Raise `ConfigError` if no trace can be written here; nothing is changed."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into {path.parent}: make the folder, or let this user write into it")
    for each in (path, path.with_name(path.name + OLDER)):
        if each.exists() and not (each.is_file() and _is_trace(each)):
            raise ConfigError(f"{each} is there and is no recorded trace: give another path")


def _is_trace(path: Path) -> bool:
    """Return whether a file is empty, or begins as a recorded trace does."""
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) in (b"", _BEGIN)
