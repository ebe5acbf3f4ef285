"""Administration of a bucket without a stack: survey, verify and purge namespaces, by listings.

The commands call it on one thread, through `ListingAdministration`; some threads of its own read blocks. Objects with
names outside of the tier's layout (`naming.py`) are foreign: they stay, and are reported.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from tiered_kv.base import OffloadKey
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.system.threads import run_all
from tiered_kv.toolkit.administration import DESCRIPTION_BYTES_MAX, DIGEST_HEX, RecordCheck, Verification
from tiered_kv.toolkit.listing_administration import Entry, ListingAdministration
from tiered_kv.toolkit.objects.epoch import RemovableObject
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.objects.store import DELETED_AT_ONCE, ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.verdict import ABSENCE, Verdict
from tiered_kv.toolkit.record import DIGEST_BYTES, check_record
from tiered_kv.toolkit.small_files import fields_of

_PARALLEL_READS: Final = 8


class ObjectAdministration(ListingAdministration):
    """The bucket of an object tier."""

    def __init__(self, settings: Any) -> None:  # Any: each tier's own subclass of `ObjectSettings`
        super().__init__(settings)
        self._store, self._control = self.connect()

    @abstractmethod
    def connect(self) -> tuple[ObjectStore, ObjectControl]:
        """Return the store and the control. Raises `ConfigError`: the client library refuses the settings."""

    def digests(self, deadline: float) -> Iterable[str]:
        self._control.deadline = deadline
        return filter(DIGEST_HEX.fullmatch, self._control.folders(f"{self._settings.prefix}/"))

    def entries(self, digest: str | None, deadline: float) -> Iterator[Sequence[Entry]]:
        self._control.deadline = deadline
        root = f"{self._settings.prefix}/"
        for page in self._control.listed(f"{root}{digest}/" if digest else root):
            entries = []
            for age_s, name, size_bytes in page:
                naming = self.naming_in(name)
                if naming is None:
                    entries.append(Entry(name, None, size_bytes))
                elif name != naming.epoch:  # the mark stays after a purge
                    entries.append(Entry(name, naming.digest, size_bytes, naming.is_block(name), age_s))
            for start in range(0, len(entries), DELETED_AT_ONCE):
                yield entries[start : start + DELETED_AT_ONCE]

    def mark(self, digest: str) -> RemovableObject:
        return RemovableObject(self._store, self.naming(digest).epoch, self._settings.name, self._control)

    def delete(self, entries: Sequence[Entry]) -> dict[int, str]:
        return self._control.delete([each.name for each in entries])

    def describe(self, digest: str, deadline: float) -> object:
        _, text = self._store.read(self.naming(digest).namespace, DESCRIPTION_BYTES_MAX, deadline)
        return fields_of(text).get("namespace")

    def check(
        self, digest: str, blocks: Iterator[Sequence[Entry]], found: Verification, deadline: float
    ) -> Iterator[tuple[Entry, RecordStatus | str, int]]:
        check = RecordCheck(bytes.fromhex(digest), self._settings.open_codecs(), found.block_bytes)
        read = partial(self._read, check, deadline)
        for listed in blocks:
            for start in range(0, len(listed), _PARALLEL_READS):
                batch = listed[start : start + _PARALLEL_READS]
                reads = run_all(read, batch, "tiered-kv-verify", _PARALLEL_READS)
                for each, status in zip(batch, (each.result() for each in reads), strict=True):
                    if status is not None:
                        # No version is named: the delete of one would make an older version the block again.
                        block = each._replace(where=None)
                        yield block, status, 0 if status == check.too_long else each.size_bytes or 0

    def read_stored(
        self, digest: str, epoch: str, keys: Sequence[OffloadKey], rows: Sequence[memoryview], deadline: float
    ) -> list[RecordStatus | str]:
        naming = self.naming(digest)

        def read(item: tuple[OffloadKey, memoryview]) -> RecordStatus | str:
            return self._read_record(naming.block(epoch, item[0]), bytes.fromhex(digest), *item, deadline)

        pairs = list(zip(keys, rows, strict=True))
        return [each.result() for each in run_all(read, pairs, "tiered-kv-copy", _PARALLEL_READS)]

    def _read_record(
        self, name: str, namespace: bytes, key: OffloadKey, row: memoryview, deadline: float
    ) -> RecordStatus | str:
        """Read one block's record into `row`; return its status."""
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        found: RecordStatus | str = RecordStatus.BAD_LENGTH
        sizes: list[int] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            sizes[:] = [size_bytes]
            return [row[:size_bytes]] if size_bytes <= len(row) else None

        for _ in range(2):  # the second time if the first record was damaged, perhaps on its way
            verdict = self._store.get(name, sink, len(row), deadline)
            if verdict is not Verdict.DONE:
                return Reason.ABSENT if verdict in ABSENCE else found if verdict is Verdict.OVERSIZED else str(verdict)
            found = check_record(row, sizes[0], key, namespace)
            if found is RecordStatus.OK:
                break
        return found

    def close(self) -> None:
        self._control.close()
        self._store.close()

    def naming(self, digest: str) -> Naming:
        return Naming(self._settings.prefix, bytes.fromhex(digest))

    def naming_in(self, name: str) -> Naming | None:
        """Return the names of the namespace whose layout an object belongs to; None for a foreign object."""
        found = name.removeprefix(f"{self._settings.prefix}/").partition("/")[0]
        naming = self.naming(found) if DIGEST_HEX.fullmatch(found) else None
        return naming if naming is not None and naming.owns(name) else None

    def _read(self, check: RecordCheck, deadline: float, listed: Entry) -> RecordStatus | str | None:
        """Return the state of a block's object, None if it is deleted by now."""
        deadline = min(deadline, time.monotonic() + self._settings.job_timeout)
        found: RecordStatus | str = check.too_long
        record: list[memoryview] = []

        def sink(size_bytes: int) -> list[memoryview] | None:
            room = check.room(size_bytes)
            record[:] = [] if room is None else [room]
            return record or None

        for _ in range(2):  # the second time if the first record was damaged, perhaps on its way
            verdict = self._store.get(listed.name, sink, check.bytes_max, deadline, expires=False)
            if verdict is not Verdict.DONE:
                return check.too_long if verdict is Verdict.OVERSIZED else None if verdict in ABSENCE else str(verdict)
            found = check.check(record[0], bytes.fromhex(listed.name[-2 * DIGEST_BYTES :]))
            if found is RecordStatus.OK:
                break
        # No damage: a bucket has no mark of its blocks' format version, so another release may read this record.
        return found.value if found is RecordStatus.BAD_VERSION else found
