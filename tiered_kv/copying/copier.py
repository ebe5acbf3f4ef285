"""The loop of a copy: lists, asks the target, reads what it lacks, and stores it.

One thread calls. It reads one batch while the target's workers store the batches before. These things stay true:

- A record is stored only if its checksum was verified, and if the target's codecs, where they are known, can read it.
- Each block is tried once. So a copy ends, also if the target evicts what it got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tiered_kv.base import OffloadKey
from tiered_kv.copying.source import BlocksToCopy, Plan
from tiered_kv.copying.target import Record, RecordTarget, Row
from tiered_kv.reasons import UNREADABLE, Reason, RecordStatus
from tiered_kv.toolkit.administration import StoredBlock
from tiered_kv.toolkit.codecs import CodecSet
from tiered_kv.toolkit.record import HEADER_BYTES, RecordHeader, decode_record, encode_record, read_header

_GONE = (Reason.ABSENT, Reason.RESET)
_SOUND = UNREADABLE | {RecordStatus.UNENCRYPTED}  # records that the source's settings cannot decode
_READ_S = 60.0  # for one batch of the source
_STEP_S = 180.0  # for one batch altogether


@dataclass(eq=False)
class CopyCounts:
    """What became of the blocks of a copy."""

    copied: int = 0
    copied_bytes: int = 0
    present: int = 0  # the target had them
    gone: int = 0  # the source lost them after they were listed: evicted, purged, or hidden by a reset
    damaged: Counter[str] = field(default_factory=Counter)  # at the source, by reason; they were not copied
    unreadable: Counter[str] = field(default_factory=Counter)  # that the source could not read now, by reason
    refused: Counter[str] = field(default_factory=Counter)  # by the target, by reason
    is_whole: bool = False  # whether each block was tried

    @property
    def ok(self) -> bool:
        """Whether the target has got every block that the source still has."""
        return self.is_whole and not (self.damaged or self.unreadable or self.refused)


@dataclass(frozen=True, slots=True)
class Recoding:
    """Decodes each record by the source's codecs, and encodes it anew by the target's."""

    source: CodecSet
    target: CodecSet


@dataclass(eq=False)
class Copier:
    """Copies blocks to a target. One thread calls `run`, once.

    Args:
        codecs: The target's. A record that they cannot read is not stored. None: they are not known.
        on_bytes: Called with the bytes of each batch; it may sleep, to limit the rate.
        is_stopped: Asked before each batch.
        begin_step: Called before each batch, with the seconds that it may take.
    """

    blocks: BlocksToCopy
    target: RecordTarget
    codecs: CodecSet | None
    on_bytes: Callable[[int], None] = lambda size_bytes: None
    is_stopped: Callable[[], bool] = lambda: False
    begin_step: Callable[[float], None] = lambda limit_s: None
    recoding: Recoding | None = None

    def __post_init__(self) -> None:
        self.counts = CopyCounts()
        self._namespace = bytes.fromhex(self.blocks.digest)

    def run(self, plan: Plan) -> CopyCounts:
        """Copy the planned blocks, and return the counts. `counts` has them also after an exception."""
        try:
            for batch in self._batches(plan):
                if self.is_stopped():
                    break
                self.begin_step(_STEP_S)
                self._copy(batch)
            else:
                self.counts.is_whole = True
            self.target.drain()
        finally:
            counts, target = self.counts, self.target
            counts.copied, counts.copied_bytes = target.stored, target.stored_bytes
            counts.refused.update(target.refused)
        return counts

    def _batches(self, plan: Plan) -> Iterator[Sequence[StoredBlock]]:
        for listed in self.blocks.planned(plan):
            for start in range(0, len(listed), self.target.job_blocks):
                yield listed[start : start + self.target.job_blocks]

    def _copy(self, batch: Sequence[StoredBlock]) -> None:
        unique = list({each.key: each for each in batch}.values())  # a listing may repeat a block
        present = self.target.has([each.key for each in unique])
        wanted = [each for each, has in zip(unique, present, strict=True) if not has]
        self.counts.present += len(unique) - len(wanted)
        records: list[Record] = []
        if wanted:
            rows = self.target.rows(len(wanted))
            statuses = self.blocks.read(wanted, [row.memory for row in rows], _READ_S)
            for each, row, status in zip(wanted, rows, statuses, strict=True):
                if status is not RecordStatus.OK:
                    self._note(status)
                elif (record := self._record(each.key, row)) is not None:
                    records.append(record)
        self.target.store(records)
        self.on_bytes(sum(map(self.blocks.size_bytes, batch)))

    def _note(self, status: RecordStatus | str) -> None:
        if status in _GONE:
            self.counts.gone += 1
        elif isinstance(status, RecordStatus):
            (self.counts.unreadable if status in _SOUND else self.counts.damaged)[status.value] += 1
        else:
            self.counts.unreadable[str(status)] += 1

    def _record(self, key: OffloadKey, row: Row) -> Record | None:
        """Return the record in `row`, encoded anew if that is asked for; None if the target could not read it."""
        header = read_header(row.memory)
        if self.recoding is not None and isinstance(header, RecordHeader):
            if not self._encode_anew(key, row, header.payload_bytes, self.recoding):
                return None
            header = read_header(row.memory)
        if not isinstance(header, RecordHeader):  # the source was wrong to call it sound
            self._note(header)
            return None
        payload = row.memory[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        refusal = RecordStatus.OK if self.codecs is None else self.codecs.refusal(header.codec_id, payload)
        if refusal is not RecordStatus.OK:
            self.counts.refused[refusal.value] += 1
            return None
        return Record(key, row, HEADER_BYTES + len(payload))

    def _encode_anew(self, key: OffloadKey, row: Row, payload_bytes: int, recoding: Recoding) -> bool:
        """Replace the record in `row` by the one that the target would write; return whether it could be decoded."""
        record = row.memory[: HEADER_BYTES + payload_bytes]
        block = memoryview(bytearray(self.blocks.block_bytes))
        status = decode_record(
            record[:HEADER_BYTES], record[HEADER_BYTES:], key, block, self._namespace, recoding.source
        )
        if status is not RecordStatus.OK:
            self._note(status)
            return False
        head, payload = encode_record(key, block, self._namespace, recoding.target)
        row.memory[:HEADER_BYTES] = head
        row.memory[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
        return True
