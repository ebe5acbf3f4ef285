"""What `tiered-kv inspect`, `purge` and `copy` do with a database: count, check, delete and read its records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tiered_kv.errors import TierUnavailableError
from tiered_kv.toolkit import OffloadKey, Reason
from tiered_kv.toolkit.administration import (
    Purged,
    StoredBlock,
    StoredNamespace,
    Survey,
    TierAdministration,
    Verification,
    matching_description,
)
from tiered_kv.toolkit.record import RecordStatus, check_record, verify_record

_BATCH = 256
_COUNT = "SELECT namespace, count(*), sum(length(record)) FROM blocks GROUP BY namespace"
_DESCRIBED = "SELECT described FROM namespaces WHERE namespace = ?"
_NUMBERS = "SELECT number FROM blocks WHERE namespace = ?"
_LIST = "SELECT key, length(record), number FROM blocks WHERE namespace = ? ORDER BY number DESC"
_READ = "SELECT key, record FROM blocks WHERE number = ?"


class SqliteAdministration(TierAdministration):
    """Each call opens the database for itself, while a tier may use it."""

    @property
    def where(self) -> str:
        return str(self._settings.path)

    def purge(self, digest: str, deadline: float) -> Purged:
        namespace = bytes.fromhex(digest)
        with self._opened("purge") as database:
            if database is None:
                return Purged(0, 0)
            _, blocks, size_bytes = {each[0]: each for each in database.execute(_COUNT)}.get(namespace, (None, 0, 0))
            for table in ("blocks", "namespaces"):
                database.execute(f"DELETE FROM {table} WHERE namespace = ?", (namespace,))
            return Purged(blocks, size_bytes)

    def survey(self, deadline: float, only: str | None = None) -> Survey:
        self.check_time(deadline, "survey")
        with self._opened("survey") as database:
            found = []
            for namespace, blocks, size_bytes in [] if database is None else database.execute(_COUNT).fetchall():
                if only in (None, namespace.hex()):
                    text = database.execute(_DESCRIBED, (namespace,)).fetchone()
                    described = matching_description(json.loads(text[0]) if text else None, namespace.hex())
                    found.append(StoredNamespace(namespace.hex(), described, blocks, size_bytes))
            return Survey(tuple(found))

    def verify(self, digest: str, verification: Verification, deadline: float) -> None:
        namespace, block_bytes = bytes.fromhex(digest), verification.block_bytes
        block = None if block_bytes is None else memoryview(bytearray(block_bytes))
        with self._opened("verify") as database:
            for (number,) in [] if database is None else database.execute(_NUMBERS, (namespace,)).fetchall():
                self.check_time(deadline, "verify")
                key, record = database.execute(_READ, (number,)).fetchone() or (None, None)
                if key is None:  # a tier has evicted it
                    continue
                status = verify_record(memoryview(record), namespace, block)
                if verification.note(status, len(record), str(number), key):
                    database.execute("DELETE FROM blocks WHERE number = ?", (number,))
                    verification.repaired += 1

    # For `tiered-kv copy` and `export`.

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        with self._opened("copy") as database:
            listed = database and database.execute(_LIST, (bytes.fromhex(digest),))
            while listed and (batch := listed.fetchmany(_BATCH)):
                self.check_time(deadline, "copy")
                yield [
                    StoredBlock(OffloadKey(key), size_bytes, where=number)
                    for key, size_bytes, number in batch
                    if keys is None or key in keys
                ]

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> Sequence[RecordStatus | str]:
        with self._opened("copy") as database:
            if database is None:
                return [Reason.ABSENT] * len(blocks)
            return [self._read(database, digest, *each) for each in zip(blocks, rows, strict=True)]

    def _read(
        self, database: sqlite3.Connection, digest: str, block: StoredBlock, row: memoryview
    ) -> RecordStatus | str:
        key, record = database.execute(_READ, (block.where,)).fetchone() or (None, b"")
        if key != block.key:  # it was evicted since it was listed
            return Reason.ABSENT
        if len(record) > len(row):
            return RecordStatus.BAD_LENGTH
        row[: len(record)] = record
        return check_record(row, len(record), block.key, bytes.fromhex(digest))

    @contextmanager
    def _opened(self, operation: str) -> Iterator[sqlite3.Connection | None]:
        """Open the database; yield None if there is none. Library errors become ours."""
        if not Path(self._settings.path).exists():
            yield None
            return
        try:
            timeout_s = self._settings.job_timeout
            with closing(sqlite3.connect(self._settings.path, timeout=timeout_s, isolation_level=None)) as database:
                yield database
        except sqlite3.Error as error:
            message = f"{self._settings.path}: {error}"
            raise TierUnavailableError(message, tier=self._settings.name, operation=operation) from error
