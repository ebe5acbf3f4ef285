"""Administration of a storage that lists its entries and deletes them one by one, while other processes use it.

A tier's administration subclasses `ListingAdministration`, and the commands call the subclass on one thread.
`ListingAdministration` has the loops: a survey lists once; a purge lists and deletes until a listing finds nothing; a
check lists and reads blocks. A subclass lists, deletes, reads and describes. What must stay true: no foreign entry is
deleted.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

from tiered_kv.reasons import RecordStatus
from tiered_kv.toolkit.administration import (
    FOREIGN_NAMED_MAX,
    NAMESPACES_MAX,
    Purged,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.census import Census
from tiered_kv.toolkit.epoch import Epoch, EpochMark, EpochStore

_SURVEYS_MAX: Final = 20  # listings of one purge, at most: a stack may go on storing


class Entry(NamedTuple):
    """One entry of a storage; None means unknown."""

    name: str  # its name in the storage; messages show it
    digest: str | None  # of its namespace; None for foreign entries, which are counted and never deleted
    size_bytes: int | None
    is_block: bool = False  # False for a mark, a readable form, and a file that is being written
    written_s: float | None = None  # seconds since it was written
    used_s: float | None = None  # seconds since its last use
    where: Any = None  # a value that the storage needs beside the name, to read and delete the entry
    key: bytes = b""  # the block's, if the storage has keys
    stays: bool = False  # whether a purge leaves it, such as a directory


class RemovableMark(EpochStore, Protocol):
    """The mark of a namespace's epoch, for a purge."""

    def remove(self, deadline: float) -> None:
        """Delete the mark, if there is one."""


class ListingAdministration(TierAdministration):
    """Administers a storage that can list its entries and delete them, while other processes use it."""

    @abstractmethod
    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        """Yield the entries of one namespace; of all namespaces if `digest` is None.

        Foreign entries are included if their names place them there; the epoch's mark is not. An entry that is stored
        or deleted meanwhile may be included or not.
        """

    @abstractmethod
    def mark(self, digest: str) -> RemovableMark:
        """Return the mark of a namespace's epoch."""

    def digests(self, deadline: float) -> Iterable[str]:
        """Yield the digests of the namespaces that may have a readable form; by default the digests of all entries."""
        return (each.digest for batch in self.entries(None, deadline) for each in batch if each.digest is not None)

    @abstractmethod
    def delete(self, entries: Sequence[Entry]) -> Mapping[int, str]:
        """Delete entries. Return a word for each that is still stored, by position. A missing entry is deleted."""

    @abstractmethod
    def describe(self, digest: str, deadline: float) -> object:
        """Return the readable form of a namespace as it is stored."""

    @abstractmethod
    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        """Read blocks; yield each block with its status and the number of bytes read.

        The caller may delete a damaged block. A block that is deleted meanwhile is left out.
        """

    def opened(self, operation: str) -> AbstractContextManager[bool]:
        """Hold the locks and connections that `purge`, `survey`, `verify` or `repair` needs. Yield whether there is a
        storage."""
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
        if mark_left:  # on a full disk there may be room now
            mark_left = self._settle_mark(self.mark(digest), deadline)
        return Purged(*removed.of(digest), (*left, *mark_left))

    def _settle_mark(self, store: RemovableMark, deadline: float) -> Sequence[str]:
        """Delete the epoch's mark; if it is from a reset, write a new mark. Return why the old mark stays, if it does.

        After a reset a mark has to exist: otherwise a process in an earlier epoch would write its own mark again, and
        later processes would join its epoch. A mark that another process writes after this call is of a reset, too. If
        it is written between the two requests here, that process writes it once more at its next check.
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
