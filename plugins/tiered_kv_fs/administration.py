"""Administration of a shared directory without a stack, while other processes may use it.

The commands that look into a storage call it, each on one thread, through `ListingAdministration` of
`tiered_kv/toolkit/listing_administration.py`.

A purge holds the sweep lock. It removes the namespace's holders from the ledger, and deletes the namespace's files.
The file with the readable form of the namespace goes last, so an interrupted purge leaves it. At the end the empty
directories go. On a full disk the purge goes on without lock and ledger. Files that cannot be deleted are passed over,
and named at the end.

What must stay true: a purge deletes no foreign file, and no file that was replaced after its listing.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Final

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.system.file_systems import is_of_place
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.administration import DESCRIPTION_BYTES_MAX, FOREIGN_NAMED_MAX, Purged, RecordCheck, Verification
from tiered_kv.toolkit.claimed import walk
from tiered_kv.toolkit.listing_administration import Entry, ListingAdministration
from tiered_kv.toolkit.record import check_record
from tiered_kv.toolkit.small_files import fields_of, opened, read_all, read_file, words_of
from tiered_kv_fs.allocation import occupied_bytes
from tiered_kv_fs.directory import FileFailure, claimed, reason_of, unlink_same
from tiered_kv_fs.epoch import EpochFile
from tiered_kv_fs.full_disk import without_room
from tiered_kv_fs.ledger import DirectoryLedger
from tiered_kv_fs.locks import locked
from tiered_kv_fs.names import (
    BLOCK_PATH,
    EPOCH_NAME,
    NAMESPACE,
    NAMESPACE_NAME,
    NAMESPACE_PATH,
    SHARED_PATH,
    SWEEP_NAME,
    block_path,
)
from tiered_kv_fs.settings import FsSettings

_PARALLEL_READS: Final = 4


class FsAdministration(ListingAdministration):
    """The directory of an fs tier, which other processes may be using."""

    def __init__(self, settings: FsSettings) -> None:
        super().__init__(settings)
        self._claimed = claimed(settings.path, settings.name, private=settings.private)
        self._path = self._claimed.path

    @property
    def where(self) -> str:
        return self._path if os.path.exists(self._path) else f"{self._path} (no such directory)"

    def digests(self, deadline: float) -> Iterable[str]:
        return filter(NAMESPACE.fullmatch, os.listdir(self._path))

    def purge(self, digest: str, deadline: float) -> Purged:
        root, ledger = f"{self._path}/{digest}", DirectoryLedger(self._path)
        with self.opened("purge") as is_stored:
            if not is_stored or not os.path.isdir(root) or os.path.islink(root):
                return Purged(0, 0)
            users: list[str] = []
            unreadable: list[OSError] = []
            with ExitStack() as held:
                with without_room():  # even for an empty file: no survey can run, either
                    held.enter_context(locked(f"{self._path}/{SWEEP_NAME}", deadline - time.monotonic()))
                with without_room(), ledger.locked() as state:
                    users = [name for name, holder in state.holders.items() if holder.namespace == digest]
                    for name in users:  # an open stack registers again; entries of ended ones must not stay
                        del state.holders[name]
                    state.surveyed_s = 0.0  # only a survey can find out how much the holders have used of their grants
                purged = self.delete_all(digest, deadline)
                with without_room(), ledger.locked() as state:
                    state.take_off(purged.size_bytes or 0)
                for directory, _, _ in os.walk(root, topdown=False, onerror=unreadable.append):
                    with suppress(OSError):  # it is not empty
                        os.rmdir(directory)
        if unreadable:
            left = [f"{error.filename}: {words_of(error)}" for error in unreadable[:FOREIGN_NAMED_MAX]]
            purged = replace(purged, left=(*purged.left, *left))
        note = f"stacks that use this namespace, or ended a moment ago: {len(users)}; an open one may store in it again"
        return replace(purged, notes=(note,) if users else ())

    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        root = f"{self._path}/{digest}" if digest else self._path
        if os.path.islink(root):
            return
        batches = walk(root)
        top = next(batches)  # the root's own files: the readable form is among them, and is yielded last
        for batch in batches:
            yield [entry for path, status in batch if (entry := self._entry(digest, path, status))]
        yield [entry for path, status in top if (entry := self._entry(digest, path, status))]

    def mark(self, digest: str) -> EpochFile:
        return EpochFile(f"{self._path}/{digest}", lambda: None)

    def delete(self, entries: Sequence[Entry]) -> dict[int, str]:
        refused = {}
        for at, each in enumerate(entries):
            try:
                unlink_same(each.name, each.where)
            except OSError as error:  # the file is immutable, or in another user's directory
                refused[at] = words_of(error)
        return refused

    def describe(self, digest: str, deadline: float) -> object:
        return fields_of(read_file(f"{self._path}/{digest}/{NAMESPACE_NAME}", DESCRIPTION_BYTES_MAX)).get("namespace")

    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        check = RecordCheck(bytes.fromhex(digest), self._settings.open_codecs(), found.block_bytes)
        for batch in blocks:
            for each in batch:
                status: RecordStatus | str = check.too_long
                read_bytes = 0
                try:
                    with opened(each.name, os.O_RDONLY) as fd:
                        about = os.fstat(fd)
                        record = check.room(about.st_size)
                        if self._settings.private and about.st_uid != os.geteuid():
                            status = "not_private"
                        elif record is not None:
                            read_bytes = read_all(fd, [record])
                            status = check.check(record[:read_bytes])
                except FileNotFoundError:  # evicted meanwhile
                    continue
                except OSError as error:
                    is_bad_place = is_of_place(error) and self._can_read_marker()
                    yield each, RecordStatus.BAD_PLACE if is_bad_place else reason_of(error), 0
                else:
                    yield each._replace(where=about), status, read_bytes

    def read_stored(
        self, digest: str, epoch: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview], deadline: float
    ) -> list[RecordStatus | str]:
        def read(item: tuple[OffloadKey, memoryview]) -> RecordStatus | str:
            self.check_time(deadline, "copy")
            return self._read_record(f"{self._path}/{digest}/{epoch}", bytes.fromhex(digest), *item)

        pairs = list(zip(keys, rows, strict=True))
        return [each.result() for each in run_all(read, pairs, "tiered-kv-copy", _PARALLEL_READS)]

    def _read_record(self, root: str, namespace: bytes, key: OffloadKey, row: memoryview) -> RecordStatus | str:
        """Read one block's record into `row`; return its status."""
        try:
            with opened(f"{root}/{block_path(key, namespace)}", os.O_RDONLY) as fd:
                about = os.fstat(fd)
                if not stat.S_ISREG(about.st_mode) or (self._settings.private and about.st_uid != os.geteuid()):
                    return FileFailure.NOT_PRIVATE if stat.S_ISREG(about.st_mode) else FileFailure.NOT_A_FILE
                if about.st_size > len(row):
                    return RecordStatus.BAD_LENGTH
                read_bytes = read_all(fd, [row[: about.st_size]])
        except (FileNotFoundError, NotADirectoryError):
            return Reason.ABSENT
        except OSError as error:
            return RecordStatus.BAD_PLACE if is_of_place(error) and self._can_read_marker() else reason_of(error)
        return check_record(row, read_bytes, key, namespace)

    @contextmanager
    def opened(self, operation: str) -> Iterator[bool]:
        with self._claimed.opened(operation) as fd:
            is_stored = fd is not None and self._claimed.marker(fd) is not None
            if fd is not None and is_stored and operation in ("purge", "repair"):
                self._claimed.check(fd)  # files that root makes here are refused by the tiers of the directory's owner
            yield is_stored

    def _can_read_marker(self) -> bool:
        """Return whether the file system reads another file, after it has failed to read one."""
        with suppress(OSError), opened(f"{self._path}/{self._claimed.marker_name}", os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # a cached page says nothing
            return bool(os.pread(fd, 1, 0))
        return False

    def _entry(self, digest: str | None, path: str, status: os.stat_result) -> Entry | None:
        """Return the entry at `path`; None for a namespace's directory, its epoch's mark and the tier's shared files.

        `path` is relative to the namespace's directory, or to the shared directory if `digest` is None.
        """
        top, _, inner = (digest, "", path) if digest else path.partition("/")
        size_bytes, is_directory = occupied_bytes(status), stat.S_ISDIR(status.st_mode)
        is_ours = NAMESPACE_PATH.fullmatch(inner) if inner else is_directory
        if NAMESPACE.fullmatch(top) is not None and is_ours and not stat.S_ISLNK(status.st_mode):
            if not inner or (inner == EPOCH_NAME and not is_directory):
                return None  # a namespace's directory and its mark may stay after a purge, and are no block
            is_block = stat.S_ISREG(status.st_mode) and BLOCK_PATH.fullmatch(inner) is not None
            path, used_s = f"{self._path}/{top}/{inner}", time.time() - status.st_mtime
            return Entry(path, top, size_bytes, is_block, used_s=used_s, where=status, stays=is_directory)
        shown = f"{self._path}/{digest}/{path}" if digest else path
        return None if not digest and SHARED_PATH.fullmatch(path) else Entry(shown, None, size_bytes)
