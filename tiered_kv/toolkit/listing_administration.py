"""Administration of a storage that lists its entries and deletes them one by one, while other processes use it.

A tier's administration subclasses `ListingAdministration`, and the commands call the subclass on one thread.
`ListingAdministration` has the loops: a survey lists once; a purge lists and deletes until a listing finds nothing; a
check lists and reads blocks; a copy reads the blocks of the present epoch. A subclass lists, deletes, reads and
describes. What must stay true: no foreign entry is deleted, and no block from before a reset is copied.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.toolkit.administration import (
    FOREIGN_NAMED_MAX,
    NAMESPACES_MAX,
    Purged,
    StoredBlock,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.census import Census
from tiered_kv.toolkit.epoch import Epoch, EpochMark, EpochStore

_KEYS_AT_ONCE: Final = 256  # blocks of one batch for a copy
_SURVEYS_MAX: Final = 20
"""Limit of the listings of one purge. A stack may go on storing blocks, so a purge might find blocks for ever."""


class Entry(NamedTuple):
    """One entry of a storage; None means unknown.

    A foreign entry has no digest. It is counted, and never deleted.
    """

    name: str
    """The name in the storage, which messages show."""
    digest: str | None
    """The digest of the entry's namespace; None for a foreign entry."""
    size_bytes: int | None
    is_block: bool = False
    """False for a mark, for a readable form, and for a file that is being written."""
    written_s: float | None = None
    """Seconds since the entry was written."""
    used_s: float | None = None
    """Seconds since the entry was last used."""
    where: Any = None
    """A value that the storage needs beside the name, to read and delete the entry. (Any: each storage has its own.)"""
    key: bytes = b""
    """The block's key; empty if the storage keeps no keys."""
    stays: bool = False
    """Whether a purge leaves the entry, such as a directory."""


class RemovableMark(EpochStore, Protocol):
    """The mark of a namespace's epoch, for a purge."""

    def remove(self, deadline: float) -> None:
        """Delete the mark, if there is one."""


class ListingAdministration(TierAdministration):
    """Administers a storage that can list its entries and delete them, while other processes use it."""

    needs_keys = True

    @abstractmethod
    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        """Yield the entries of one namespace; of all namespaces if `digest` is None.

        Foreign entries are included if their names place them in the namespace. The mark of the epoch is not included.
        An entry that is stored or deleted during the listing may be included or not. `delete` and `check` get the
        entries of one batch, or some of them: a storage may rely on what the entries of its batches have in common.
        """

    @abstractmethod
    def mark(self, digest: str) -> RemovableMark:
        """Return the mark of a namespace's epoch."""

    def digests(self, deadline: float) -> Iterable[str]:
        """Yield the digests of the namespaces that may have a readable form; by default the digests of all entries."""
        return (each.digest for batch in self.entries(None, deadline) for each in batch if each.digest is not None)

    @abstractmethod
    def delete(self, entries: Sequence[Entry]) -> Mapping[int, str]:
        """Delete entries of one batch. Return by position why an entry is still stored, in one word.

        An entry that is missing counts as deleted.
        """

    @abstractmethod
    def describe(self, digest: str, deadline: float) -> object:
        """Return the readable form of a namespace as it is stored."""

    @abstractmethod
    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        """Read blocks; yield each block with its status and the number of bytes read.

        The caller may delete a damaged block. A block that another process deletes before it is read is left out.
        """

    def read_stored(
        self, digest: str, epoch: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        """Read the records of blocks of an epoch, for `read_records`. Optional: without it, blocks cannot be copied."""
        raise NotImplementedError

    def blocks_of_epoch(self, digest: str, epoch: str, deadline: float) -> Iterator[Sequence[StoredBlock]]:
        """Yield the blocks of an epoch in batches. Only for a storage that keeps keys (`needs_keys` is False)."""
        raise NotImplementedError

    def opened(self, operation: str) -> AbstractContextManager[bool]:
        """Hold the locks and connections that an operation needs. Yield whether there is a storage.

        The `operation` is "purge", "survey", "verify", "repair" or "copy".
        """
        return nullcontext(True)

    def purge(self, digest: str, deadline: float) -> Purged:
        with self.opened("purge") as is_stored:
            return self.delete_all(digest, deadline) if is_stored else Purged(0, 0)

    def delete_all(self, digest: str, deadline: float) -> Purged:
        """List and delete entries until a listing finds none, or refusals prevent progress."""
        mark_left = self._settle_mark(self.mark(digest), deadline)
        removed = Census()
        found, refusals, named = 0, set[str](), list[str]()
        for _ in range(_SURVEYS_MAX):
            earlier = found, refusals
            found, refusals, named, foreign = 0, set(), [], Census()
            for batch in self.entries(digest, deadline):
                doomed = [each for each in batch if each.digest is not None and not each.stays]
                refused = self.delete(doomed)
                found += len(doomed)
                refusals.update(refused.values())
                named.extend(
                    f"{doomed[at].name}: {word}" for at, word in refused.items() if len(named) < FOREIGN_NAMED_MAX
                )
                for at, each in enumerate(doomed):
                    if at not in refused:
                        removed.add(digest, each.size_bytes, each.is_block)
                for each in batch:
                    if each.digest is None:
                        foreign.add_foreign(each.name, 0)
                self.check_time(deadline, "purge")
            if not found or (refusals and refusals == earlier[1] and found >= earlier[0]):  # no progress
                break
        left = foreign.left()
        if found:
            why = ", ".join(sorted(refusals)) or "a stack stores them, or the storage does not delete"
            left += [f"{found} entries were found by the last survey ({why})", *named]
        if mark_left:  # a full disk may have room now
            mark_left = self._settle_mark(self.mark(digest), deadline)
        return Purged(*removed.of(digest), (*left, *mark_left))

    def _settle_mark(self, store: RemovableMark, deadline: float) -> Sequence[str]:
        """Delete the epoch's mark if there was no reset; otherwise replace it by the mark of a new epoch.

        Three states of the storage are possible:

        - No mark: the call does nothing.
        - A mark with the number 0, so no reset came: the call deletes the mark. A process of that epoch may write the
          mark again.
        - The mark of a reset, or a damaged mark: the call writes the mark of a new epoch. After a reset a mark has to
          exist. Without a mark, a process that has not seen the reset would write the mark of its own epoch, and later
          processes would join that epoch.

        A mark that another process writes after this call is the mark of a reset, too. If a process writes its mark
        between the two requests of this call, the process writes the mark once more at its next check.

        Returns:
            Why the old mark stays, in one line; no line if the call did its work.
        """
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        try:
            data = store.read(deadline)
            mark = None if data is None else EpochMark.decode(data)
            if mark is not None and mark.number == 0:
                store.remove(deadline)
            elif data is not None:
                epoch = Epoch(store)
                epoch.renew()
                epoch.saved_value(deadline)
        except Exception as error:  # a tier's own exceptions, too: blocks are deleted in any case
            return [f"the epoch's mark: {str(error) or type(error).__name__}"]
        return []

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        census = Census()
        with self.opened("survey") as is_stored:
            for batch in self.entries(only, deadline) if is_stored else ():
                self.check_time(deadline, "survey")
                for each in batch:
                    if each.digest is None:
                        census.add_foreign(each.name, each.size_bytes or 0)
                    else:
                        written_s, used_s = each.written_s, each.used_s
                        census.add(each.digest, each.size_bytes, each.is_block, written_s=written_s, used_s=used_s)
            return census.survey(lambda digest: self.describe(digest, deadline))

    def namespaces(self, deadline: float) -> Sequence[StoredNamespace]:
        with self.opened("survey") as is_stored:
            found = sorted(set(self.digests(deadline)) if is_stored else ())[:NAMESPACES_MAX]
            return [
                StoredNamespace(digest, matching_description(self.describe(digest, deadline), digest))
                for digest in found
            ]

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        operation = "repair" if verification.repairs else "verify"
        with self.opened(operation) as is_stored:
            batches = self.entries(digest, deadline) if is_stored else iter(())
            blocks = ([each for each in batch if each.is_block] for batch in batches)
            for each, status, read_bytes in self.check(digest, blocks, verification, deadline):
                if verification.note(status, read_bytes, each.name, each.key):
                    refused = self.delete([each])
                    verification.repaired += not refused
                    if refused and len(verification.notes) < FOREIGN_NAMED_MAX:
                        verification.notes.append(f"{each.name} cannot be deleted: {refused[0]}")
                self.check_time(deadline, operation)

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        if type(self).read_stored is ListingAdministration.read_stored or (keys is None and self.needs_keys):
            raise NotImplementedError
        with self.opened("copy") as is_stored:
            epoch = self._epoch_of(digest, deadline) if is_stored else None
            if epoch is None:
                return
            if keys is None:
                for batch in self.blocks_of_epoch(digest, epoch, deadline):
                    yield [each._replace(where=epoch) for each in batch]
                return
            waiting = iter(keys)
            while some := list(islice(waiting, _KEYS_AT_ONCE)):
                yield [StoredBlock(key, where=epoch) for key in some]

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        with self.opened("copy") as is_stored:
            epoch = self._epoch_of(digest, deadline) if is_stored else None
            if epoch is None or any(each.where != epoch for each in blocks):
                return [Reason.RESET] * len(blocks)
            return self.read_stored(digest, epoch, [each.key for each in blocks], rows, deadline)

    def _epoch_of(self, digest: str, deadline: float) -> str | None:
        """Return the epoch that a process joins when it opens the namespace; None if it would draw a new one."""
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        data = self.mark(digest).read(deadline)
        mark = None if data is None else EpochMark.decode(data)
        return None if mark is None else mark.value
