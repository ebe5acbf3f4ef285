"""The tier: a table of records, on one worker thread."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from tiered_kv.errors import ConfigError, TierUnavailableError
from tiered_kv.toolkit import BlockingTier, OffloadKey, Outcome, Reason
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record
from tiered_kv_sqlite import SqliteSettings

# A cache needs no journal on disk: a record that a crash tore fails its checksum, and is a miss.
_SETUP = """
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS blocks (
    number INTEGER PRIMARY KEY, namespace BLOB NOT NULL, key BLOB NOT NULL, record BLOB NOT NULL,
    UNIQUE (namespace, key)
);
CREATE TABLE IF NOT EXISTS namespaces (namespace BLOB PRIMARY KEY, described TEXT NOT NULL);
"""
_DESCRIBE = "INSERT OR IGNORE INTO namespaces (namespace, described) VALUES (?, ?)"
_CONTAINS = "SELECT EXISTS (SELECT 1 FROM blocks WHERE namespace = ? AND key = ?)"
_LOAD = "SELECT record, number FROM blocks WHERE namespace = ? AND key = ?"
_DELETE = "DELETE FROM blocks WHERE number = ?"
_STORE = "INSERT OR IGNORE INTO blocks (namespace, key, record) VALUES (?, ?, ?)"
_EVICT = """
DELETE FROM blocks WHERE number IN
    (SELECT number FROM blocks ORDER BY number LIMIT (SELECT 1 + count(*) / 8 FROM blocks))
"""


class SqliteTier(BlockingTier):
    """Keeps blocks as records in a table; the oldest go when the file may not grow further.

    SQLite itself holds the limit (`max_page_count`), so the file never exceeds it. The connection is made by the thread
    that opens the tier, and from then on belongs to the one worker thread.

    Raises:
        ConfigError: The file is larger than the capacity.
        TierUnavailableError: The file cannot be opened.
    """

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: SqliteSettings
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, threads=1, lookup_timeout_s=settings.lookup_timeout
        )
        self._namespace = self.tier_spec.namespace_digest
        try:
            self._database = sqlite3.connect(
                settings.path, timeout=settings.job_timeout, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise TierUnavailableError(f"{settings.path}: {error}", tier=settings.name, operation="open") from error
        try:
            self._database.executescript(_SETUP)
            self._limit_pages(settings)
            described = json.dumps(dict(self.tier_spec.namespace), default=str)  # for `inspect`
            self._database.execute(_DESCRIBE, (self._namespace, described))
        except sqlite3.Error as error:
            self._database.close()
            raise TierUnavailableError(f"{settings.path}: {error}", tier=settings.name, operation="open") from error
        except ConfigError:
            self._database.close()
            raise

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        stored = [key for key, block in zip(keys, blocks, strict=True) if self._store(key, block)]
        return Outcome() if len(stored) == len(keys) else Outcome(stored, Reason.NO_SPACE)

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        loaded: list[OffloadKey] = []
        reason: Reason | None = None
        for key, block in zip(keys, blocks, strict=True):
            row = self._database.execute(_LOAD, (self._namespace, key)).fetchone()
            record = memoryview(row[0] if row else b"")
            status = decode_record(record[:HEADER_BYTES], record[HEADER_BYTES:], key, block, self._namespace)
            if status is RecordStatus.OK:
                loaded.append(key)
            else:
                reason = status.cause if row else Reason.ABSENT
                if row:  # a damaged block that stays would be offered again, and could not be stored again
                    self._database.execute(_DELETE, (row[1],))
        return Outcome(loaded, reason)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [bool(self._database.execute(_CONTAINS, (self._namespace, key)).fetchone()[0]) for key in keys]

    def close(self) -> None:
        self._database.close()

    def _store(self, key: OffloadKey, block: memoryview) -> bool:
        """Store one block, with the oldest evicted if need be; return whether it could be."""
        record = b"".join(encode_record(key, block, self._namespace))
        for _ in range(2):
            try:
                self._database.execute(_STORE, (self._namespace, key, record))
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                self._database.execute(_EVICT)
            else:
                return True
        return False

    def _limit_pages(self, settings: SqliteSettings) -> None:
        page_bytes, pages = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "page_count")
        )
        pages_max = settings.capacity // page_bytes
        if pages > pages_max:
            raise ConfigError(
                f"{settings.path} has {pages * page_bytes} bytes already; delete it, or allow that many",
                location="capacity",
            )
        self._database.execute(f"PRAGMA max_page_count = {pages_max}")
