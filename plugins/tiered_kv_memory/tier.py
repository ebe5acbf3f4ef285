"""A secondary tier that keeps records in a dictionary. It uses every method of the contract.

A `GuardedTier` calls it on the scheduler's thread, and the toolkit's workers copy blocks. A lock guards the dictionary.
A worker holds the lock for a few operations, and never while it copies. The blocks end with the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.base import OffloadingEvent, OffloadKey, ReqContext
from tiered_kv.errors import ConfigError
from tiered_kv.metrics.counters import Counters
from tiered_kv.reasons import Reason
from tiered_kv.tiering.base import JobMetadata
from tiered_kv.toolkit import BlockingTier, Outcome
from tiered_kv.toolkit.event_log import EventLog
from tiered_kv.toolkit.record import HEADER_BYTES, RecordStatus, decode_record, encode_record
from tiered_kv.toolkit.shares import SharedBlocks, TenantBlocks
from tiered_kv_memory.metrics import METRICS
from tiered_kv_memory.settings import MemorySettings

_Pair = tuple[OffloadKey, memoryview]
_THREADS: Final = 4  # workers
_ABSENT_MAX: Final = 4096  # touched blocks that are missing, until `take_absent` returns them
_SWEEP_RECORDS: Final = 64
"""How many records from before a reset are released before each run of blocks."""
_RUN_BLOCKS_MAX: Final = 8
"""Blocks of a run: a thread takes the lock before a run and after it. With one block of 64 KiB a run, the threads wait
for each other, and beside a scheduler's steps they move half the blocks."""


@dataclass(slots=True, eq=False)
class _Record:
    """A stored block. The lock guards its fields."""

    data: bytearray
    tenant: TenantBlocks | None  # for whom it counts, with shares
    readers: int = 0  # loads in flight
    is_read: bool = False  # whether it was ever loaded
    is_removed: bool = False  # no lookup finds it; its memory counts until the last load ends


class MemoryTier(BlockingTier):
    """Keeps blocks as records, and evicts the least recently used. Lookups answer at once.

    Raises:
        ConfigError: The capacity does not hold one block, or the codec's library or key file cannot be used.
    """

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, settings: MemorySettings
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, threads=_THREADS, lookup_timeout_s=settings.lookup_timeout
        )
        self._codecs = settings.open_codecs()
        self._capacity_bytes = settings.capacity
        self._record_bytes = HEADER_BYTES + self.block_bytes + self._codecs.overhead_bytes
        """The most bytes that a record takes."""
        if self._record_bytes > self._capacity_bytes:
            raise ConfigError(
                f"{self._capacity_bytes} bytes do not hold one record of {self._record_bytes} bytes",
                location="capacity",
            )
        self._run_blocks = max(1, min(_RUN_BLOCKS_MAX, self._capacity_bytes // self._record_bytes // _THREADS))
        # Oldest use first. Any thread reads it without a lock, and `touch` reorders it. Other changes need
        # `_records_lock`, as do the attributes below. (Without the interpreter's lock, safe from Python 3.14.1 on.)
        self._records: OrderedDict[OffloadKey, _Record] = OrderedDict()
        self._records_lock = threading.Lock()
        # Bytes of records, removed records that loads still read, records from before a reset, and stores in flight.
        self._used_bytes = 0
        self._remains: deque[OrderedDict[OffloadKey, _Record] | OrderedDict[OffloadKey, None]] = deque()
        """Records from before resets, and tenants' keys. No lookup finds these records."""
        limits = self.tier_spec.limits
        self._tenants = None if limits is None else SharedBlocks(limits, self._capacity_bytes)
        self._counters = Counters(METRICS)
        self._absent: deque[OffloadKey] = deque(maxlen=_ABSENT_MAX)  # touched, but missing; the scheduler's
        self._events = EventLog(self.tier_spec.wants_events)

    # Worker threads.

    def store_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        # Backwards: the head of a prefix is evicted last, because its tail is worthless without it.
        return self._in_runs(self._store, keys[::-1], blocks[::-1])

    def load_blocks(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> Outcome:
        return self._in_runs(self._load, keys, blocks)

    def contains_blocks(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [key in self._records for key in keys]

    def close(self) -> None:
        with self._records_lock:
            self._records.clear()
            self._remains.clear()
            self._used_bytes = 0
            if self._tenants is not None:
                self._tenants = SharedBlocks(self._tenants.limits, self._capacity_bytes)

    # The scheduler's thread.

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return key in self._records

    def submit_load(self, job_metadata: JobMetadata) -> None:
        # The blocks count as used now, also if a worker reads them much later.
        self._use(job_metadata.keys)
        super().submit_load(job_metadata)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._absent.extend(self._use(keys))

    def take_absent(self) -> Iterable[OffloadKey]:
        absent = list(self._absent)[::-1]
        self._absent.clear()
        return absent

    def _use(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Make blocks the most recently used ones, the first of `keys` last; return the missing ones."""
        absent = []
        move_to_end = self._records.move_to_end
        for key in reversed(list(keys)):
            try:
                move_to_end(key)
            except KeyError:
                absent.append(key)
        if self._tenants is not None:
            for key in reversed(list(keys)):
                record = self._records.get(key)
                if record is not None and record.tenant is not None:
                    record.tenant.use(key)
        return absent

    def reset_cache(self) -> bool:
        with self._records_lock:
            self.begin_epoch()
            if self._records:  # a release of a million records takes a second: stores and loads release them, in parts
                self._remains.append(self._records)
                self._records = OrderedDict()
                if self._tenants is not None:
                    self._remains.extend(self._tenants.clear())
                self._sweep()
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
            **({} if self._tenants is None else self._tenants.numbers()),
        }

    def describe(self) -> Mapping[str, object]:
        return {"medium": "memory", "codec": self._codecs.name, "capacity_bytes": self._capacity_bytes}

    # Records.

    def _in_runs(
        self,
        transfer: Callable[[Sequence[_Pair]], dict[OffloadKey, Reason]],
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> Outcome:
        """Transfer blocks, some at a time; `transfer` returns the reason for each failure."""
        pairs = list(zip(keys, blocks, strict=True))
        reasons: dict[OffloadKey, Reason] = {}
        for start in range(0, len(pairs), self._run_blocks):
            reasons |= transfer(pairs[start : start + self._run_blocks])
        return Outcome([key for key in keys if key not in reasons], next(reversed(reasons.values()), None))

    def _store(self, pairs: Sequence[_Pair]) -> dict[OffloadKey, Reason]:
        with self._records_lock:
            if self.part_epoch != self.epoch:
                return {key: Reason.RESET for key, _ in pairs}
            self._sweep()
            present, absent = list[OffloadKey](), list[_Pair]()
            for key, block in pairs:
                if key in self._records:
                    present.append(key)
                else:
                    absent.append((key, block))
            if present:
                self._use(present[::-1])  # the other stores of the run must not evict these records
            reserved = len(absent) * self._record_bytes
            tenant = None if self._tenants is None else self._tenants.tenant(self.part_tenant)
            if not self._make_room(reserved, tenant):
                return {key: Reason.NO_SPACE for key, _ in absent}
            self._count(reserved, tenant)
        records: dict[OffloadKey, _Record] = {}
        try:
            for key, block in absent:
                header, payload = encode_record(key, block, self.tier_spec.namespace_digest, self._codecs)
                records[key] = _Record(bytearray().join((header, payload)), tenant)
        finally:
            with self._records_lock:
                is_reset = self.part_epoch != self.epoch
                new = {} if is_reset else {key: record for key, record in records.items() if key not in self._records}
                self._records.update(new)
                self._count(sum(len(record.data) for record in new.values()) - reserved, tenant)
                if tenant is not None:
                    tenant.keys.update(dict.fromkeys(new))
                self._events.stored(new)
        return dict.fromkeys(records, Reason.RESET) if is_reset else {}

    def _load(self, pairs: Sequence[_Pair]) -> dict[OffloadKey, Reason]:
        reasons: dict[OffloadKey, Reason] = {}
        found: list[tuple[OffloadKey, memoryview, _Record]] = []
        with self._records_lock:
            self._sweep()
            for key, block in pairs:
                record = self._records.get(key)
                if record is None:
                    reasons[key] = Reason.ABSENT
                    continue
                record.readers += 1
                record.is_read = True
                found.append((key, block, record))
        try:
            for key, block, record in found:
                data = memoryview(record.data)
                header, payload = data[:HEADER_BYTES], data[HEADER_BYTES:]
                status = decode_record(header, payload, key, block, self.tier_spec.namespace_digest, self._codecs)
                if status is not RecordStatus.OK:
                    reasons[key] = status.cause
        finally:
            with self._records_lock:
                for key, _, record in found:
                    record.readers -= 1
                    if record.is_removed and not record.readers:
                        self._count(-len(record.data), record.tenant)
                    if key in reasons and self._records.get(key) is record:
                        self._counters.add("corrupt_blocks_total", reasons[key].value)
                        self._release(self._records.pop(key))
                        if record.tenant is not None:
                            record.tenant.keys.pop(key, None)
                        self._events.removed((key,))
        return reasons

    def _make_room(self, wanted_bytes: int, tenant: TenantBlocks | None) -> bool:
        """Locked. Evict until `wanted_bytes` of a tenant fit; return whether they do."""
        while self._remains and self._used_bytes + wanted_bytes > self._capacity_bytes:
            self._sweep()
        missing_bytes = self._used_bytes + wanted_bytes - self._capacity_bytes
        if missing_bytes <= 0:
            return True
        evicted: list[tuple[OffloadKey, _Record]] = []

        def evict(key: OffloadKey, tenant: TenantBlocks) -> int:
            record = self._records.pop(key)
            evicted.append((key, record))
            return self._release(record)

        if self._tenants is not None and tenant is not None:
            self._tenants.make_room(missing_bytes, tenant, wanted_bytes, evict)
        while self._records and self._used_bytes + wanted_bytes > self._capacity_bytes:
            key, record = self._records.popitem(last=False)
            if record.tenant is not None:
                record.tenant.lose(key)
            evicted.append((key, record))
            self._release(record)
        self._events.removed([key for key, _ in evicted])
        self._counters.add("evicted_blocks_total", count=len(evicted))
        wasted_bytes = sum([len(record.data) for _, record in evicted if not record.is_read])
        self._counters.add("wasted_bytes_total", count=wasted_bytes)
        return self._used_bytes + wanted_bytes <= self._capacity_bytes

    def _sweep(self) -> None:
        """Locked. Release some records from before a reset."""
        if self._remains:
            records = self._remains[0]
            for _ in range(min(_SWEEP_RECORDS, len(records))):
                if (record := records.popitem()[1]) is not None:
                    self._release(record)
            if not records:
                self._remains.popleft()

    def _release(self, record: _Record) -> int:
        """Locked. Release the memory of a removed record, at once or after its last load; return the bytes of now."""
        record.is_removed = True
        if record.readers:
            return 0
        size = len(record.data)
        self._used_bytes -= size
        if record.tenant is not None:
            record.tenant.held -= size
        return size

    def _count(self, more_bytes: int, tenant: TenantBlocks | None) -> None:
        """Locked. Count memory that a tenant has from now on, or has no more."""
        self._used_bytes += more_bytes
        if tenant is not None:
            tenant.held += more_bytes
