"""Stores: one vectored call writes a batch of blocks, which then enter the index.

Workers of the toolkit call `BatchWriter.store`, several at once. The reclaimer's thread moves blocks by
`BatchWriter.write`. These things stay true:

- A block enters the index after its bytes are written, and only in the epoch in which its store began.
- A store waits for room a limited time, and flushes nothing.
- After a refused write, the place is given back or left out: a reservation always ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.config.limits import DEFAULT_TENANT
from tiered_kv.reasons import Reason
from tiered_kv.system.file_systems import is_of_place, is_stuck
from tiered_kv.system.step import give_way
from tiered_kv.toolkit.codecs import RAW_ID, CodecSet, Draft, ThreadBuffer, binding_of
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome, failure_reason
from tiered_kv.toolkit.small_files import write_all
from tiered_kv_nvme.disk import DirectMemory, Disk, StoreCounters
from tiered_kv_nvme.layout import KEY_BYTES_MAX, PAGE_BYTES, BatchHeader, checksum, encode_entries
from tiered_kv_nvme.pool import Reservation, SegmentPool, WriteStream
from tiered_kv_nvme.probe import DiskProbe
from tiered_kv_nvme.segment import Demand

BATCH_BLOCKS_MAX = 256
"""Limits the buffers of one call (IOV_MAX is 1024), and how long a worker holds the interpreter lock."""


PLACES_MAX = 4
"""How many places on the disk one batch tries, while places refuse it and the disk takes writes elsewhere."""


class Payloads(NamedTuple):
    """The stored forms of some blocks, by columns: an object for each block would cost more than its checksum."""

    contents: Sequence[memoryview]  # before encryption
    sizes: Sequence[int]  # as stored, in bytes
    codec_ids: Sequence[int]
    checksums: Sequence[bytes]  # of what is stored; empty before encryption
    drafts: Sequence[Draft]  # of blocks to encrypt; otherwise empty

    @property
    def in_pages(self) -> bool:
        """Whether each payload is as long as whole pages, so that it can be written from where it is."""
        return not any(size % PAGE_BYTES for size in self.sizes)

    def part(self, start: int, end: int) -> Payloads:
        contents, sizes, codec_ids, checksums, drafts = self
        return Payloads(
            contents[start:end], sizes[start:end], codec_ids[start:end], checksums[start:end], drafts[start:end]
        )


@dataclass(eq=False)
class BatchWriter:
    """Writes batches. Any thread may call, several at once.

    With `gather`, blocks are written from the caller's memory if that suits direct I/O. Otherwise they are copied into
    an aligned buffer first.
    """

    disk: Disk
    pool: SegmentPool
    counters: StoreCounters
    codecs: CodecSet
    gather: bool
    memory: DirectMemory
    probe: DiskProbe
    room_timeout_s: float  # how long a store waits for a free segment

    def __post_init__(self) -> None:
        self._scratch = ThreadBuffer()

    def store(
        self,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        epoch: int,
        deadline: float,
        tenant: str = DEFAULT_TENANT,
    ) -> Outcome:
        """Store blocks of a tenant, except existing ones; return the keys that are stored now, and why others are not.

        If the cache was reset since `epoch`, no block is stored. After the deadline no batch begins: the caller may
        have given the memory to other blocks.
        """
        places = self.pool.index.places.get_many(keys)
        wanted = {key: block for key, block, place in zip(keys, blocks, places, strict=True) if place < 0}
        if not wanted:
            return ALL_DONE
        fitting = [key for key in wanted if 0 < len(key) <= KEY_BYTES_MAX]
        reason = None if len(fitting) == len(wanted) else Reason.KEY_SIZE
        stored: set[OffloadKey] = set()
        for start in range(0, len(fitting), BATCH_BLOCKS_MAX):
            batch_keys = fitting[start : start + BATCH_BLOCKS_MAX]
            payloads = self._prepare([wanted[key] for key in batch_keys])
            if time.monotonic() >= deadline:
                reason = Reason.EXPIRED
                break
            count, failure = self.write(batch_keys, payloads, epoch, deadline=deadline, tenant=tenant)
            stored.update(batch_keys[:count])
            if failure is not None:  # the next batch would probably fail too
                reason = failure
                break
        if len(stored) == len(wanted):
            return ALL_DONE
        return Outcome([key for key in keys if key in stored or key not in wanted], reason)

    def _prepare(self, blocks: Sequence[memoryview]) -> Payloads:
        """Compress blocks as far as the codec does, and compute their checksums unless they are to be encrypted."""
        if self.codecs.writes_raw:
            checksums = []
            for block in blocks:
                give_way()
                checksums.append(checksum(block))
            return Payloads(blocks, list(map(len, blocks)), [RAW_ID] * len(blocks), checksums, ())
        drafts: list[Draft] = []
        for block in blocks:
            give_way()
            drafts.append(self.codecs.draft(block))
        contents = [draft.content for draft in drafts]
        columns = contents, [draft.payload_bytes for draft in drafts], [draft.codec_id for draft in drafts]
        if self.codecs.encrypts:
            return Payloads(*columns, (), drafts)
        return Payloads(*columns, list(map(checksum, contents)), ())

    def write(
        self,
        keys: Sequence[OffloadKey],
        payloads: Payloads,
        epoch: int,
        old_places: Sequence[int] | None = None,
        deadline: float = math.inf,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[int, Reason | None]:
        """Write one batch, or several at the end of a segment; return the number of blocks, and why others failed.

        If a place on the disk refuses a batch, the batch is written to another segment. With `old_places` the blocks
        move from these places. Then the call neither waits for space nor tries another segment.
        """
        timeout_s, stream = self.room_timeout_s, WriteStream.STORES
        if old_places is not None:
            timeout_s, stream = 0.0, WriteStream.RELOCATIONS
        done = refusals = 0
        while done < len(keys):
            if refusals and time.monotonic() >= deadline:
                return done, Reason.EXPIRED
            demand = Demand.of(payloads.sizes[done:], list(map(len, keys[done:])))
            reservation = self.pool.reserve(demand, epoch, timeout_s, stream)
            if reservation is None:
                if epoch != self.pool.epoch:
                    return done, Reason.RESET
                if stream is WriteStream.STORES:
                    with self.pool.changed:
                        starved, growing = self.pool.is_starved, self.pool.growing_since_s is not None
                        refusal = self.pool.refusal if self.pool.left_out else None
                    self.counters.add("refused_stores_total" if starved else "room_timeouts_total")
                    if growing and not starved:
                        return done, Reason.ALLOCATING
                    return done, refusal or Reason.NO_SPACE
                return done, Reason.NO_SPACE
            end = done + reservation.header.entry_count
            places = old_places[done:end] if old_places is not None else None
            failure, is_bad_place = self._write_batch(
                reservation, keys[done:end], payloads.part(done, end), places, tenant
            )
            if failure is None:
                done, refusals = end, 0
            elif is_bad_place and old_places is None and refusals < PLACES_MAX - 1:
                refusals += 1
            else:
                return done, failure
        return done, None

    def _write_batch(
        self,
        reservation: Reservation,
        keys: Sequence[OffloadKey],
        payloads: Payloads,
        old_places: Sequence[int] | None,
        tenant: str,
    ) -> tuple[Reason | None, bool]:
        """Write a batch and add its blocks to the index; return why that failed, and whether its place is bad."""
        segment, header = reservation.segment, reservation.header
        try:
            gather = self.gather and old_places is None
            gather = gather and payloads.in_pages and self.memory.suits(payloads.contents)
            entries, buffers = self._lay_out(header, keys, payloads, gather=gather)
            try:
                write_all(segment.fd, buffers, header.offset, pwritev=self.disk.pwritev)
            except OSError as error:
                if not (gather and self.memory.is_refusal(error)):
                    raise
                entries, buffers = self._lay_out(header, keys, payloads, gather=False)
                write_all(segment.fd, buffers, header.offset, pwritev=self.disk.pwritev)
            worth = self.pool.worth
            states = worth.first_states(keys) if old_places is None else self.pool.moved_states(old_places)
        except BaseException as error:
            is_bad_place = self._give_up(reservation, error, is_noted=old_places is None)
            if not isinstance(error, OSError):
                raise
            return failure_reason(error), is_bad_place
        self.counters.add("stored_batches_total")
        is_valid = self.pool.commit(reservation, keys, entries, states, old_places, tenant)
        return None if is_valid else Reason.RESET, False

    def _give_up(self, reservation: Reservation, error: BaseException, *, is_noted: bool) -> bool:
        """End a reservation after its batch could not be written; return whether the disk takes writes elsewhere.

        If it does, the refused place is left out.
        """
        is_bad_place = False
        try:
            if isinstance(error, OSError):
                self.counters.note_io_error("writing blocks", error)
                may_be_place = is_of_place(error) or is_stuck(error)  # the file was made immutable
                is_bad_place = may_be_place and self.probe.takes_writes(
                    reservation.segment, reservation.header.offset * is_noted
                )
        finally:
            with self.pool.changed:
                if is_bad_place:
                    self.pool.leave_out(reservation, failure_reason(error), is_noted=is_noted)
                else:
                    self.pool.abandon(reservation)
        if is_bad_place:
            self.counters.add("refused_places_total")
        return is_bad_place

    def _lay_out(
        self, header: BatchHeader, keys: Sequence[OffloadKey], payloads: Payloads, *, gather: bool
    ) -> tuple[bytes, list[memoryview]]:
        """Return a batch's entries, encoded, and the buffers to write.

        With `gather`, the buffers are a header, and the payloads in the caller's memory. Otherwise there is one buffer,
        into which blocks are copied or encrypted.
        """
        batch = self._scratch.take(header.header_bytes if gather else header.batch_bytes)
        contents, sizes, codec_ids, checksums, drafts = payloads
        assert not (gather and drafts), "a block to encrypt is never gathered"
        ends = list(accumulate(sizes, initial=header.header_bytes))
        if drafts:
            for key, draft, at, end in zip(keys, drafts, ends, ends[1:], strict=False):
                draft.write_into(batch[at:end], binding_of(self.pool.digest, key))
            checksums = [checksum(batch[at:end]) for at, end in pairwise(ends)]  # of blocks as they are stored
        elif not gather:
            for content, at, end in zip(contents, ends, ends[1:], strict=False):
                batch[at:end] = content
        if not gather:
            batch[ends[-1] :] = bytes(len(batch) - ends[-1])
        offsets = [header.offset + at for at in ends[:-1]]
        entries = encode_entries(keys, offsets, sizes, codec_ids, checksums)
        header.encode(batch[: header.header_bytes], entries, keys)
        return entries, [batch, *contents] if gather else [batch]
