"""Stores: blocks become batches, each written by one vectored call, and are found from then on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.toolkit.codecs import RAW, Codec
from tiered_kv.toolkit.jobs import ALL_DONE, Outcome, failure_reason
from tiered_kv.toolkit.turn import TURN
from tiered_kv_nvme.counters import Counters
from tiered_kv_nvme.disk import Disk, Scratch, write_fully
from tiered_kv_nvme.index import Index, place_of
from tiered_kv_nvme.layout import KEY_BYTES_MAX, BatchHeader, Entry, checksum
from tiered_kv_nvme.pool import Reservation, SegmentPool, Stream
from tiered_kv_nvme.segment import Demand

BATCH_BLOCKS_MAX = 256
"""Bounds the buffers of one call (IOV_MAX is 1024) and how long a worker holds the interpreter at a stretch."""
BATCH_BYTES_MAX = 8 << 20


class Payload(NamedTuple):
    """A block as it is stored: its bytes, encoded, the codec's number, and the checksum of the bytes."""

    data: memoryview
    codec: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Relocation:
    """Stored blocks that shall move.

    Args:
        keys: The blocks.
        payloads: Their stored bytes, verified.
        places: Where they are.
    """

    keys: Sequence[OffloadKey]
    payloads: Sequence[Payload]
    places: Sequence[int]


class BatchWriter:
    """Writes batches; every method may be called by several threads at once.

    Args:
        disk: System calls.
        digest: The namespace's digest.
        pool, index, counters: The store's.
        codec: What is done to blocks; one that would not get smaller is stored as it is.
        gather: Whether payloads go to the disk from where they lie. Otherwise they are copied into an aligned
            buffer first, which direct I/O needs unless blocks are whole pages on page boundaries.
        room_timeout_s: How long a store waits for a free segment.
    """

    def __init__(
        self,
        disk: Disk,
        digest: bytes,
        pool: SegmentPool,
        index: Index,
        counters: Counters,
        *,
        codec: Codec,
        gather: bool,
        room_timeout_s: float,
    ) -> None:
        self._disk = disk
        self._digest = digest
        self._pool = pool
        self._index = index
        self._counters = counters
        self._codec = codec
        self._gather = gather
        self._room_timeout_s = room_timeout_s
        self._local = threading.local()

    def store(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], resets: int) -> Outcome:
        """Store blocks, leaving out those that are here.

        Args:
            keys: The blocks' keys, of at most `KEY_BYTES_MAX` bytes each.
            blocks: Their bytes, unchanged until this returns.
            resets: The pool's `resets` when the blocks were offered; nothing is stored if it has changed.

        Returns:
            The keys that are here now, and if they are not all, why.
        """
        here = self._index.places
        wanted = {key: block for key, block in zip(keys, blocks, strict=True) if key not in here}
        if not wanted:
            return ALL_DONE
        fitting = {key: block for key, block in wanted.items() if 0 < len(key) <= KEY_BYTES_MAX}
        reason = "" if len(fitting) == len(wanted) else "key_size"
        stored: set[OffloadKey] = set()
        for batch_keys, batch_blocks in _batches(fitting):
            count, failure = self._write(batch_keys, [self._encode(block) for block in batch_blocks], resets)
            stored.update(batch_keys[:count])
            if failure:  # the next batch is likely to fail too, and may take as long
                reason = failure
                break
        if len(stored) == len(wanted):
            return ALL_DONE
        return Outcome([key for key in keys if key in stored or key not in wanted], reason)

    def relocate(self, relocation: Relocation, resets: int) -> int:
        """Copy stored blocks to the active segment, as far as there is room at once; return how many moved."""
        written, _ = self._write(relocation.keys, relocation.payloads, resets, relocation.places)
        return written

    def _encode(self, block: memoryview) -> Payload:
        if self._codec is RAW:
            return Payload(block, RAW.codec_id, checksum(block))
        with TURN.paused():  # compression is not the interpreter's work
            data = self._codec.encode(block)
        if data is None:
            return Payload(block, RAW.codec_id, checksum(block))
        return Payload(data, self._codec.codec_id, checksum(data))

    def _write(
        self,
        keys: Sequence[OffloadKey],
        payloads: Sequence[Payload],
        resets: int,
        old_places: Sequence[int] | None = None,
    ) -> tuple[int, str]:
        """Write one batch, or several where it meets the end of a segment; return how many blocks, and what failed."""
        timeout_s, stream = self._room_timeout_s, Stream.STORES
        if old_places is not None:
            timeout_s, stream = 0.0, Stream.RELOCATIONS
        done = 0
        while done < len(keys):
            rest = payloads[done:]
            demand = Demand.of([len(payload.data) for payload in rest], [len(key) for key in keys[done:]])
            with TURN.paused():  # it may wait for room
                reservation = self._pool.reserve(demand, resets, timeout_s, stream)
            if reservation is None:
                if resets != self._pool.resets:
                    return done, "reset"
                if stream is Stream.STORES:
                    with self._pool.changed:
                        starved = self._pool.is_starved
                    self._counters.add("refused_stores" if starved else "room_timeouts")
                return done, "no_space"
            end = done + reservation.count
            places = old_places[done:end] if old_places is not None else None
            failure = self._write_batch(reservation, keys[done:end], payloads[done:end], places)
            if failure:
                return done, failure
            done = end
        return done, ""

    def _write_batch(
        self,
        reservation: Reservation,
        keys: Sequence[OffloadKey],
        payloads: Sequence[Payload],
        old_places: Sequence[int] | None,
    ) -> str:
        """Write a batch where there is room for it and make its blocks known; return what failed."""
        written = False
        try:
            entries = _entries(reservation, payloads)
            write_fully(
                self._disk,
                reservation.segment.fd,
                self._buffers(reservation, entries, keys, payloads, gather=self._gather and old_places is None),
                reservation.offset,
            )
            written = True
        except OSError as error:
            self._counters.add("io_errors")
            return failure_reason(error)
        finally:
            if not written:
                with self._pool.changed:
                    self._pool.abandon(reservation)
        self._counters.add("stored_batches")
        return "" if self._publish(reservation, entries, keys, old_places) else "reset"

    def _publish(
        self,
        reservation: Reservation,
        entries: Sequence[Entry],
        keys: Sequence[OffloadKey],
        old_places: Sequence[int] | None,
    ) -> bool:
        """Make the blocks of a batch that is completely written known, unless the cache was reset meanwhile."""
        segment = reservation.segment
        with self._pool.changed:
            if not self._pool.commit(reservation):
                return False
            first_place = place_of(segment.slot, len(segment.table))
            segment.table.append(keys, entries)
            if old_places is None:
                self._index.add(keys, first_place)
            else:
                self._index.move(keys, old_places, first_place)
        return True

    def _buffers(
        self,
        reservation: Reservation,
        entries: Sequence[Entry],
        keys: Sequence[OffloadKey],
        payloads: Sequence[Payload],
        *,
        gather: bool,
    ) -> list[memoryview]:
        """Return what to write: the header and the payloads where they lie, or all of it in one aligned buffer."""
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        batch = scratch.take(reservation.header_bytes if gather else reservation.batch_bytes)
        header = BatchHeader(
            reservation.header_bytes,
            reservation.count,
            self._digest,
            reservation.generation,
            reservation.epoch,
            reservation.sequence,
            reservation.offset,
            reservation.batch_bytes,
        )
        header.encode(batch[: reservation.header_bytes], entries, keys)
        if gather:
            return [batch, *[payload.data for payload in payloads]]
        for entry, payload in zip(entries, payloads, strict=True):
            at = entry.offset - reservation.offset
            batch[at : at + entry.stored_bytes] = payload.data
        end = entries[-1].offset + entries[-1].stored_bytes - reservation.offset
        batch[end:] = bytes(len(batch) - end)
        return [batch]


def _entries(reservation: Reservation, payloads: Sequence[Payload]) -> list[Entry]:
    """Return the entries of payloads that follow each other after the batch's header."""
    entries: list[Entry] = []
    offset = reservation.offset + reservation.header_bytes
    for payload in payloads:
        size = len(payload.data)
        entries.append(Entry(offset, size, payload.codec, payload.checksum))
        offset += size
    return entries


def _batches(
    wanted: dict[OffloadKey, memoryview],
) -> Iterator[tuple[list[OffloadKey], list[memoryview]]]:
    """Cut blocks into batches of at most `BATCH_BLOCKS_MAX` and, if that is more than one, `BATCH_BYTES_MAX`."""
    keys, blocks = list(wanted), list(wanted.values())
    count = max(1, min(BATCH_BLOCKS_MAX, BATCH_BYTES_MAX // len(blocks[0]))) if blocks else 1
    for start in range(0, len(keys), count):
        yield keys[start : start + count], blocks[start : start + count]
