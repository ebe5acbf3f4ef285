"""A secondary tier in a dictionary. It uses everything that the interface offers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.counters import Counters
from tiered_kv.errors import ConfigError
from tiered_kv.toolkit import BlockingTier, Outcome
from tiered_kv.toolkit.event_log import EventLog
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record
from tiered_kv_memory.settings import MemorySettings


@dataclass(slots=True, eq=False)
class _Record:
    data: bytearray
    readers: int = 0  # loads in flight
    is_read: bool = False
    is_removed: bool = False


class MemoryTier(BlockingTier):
    """Keeps blocks as records, and evicts the least recently used. Lookups answer at once.

    Raises:
        ConfigError: The capacity does not hold one block, or the codec's library or key file cannot be used.
    """

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: MemorySettings
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, lookup_timeout_s=settings.lookup_timeout)
        self._namespace_digest: bytes = getattr(offloading_spec, "namespace_digest", bytes(16))
        self._codecs = settings.open_codecs()
        self._capacity_bytes = settings.capacity
        record_bytes = HEADER_BYTES + self.block_bytes + self._codecs.overhead_bytes
        if record_bytes > self._capacity_bytes:
            raise ConfigError(
                f"{self._capacity_bytes} bytes do not hold one record of {record_bytes} bytes", location="capacity"
            )
        # Oldest use first. Any thread reads it without a lock, and `touch` reorders it. Other changes need
        # `_records_lock`, as do the attributes below.
        self._records: OrderedDict[OffloadKey, _Record] = OrderedDict()
        self._records_lock = threading.Lock()
        self._used_bytes = 0  # records, removed records that are still being read, and stores in flight
        self._counters = Counters(("evicted_blocks_total", "wasted_bytes_total"), ("corrupt_blocks_total",))
        self._events = EventLog(getattr(offloading_spec, "wants_events", False))

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        # Backwards: the head of a prefix is evicted last, because its tail is worthless without it.
        return _each(self._store, keys[::-1], blocks[::-1])

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return _each(self._load, keys, blocks)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [key in self._records for key in keys]

    def close(self) -> None:
        with self._records_lock:
            self._records.clear()
            self._used_bytes = 0

    # The scheduler's thread.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self._records

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        move_to_end = self._records.move_to_end
        for key in reversed(list(keys)):
            try:
                move_to_end(key)
            except KeyError:
                pass

    def reset_cache(self) -> bool:
        with self._records_lock:
            self.begin_epoch()
            while self._records:
                self._release(self._records.popitem(last=False)[1])
            self._events.clear()
        return True

    @property
    def reports_stored(self) -> bool:
        return True

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take(self.block_bytes, self.name)

    def stats(self) -> Mapping[str, Any]:
        return {
            **super().stats(),
            "blocks": len(self._records),
            "used_bytes": self._used_bytes,
            "capacity_bytes": self._capacity_bytes,
            **self._counters.snapshot(),
        }

    def describe(self) -> Mapping[str, object]:
        return {"medium": "memory", "codec": self._codecs.name, "capacity_bytes": self._capacity_bytes}

    # Records.

    def _store(self, key: OffloadKey, block: memoryview) -> str:
        """Store one block; return the reason for a failure, or an empty string."""
        reserved = HEADER_BYTES + len(block) + self._codecs.overhead_bytes
        with self._records_lock:
            if key in self._records:
                return ""
            if not self._make_room(reserved):
                return "no_space"
            self._used_bytes += reserved
        kept = 0
        try:
            header, payload = encode_record(key, block, self._namespace_digest, self._codecs)
            record = _Record(bytearray().join((header, payload)))
            with self._records_lock:
                if self.part_epoch != self.epoch:
                    return "reset"
                if key not in self._records:
                    self._records[key] = record
                    self._events.stored((key,))
                    kept = len(record.data)
            return ""
        finally:
            with self._records_lock:
                self._used_bytes -= reserved - kept

    def _load(self, key: OffloadKey, block: memoryview) -> str:
        """Load one block; return the reason for a failure, or an empty string."""
        with self._records_lock:
            record = self._records.get(key)
            if record is None:
                return "absent"
            self._records.move_to_end(key)
            record.readers += 1
            record.is_read = True
        data = memoryview(record.data)
        header, payload = data[:HEADER_BYTES], data[HEADER_BYTES:]
        status = decode_record(header, payload, key, block, self._namespace_digest, self._codecs)
        with self._records_lock:
            record.readers -= 1
            if record.is_removed and not record.readers:
                self._used_bytes -= len(record.data)
            if status is not RecordStatus.OK and self._records.get(key) is record:
                self._counters.add("corrupt_blocks_total", status.value)
                self._release(self._records.pop(key))
                self._events.removed((key,))
        return "" if status is RecordStatus.OK else status.value

    def _make_room(self, wanted_bytes: int) -> bool:
        """Locked. Evict until `wanted_bytes` fit; return whether they do."""
        while self._used_bytes + wanted_bytes > self._capacity_bytes:
            if not self._records:
                return False
            key, record = self._records.popitem(last=False)
            self._release(record)
            self._events.removed((key,))
            self._counters.add("evicted_blocks_total")
            self._counters.add("wasted_bytes_total", count=0 if record.is_read else len(record.data))
        return True

    def _release(self, record: _Record) -> None:
        """Locked. Release the memory of a removed record, at once or after its last load."""
        record.is_removed = True
        if not record.readers:
            self._used_bytes -= len(record.data)


def _each(
    transfer: Callable[[OffloadKey, memoryview], str], keys: Sequence[OffloadKey], blocks: Sequence[memoryview]
) -> Outcome:
    results = [(key, transfer(key, block)) for key, block in zip(keys, blocks, strict=True)]
    reasons = [failure for _, failure in results if failure]
    return Outcome([key for key, failure in results if not failure], reasons[-1] if reasons else "")
