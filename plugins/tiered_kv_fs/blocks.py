"""The files of one namespace: written, read and looked for, a block at a time. All calls may wait for the server."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.permissions import NotPrivateError
from tiered_kv.toolkit.codec_set import CodecSet
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record, record_bytes_max
from tiered_kv.toolkit.room import ThreadRoom
from tiered_kv.toolkit.status import REFUSED, UNREADABLE
from tiered_kv.toolkit.unreadable import Unreadable
from tiered_kv_fs.counters import Counters
from tiered_kv_fs.descent import Descent
from tiered_kv_fs.layout import SHARD_HEX, block_name, temporary_name
from tiered_kv_fs.posix import (
    ALLOCATION_BYTES,
    make_directory,
    opened,
    read_all,
    reason_of,
    remove,
    round_up,
    take_away,
    write_all,
)

TOUCH_INTERVAL_S: Final = 60.0
"""A block that is used is marked as used at most this often: a mark is a call to the server."""

ENTRY_BYTES: Final = 512
"""What a file may make its directory grow by."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of some blocks.

    Args:
        done: The keys that succeeded.
        reason: Why the others did not; the last reason if there were several.
        used_bytes: Bytes that came to lie in the directory.
        freed_bytes: Bytes that this call took away from there, to put others in their place.
    """

    done: list[OffloadKey]
    reason: str = ""
    used_bytes: int = 0
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Stored:
    """As `Moved`, of one block; no reason if it is there."""

    reason: str = ""
    used_bytes: int = 0
    freed_bytes: int = 0


class BlockFiles:
    """Reads and writes blocks. Any thread may call, several at once.

    Args:
        namespace_path: The namespace's directory.
        namespace_digest: 16 bytes.
        block_bytes: Bytes of one block.
        codecs: How blocks are written and read.
        counters: Where to count.
        private: Refuse directories that others may have put something into; see `Descent`.
    """

    def __init__(
        self,
        namespace_path: str,
        namespace_digest: bytes,
        block_bytes: int,
        codecs: CodecSet,
        counters: Counters,
        *,
        private: bool = True,
    ) -> None:
        self._descent = Descent(namespace_path, private=private)
        self._namespace_digest = namespace_digest
        self._block_bytes = block_bytes
        self._codecs = codecs
        self._room = ThreadRoom()  # for payloads that are not the blocks themselves
        self._counters = counters
        self._unreadable: Unreadable[str] = Unreadable()  # by what follows the namespace's directory in their paths

    def store(self, epoch: str, owner: str, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Moved:
        """Write the blocks that are not there yet, or that are there and cannot be read here.

        Args:
            epoch: The directory to write to.
            owner: Whose files they are until they are in place.
            keys, blocks: As in `AsyncTier.store_blocks`.
        """
        stored: list[OffloadKey] = []
        reason = ""
        used_bytes = freed_bytes = 0
        try:
            with self._descent.epoch(epoch, make=True) as epoch_fd:
                # Backwards, so that the head of a prefix, without which its tail is worthless, is evicted last.
                for key, block in zip(reversed(keys), reversed(blocks), strict=True):
                    one = self._store_one(epoch, epoch_fd, owner, key, block)
                    used_bytes += one.used_bytes
                    freed_bytes += one.freed_bytes
                    if one.reason:
                        reason = one.reason
                    else:
                        stored.append(key)
        except OSError as error:
            reason = self._note_failure(error)
        return Moved(stored, reason, used_bytes, freed_bytes)

    def load(self, epoch: str, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Moved:
        """Read blocks into place and verify them. One that is damaged is removed."""
        loaded: list[OffloadKey] = []
        reason = ""
        try:
            with self._descent.epoch(epoch) as epoch_fd:
                for key, block in zip(reversed(keys), reversed(blocks), strict=True):
                    try:
                        failure = self._load_one(epoch, epoch_fd, key, block)
                    except OSError as error:
                        failure = self._note_unread(error)
                    if failure:
                        reason = failure
                    else:
                        loaded.append(key)
        except OSError as error:
            reason = self._note_unread(error, len(keys))
        return Moved(loaded, reason)

    def contains(self, epoch: str, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether a file of a possible size is there that was not found to be unreadable here.

        Raises:
            OSError: The directory cannot be asked.
        """
        try:
            with self._descent.epoch(epoch) as epoch_fd:
                return [self._contains_one(epoch, epoch_fd, key) for key in keys]
        except (FileNotFoundError, NotADirectoryError):
            return [False] * len(keys)
        except NotPrivateError as error:
            self._note_failure(error)
            return [False] * len(keys)

    def _contains_one(self, epoch: str, epoch_fd: int, key: OffloadKey) -> bool:
        name = block_name(key, self._namespace_digest)
        if _place(epoch, name) in self._unreadable:
            return False
        try:
            status = self._descent.status_of(name, epoch, epoch_fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except NotPrivateError as error:
            self._note_failure(error)
            return False
        return stat.S_ISREG(status.st_mode) and self._is_possible(status.st_size)

    def _store_one(self, epoch: str, epoch_fd: int, owner: str, key: OffloadKey, block: memoryview) -> _Stored:
        """Write one block, unless it is there and can be read."""
        name = block_name(key, self._namespace_digest)
        shard = name[:SHARD_HEX]
        made_bytes = 0
        try:
            try:
                shard_fd = self._descent.open_shard(shard, epoch, epoch_fd)
            except FileNotFoundError:
                made_bytes = ALLOCATION_BYTES * make_directory(shard, epoch_fd)
                shard_fd = self._descent.open_shard(shard, epoch, epoch_fd)
            try:
                replaces = _place(epoch, name) in self._unreadable
                if not replaces and self._is_there(name, shard_fd):
                    self._counters.add("present_blocks")
                    return _Stored(used_bytes=made_bytes)
                one = self._write(shard_fd, name, owner, key, block, replaces=replaces)
                if not one.reason:
                    self._unreadable.forget((_place(epoch, name),))
                return replace(one, used_bytes=made_bytes + one.used_bytes)
            finally:
                os.close(shard_fd)
        except OSError as error:
            return _Stored(self._note_failure(error), made_bytes)

    def _is_there(self, name: str, shard_fd: int) -> bool:
        """Return whether a block has its file, and mark it as used."""
        try:
            status = os.stat(name, dir_fd=shard_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not (stat.S_ISREG(status.st_mode) and self._is_possible(status.st_size)):
            return False
        if _is_due(status):
            with suppress(OSError):  # read-only, or gone meanwhile
                os.utime(name, dir_fd=shard_fd, follow_symlinks=False)
        return True

    def _write(
        self, shard_fd: int, name: str, owner: str, key: OffloadKey, block: memoryview, *, replaces: bool
    ) -> _Stored:
        header, payload = encode_record(key, block, self._namespace_digest, self._codecs.writer, self._room.take)
        temporary = temporary_name(name, owner)
        charge_bytes = _charge(HEADER_BYTES + len(payload))
        freed_bytes = 0
        try:
            with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, shard_fd) as fd:
                write_all(fd, [header, payload])  # closing it is when a network file system tells of a full disk
            if replaces:
                freed_bytes = _take_away(name, owner, shard_fd)
            os.rename(temporary, name, src_dir_fd=shard_fd, dst_dir_fd=shard_fd)
        except OSError as error:
            is_gone = remove(temporary, shard_fd) or not _exists(temporary, shard_fd)
            return _Stored(self._note_failure(error), 0 if is_gone else charge_bytes, freed_bytes)
        self._counters.add("stored_files")
        return _Stored("", charge_bytes, freed_bytes)

    def _load_one(self, epoch: str, epoch_fd: int, key: OffloadKey, block: memoryview) -> str:
        """Read one block; return why not, or an empty string."""
        name = block_name(key, self._namespace_digest)
        fd = self._descent.open_block(name, epoch, epoch_fd)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self._counters.add("failed_not_a_file")
                return "missing"
            verdict = self._read(fd, status.st_size, key, block)
            if verdict is RecordStatus.OK:
                self._counters.add("loaded_files")
                self._unreadable.forget((_place(epoch, name),))
                if _is_due(status):
                    with suppress(OSError):  # read-only: the block is good all the same
                        os.utime(fd)
                return ""
        finally:
            os.close(fd)
        if verdict in UNREADABLE:
            self._counters.add(f"failed_{verdict.value}")
            self._unreadable.note((_place(epoch, name),))
            return str(verdict.value)
        self._counters.add("corrupt_blocks")
        self._counters.add(f"corrupt_{verdict.value}")
        self._remove_damaged(epoch, epoch_fd, name, status)
        return str(verdict.value) if verdict in REFUSED else "checksum"

    def _read(self, fd: int, size_bytes: int, key: OffloadKey, block: memoryview) -> RecordStatus:
        """Read and verify a record, straight into its block where it is as long as a raw one."""
        if size_bytes > record_bytes_max(self._block_bytes):
            return RecordStatus.BAD_LENGTH
        if size_bytes < HEADER_BYTES:
            return RecordStatus.TRUNCATED
        header = memoryview(bytearray(HEADER_BYTES))
        is_raw = size_bytes == HEADER_BYTES + self._block_bytes
        payload = block if is_raw else self._room.take(size_bytes - HEADER_BYTES)
        if read_all(fd, [header, payload]) != size_bytes:
            return RecordStatus.TRUNCATED
        return decode_record(header, payload, key, block, self._namespace_digest, self._codecs)

    def _remove_damaged(self, epoch: str, epoch_fd: int, name: str, damaged: os.stat_result) -> None:
        """Remove a file, unless another has taken its place; where that is refused, offer it no more."""
        try:
            shard_fd = self._descent.open_shard(name[:SHARD_HEX], epoch, epoch_fd)
            try:
                if not os.path.samestat(os.stat(name, dir_fd=shard_fd, follow_symlinks=False), damaged):
                    return
                if remove(name, shard_fd):
                    self._counters.add("removed_files")
                elif _exists(name, shard_fd):
                    self._unreadable.note((_place(epoch, name),))
            finally:
                os.close(shard_fd)
        except OSError as error:
            self._note_failure(error)

    def _is_possible(self, size_bytes: int) -> bool:
        return HEADER_BYTES < size_bytes <= record_bytes_max(self._block_bytes)

    def _note_unread(self, error: OSError, blocks: int = 1) -> str:
        """Count blocks that could not be read, and return why."""
        if not isinstance(error, FileNotFoundError):
            return self._note_failure(error, blocks)
        self._counters.add("missing_blocks", blocks)
        return "missing"

    def _note_failure(self, error: OSError, times: int = 1) -> str:
        reason = reason_of(error)
        self._counters.add(f"failed_{reason}", times)
        return reason


def room_bytes_of(stored_bytes: int) -> int:
    """Return what storing a block of at most `stored_bytes` may take: its record, and a directory for it."""
    return _charge(HEADER_BYTES + stored_bytes) + ALLOCATION_BYTES


def _place(epoch: str, name: str) -> str:
    """Return where a block is in its namespace's directory."""
    return f"{epoch}/{name[:SHARD_HEX]}/{name}"


def _charge(record_bytes: int) -> int:
    return round_up(record_bytes) + ENTRY_BYTES


def _take_away(name: str, owner: str, shard_fd: int) -> int:
    """Take away the block that is to be replaced, so that the ledger can be told; return the bytes.

    Of several processes that replace it, each gets another file or none, and may get what one of them has just put
    there. Until the new one is in place the block is a miss. Directories, which cannot be replaced, stay.
    """
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=shard_fd, follow_symlinks=False).st_mode):
            return 0
    except FileNotFoundError:
        return 0
    taken = take_away(name, temporary_name(name, owner), shard_fd)
    if taken is None or taken.st_nlink > 1:  # of which the bytes are still there
        return 0
    return round_up(taken.st_size)  # as charged, but for the entry: directories do not shrink


def _exists(name: str, dir_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it cannot be told
    return True


def _is_due(status: os.stat_result) -> bool:
    """Return whether a file's last use is to be marked again; either clock may be ahead."""
    return abs(time.time() - status.st_mtime) >= TOUCH_INTERVAL_S
