"""The nvme tier for `tiered-kv simulate`: the segment pool and its choices, without files and bytes.

The simulation calls it on its one thread. Stores reclaim the segments that they need, in place of the reclaimer's
thread. The real pool makes the choices, so the hit rates are those of the real tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import TenantLimits
from tiered_kv.config.settings import TierSettings
from tiered_kv.toolkit.codecs import RAW_ID
from tiered_kv.toolkit.keys_only import KeyStore
from tiered_kv_nvme.index import ordinal_of, place_of, slot_of
from tiered_kv_nvme.layout import CHECKSUM_BYTES, encode_entries
from tiered_kv_nvme.pool import SegmentPool, WriteStream
from tiered_kv_nvme.reclaimer import survivors
from tiered_kv_nvme.segment import Demand, Segment, SegmentState
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.sizing import Sizing
from tiered_kv_nvme.tenants import SegmentShares
from tiered_kv_nvme.tier import PART_BYTES
from tiered_kv_nvme.worth import READ, Worth
from tiered_kv_nvme.writer import BATCH_BLOCKS_MAX

_NO_FILE = -1


class NvmeKeys(KeyStore):
    """Segments without files. A store reclaims the segments that it needs, in place of the reclaimer's thread."""

    def __init__(self, settings: TierSettings, block_bytes: int, clock: Callable[[], float]) -> None:
        super().__init__(settings, block_bytes, clock)
        assert isinstance(settings, NvmeSettings)
        self._sizing = Sizing.of(settings.capacity, block_bytes, settings.segment, overhead_bytes=self.overhead_bytes)
        worth = Worth(settings.capacity // block_bytes, self._sizing.segments_max)
        limits = TenantLimits.of_entry(settings)
        shares = None if limits is None else SegmentShares(limits, settings.capacity)
        self._pool = SegmentPool(bytes(16), 0, worth, shares=shares)
        self._places = self._pool.index.places
        self._stored_bytes = block_bytes + self.overhead_bytes
        self._batch_blocks = max(1, min(BATCH_BLOCKS_MAX, PART_BYTES // block_bytes))

    @property
    def used_bytes(self) -> int:
        return len(self._pool.segments) * self._sizing.segment_bytes

    def has(self, key: OffloadKey) -> bool:
        return key in self._places

    def store(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        wanted = [key for key in keys if key not in self._places]
        for start in range(0, len(wanted), self._batch_blocks):
            batch = wanted[start : start + self._batch_blocks]
            while batch:
                self._make_room()
                count = self._write(batch, WriteStream.STORES)
                if not count:
                    break
                batch = batch[count:]
        return [key for key in keys if key in self._places]

    def load(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        loaded = [key for key in keys if key in self._places]
        for place in self._places.get_many(loaded):
            self._pool.worth.use(self._pool.segments[slot_of(place)].table, ordinal_of(place), READ)
        self.read_blocks += len(loaded)
        return loaded

    def use(self, keys: Sequence[OffloadKey]) -> None:
        for place in self._places.get_many(keys):
            self._pool.worth.use(self._pool.segments[slot_of(place)].table, ordinal_of(place))

    def _write(self, keys: Sequence[OffloadKey], stream: WriteStream, old_places: Sequence[int] | None = None) -> int:
        """Write a batch of `keys`, as far as the segment has room; return the number of written keys."""
        demand = Demand.of([self._stored_bytes] * len(keys), [len(key) for key in keys])
        pool = self._pool
        reservation = pool.reserve(demand, pool.epoch, 0.0, stream)
        if reservation is None:
            return 0
        count = reservation.header.entry_count
        keys, places = keys[:count], old_places[:count] if old_places is not None else None
        states = pool.worth.first_states(keys) if places is None else pool.moved_states(places)
        same = [0] * count, [self._stored_bytes] * count, [RAW_ID] * count, [bytes(CHECKSUM_BYTES)] * count
        pool.commit(reservation, keys, encode_entries(keys, *same), states, places, self.tenant)
        self.written_blocks += count
        self.moved_blocks += 0 if places is None else count
        return count

    def _make_room(self) -> None:
        pool = self._pool
        while pool.free_missing > 0:
            pool.worth.advance()
            with pool.changed:
                if len(pool.segments) < self._sizing.segments_max:
                    generation = pool.next_generation()
                    pool.adopt(Segment(len(pool.segments), _NO_FILE, self._sizing.segment_bytes, generation))
                    continue
                segments = pool.reclaimable()
            if not segments:
                return
            self._reclaim(pool.least(segments))

    def _reclaim(self, segment: Segment) -> None:
        pool, table = self._pool, segment.table
        segment.state = SegmentState.RECLAIMING
        if pool.can_relocate:
            for ordinals in survivors(pool, segment):
                keys = table.keys(ordinals)
                places = [place_of(segment.slot, ordinal) for ordinal in ordinals]
                while keys and (count := self._write(keys, WriteStream.RELOCATIONS, places)):
                    keys, places = keys[count:], places[count:]
        with pool.changed:
            ordinals, gone = pool.index.evict(segment, range(len(table)))
            pool.worth.remember_evicted(gone, np.array(table.states)[ordinals])
            self.evicted_blocks += len(gone)
            if pool.shares is not None:
                pool.shares.release(segment)
            segment.renew(pool.next_generation())
            pool.adopt(segment)
