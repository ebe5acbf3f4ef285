"""The block files of one namespace: writes, reads and lookups.

`FsTier` calls `store`, `load`, `contains` and `touch` on the tier's threads, several at once: they do I/O. A file gets
its name only when it is complete. A load verifies the whole record, and deletes a damaged file.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import UNREADABLE, Reason
from tiered_kv.toolkit.codecs import CodecSet, ThreadBuffer
from tiered_kv.toolkit.record import (
    HEADER_BYTES,
    RecordStatus,
    Unreadable,
    decode_record,
    encode_record,
    record_bytes_max,
)
from tiered_kv.toolkit.small_files import LOOKING, FirstFailures, opened, put_in_place, read_all, remove, write_all
from tiered_kv_fs.allocation import Allocation
from tiered_kv_fs.directory import FileFailure, FileReason, make_directory, reason_of, unlink_same
from tiered_kv_fs.names import block_path, temporary_path

_log = logging.getLogger("tiered_kv.fs")

TOUCH_INTERVAL_S: Final = 60.0
"""How often the use of a block is written to its file, at most: each write is a call to the server."""


@dataclass(slots=True)
class Moved:
    """The outcome of one store or load of several blocks."""

    done: list[OffloadKey]
    reason: FileReason | None = None  # why the other blocks failed; the last reason if there were several
    used_bytes: int = 0  # the filled part of the grant
    yields: int = 0  # how often old blocks were deleted, because the disk is full


@dataclass(eq=False)
class BlockFiles:
    """Reads and writes block files. Several threads may call at once."""

    namespace_path: str
    namespace_digest: bytes
    owner: str  # the tier's name in the ledger and in the names of unfinished files; 16 hexadecimal digits
    block_bytes: int
    codecs: CodecSet
    counters: Counters
    is_granted: Callable[[], bool]  # whether the grant in use is still valid
    give_way: Callable[[int, int, int], bool]  # see `GrantClient.give_way`
    allocation: Allocation
    private: bool  # whether files of other users are ignored

    def __post_init__(self) -> None:
        self._uid = os.geteuid() if self.private else None
        self._room = ThreadBuffer()
        """Buffers for payloads that a codec has made from their blocks; each thread has a buffer of its own."""
        self._unreadable: Unreadable[str] = Unreadable()
        """The blocks that could not be read, by path."""
        self._failures = FirstFailures(_log, self.namespace_path, reason_of)
        self.newest_path = ""  # the path of the last stored block; any thread may read it

    def store(self, epoch: str, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float) -> Moved:
        """Write the blocks that are missing, or that this process cannot read.

        A block is not written if its checksum was computed after the deadline: its memory may have been reused by then.
        """
        moved = Moved([])
        # Backwards: the head of a prefix becomes the newest and is evicted last. Without it the tail is worthless.
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            path = self._path_of(epoch, key)
            reason = self._try_to_store(path, key, block, moved, deadline)
            while reason is Reason.NO_SPACE and self._has_given_way(moved, len(keys) - len(moved.done), deadline):
                reason = self._try_to_store(path, key, block, moved, deadline)
            if reason is not None:
                moved.reason = reason
            else:
                moved.done.append(key)
        return moved

    def _try_to_store(
        self, path: str, key: OffloadKey, block: memoryview, moved: Moved, deadline: float
    ) -> FileReason | None:
        try:
            reason = self._store_one(path, key, block, moved, deadline)
        except OSError as error:
            reason = reason_of(error)
            self._failures.note("writing blocks", error)
        if reason is not None:
            self.counters.add("failed_calls_total", reason.value)
        return reason

    def _has_given_way(self, moved: Moved, blocks: int, deadline: float) -> bool:
        """Delete old blocks of a full disk: room for `blocks` blocks now, and for the same number in the next call."""
        if time.monotonic() >= deadline:
            return False
        wanted_files = 2 * (blocks + 2)  # an epoch's and a shard's directory take an inode, too
        wanted_bytes = 2 * blocks * self.allocation.room_bytes(self.block_bytes)
        moved.yields += 1
        return self.give_way(wanted_bytes, wanted_files, moved.yields - 1)

    @property
    def failure(self) -> str:
        """The newest failure, until a block is stored. Any thread."""
        return self._failures.newest

    def explain(self, reason: str) -> str | None:
        """Return the last failure for a reason; see `SecondaryTierManager.explain_failure`. Any thread."""
        return self._failures.texts.of(reason)

    def load(self, epoch: str, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], deadline: float) -> Moved:
        """Read blocks into place and verify them; no read begins after the deadline.

        A damaged block is deleted. `contains` hides an unreadable block for a while, or until a store replaces it.
        """
        moved = Moved([])
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            path = self._path_of(epoch, key)
            try:
                reason = self._load_one(path, key, block, deadline)
            except OSError as error:
                reason = Reason.ABSENT if isinstance(error, FileNotFoundError) else reason_of(error)
                self.counters.add("failed_calls_total", reason.value)
                if reason is not Reason.ABSENT:
                    self._failures.note("reading blocks", error)
                if reason is not Reason.ABSENT and error.errno != errno.ENOMEM:  # memory was lacking
                    self._unreadable.note((path,))
            if reason is not None:
                moved.reason = reason
            else:
                moved.done.append(key)
        return moved

    def contains(self, epoch: str, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether its file exists, has a possible size, and was not unreadable to this process.

        Raises `OSError`: the directory cannot be read.
        """
        paths = [self._path_of(epoch, key) for key in keys]
        try:
            return [path not in self._unreadable and self._found(path) is not None for path in paths]
        except OSError as error:
            self._failures.note(LOOKING, error)
            raise

    def touch(self, epoch: str, keys: Sequence[OffloadKey], interval_s: float) -> list[OffloadKey]:
        """Make the files of used blocks younger, if they are older than `interval_s`; return the missing blocks."""
        absent = []
        for key in reversed(keys):
            path = self._path_of(epoch, key)
            try:
                if _is_due(os.lstat(path), interval_s):
                    os.utime(path, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                absent.append(key)
            except OSError:  # a read-only directory, or another user's file: the block can still be loaded
                continue
        return absent[::-1]

    def _path_of(self, epoch: str, key: OffloadKey) -> str:
        return f"{self.namespace_path}/{epoch}/{block_path(key, self.namespace_digest)}"

    def _found(self, path: str) -> os.stat_result | None:
        """Return the status of a block's file; None if no file has a possible size and owner."""
        with suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(path)
            is_sized = HEADER_BYTES < status.st_size <= record_bytes_max(self.block_bytes)
            if is_sized and stat.S_ISREG(status.st_mode) and self._uid in (None, status.st_uid):
                return status
        return None

    def _store_one(
        self, path: str, key: OffloadKey, block: memoryview, moved: Moved, deadline: float
    ) -> FileReason | None:
        """Write one block, unless it exists and can be read; return why that failed."""
        if path not in self._unreadable and (status := self._found(path)) is not None:
            if _is_due(status):
                with suppress(OSError):  # read-only, or gone meanwhile
                    os.utime(path, follow_symlinks=False)
            self.counters.add("present_blocks_total")
            return None
        if not self.is_granted():
            return FileFailure.LAPSED
        parts = encode_record(key, block, self.namespace_digest, self.codecs, self._room.take)
        if time.monotonic() >= deadline:
            return Reason.EXPIRED
        temporary = temporary_path(path, self.owner)
        size_bytes = sum(map(len, parts))
        learns = not moved.used_bytes  # only of the first file: a status may cost a network round trip
        try:
            try:
                self._write(temporary, parts, learns)
            except FileNotFoundError:
                moved.used_bytes += self._make_above(temporary)
                self._write(temporary, parts, learns)
            if not self.is_granted():  # this process was suspended, and others may have got its grant
                raise TimeoutError(f"{path} was not stored: the grant has lapsed")
            put_in_place(temporary, path)
        except OSError:
            if not remove(temporary) and os.path.lexists(temporary):
                moved.used_bytes += self.allocation.charge_bytes(size_bytes)
            raise
        moved.used_bytes += self.allocation.charge_bytes(size_bytes)
        self.newest_path = path
        self._failures.newest = ""
        self._unreadable.forget((path,))
        return None

    def _write(self, path: str, parts: Sequence[bytes | memoryview], learns: bool) -> None:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, parts)  # a network file system may report a full disk only when the file is closed
            if learns:
                self.allocation.learn_open(os.fstat(fd))
        if learns:
            self.allocation.learn(os.lstat(path))

    def _make_above(self, path: str) -> int:
        """Make the directories of a file's epoch and shard; return the bytes that the new directories occupy.

        Raises `FileNotFoundError`: the namespace's directory is missing. `GrantClient` makes it, and checks its owner.
        """
        shard = os.path.dirname(path)
        return sum(self.allocation.unit_bytes for each in (os.path.dirname(shard), shard) if make_directory(each))

    def _load_one(self, path: str, key: OffloadKey, block: memoryview, deadline: float) -> FileReason | None:
        """Read one block; return why that failed."""
        with opened(path, os.O_RDONLY) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or self._uid not in (None, status.st_uid):
                reason = FileFailure.NOT_PRIVATE if stat.S_ISREG(status.st_mode) else FileFailure.NOT_A_FILE
                self.counters.add("failed_calls_total", reason.value)
                return reason
            if time.monotonic() >= deadline:
                return Reason.EXPIRED
            verdict = self._read(fd, status.st_size, key, block)
            if verdict is RecordStatus.OK:
                self._unreadable.forget((path,))
                if _is_due(status):
                    with suppress(OSError):  # read-only: the block is still good
                        os.utime(fd)
                return None
        if verdict in UNREADABLE:
            self.counters.add("unreadable_blocks_total", verdict.value)
            self._unreadable.note((path,))
            return verdict.reason
        self.counters.add("corrupt_blocks_total", verdict.value)
        try:
            unlink_same(path, status)
        except OSError as error:  # `contains` must not report the block any more
            self._failures.note("deleting a damaged block", error)
            self._unreadable.note((path,))
        return verdict.reason

    def _read(self, fd: int, size_bytes: int, key: OffloadKey, block: memoryview) -> RecordStatus:
        """Read and verify a record. If the file has the size of a raw record, its payload is read into the block."""
        if size_bytes > record_bytes_max(self.block_bytes):
            return RecordStatus.BAD_LENGTH
        if size_bytes < HEADER_BYTES:
            return RecordStatus.TRUNCATED
        header = memoryview(bytearray(HEADER_BYTES))
        is_raw = size_bytes == HEADER_BYTES + self.block_bytes
        payload = block if is_raw else self._room.take(size_bytes - HEADER_BYTES)
        if read_all(fd, [header, payload]) != size_bytes:
            return RecordStatus.TRUNCATED
        return decode_record(header, payload, key, block, self.namespace_digest, self.codecs)


def _is_due(status: os.stat_result, interval_s: float = TOUCH_INTERVAL_S) -> bool:
    """Return whether a use must be written to its file: the last was `interval_s` ago. Either clock may be ahead."""
    return abs(time.time() - status.st_mtime) >= interval_s
