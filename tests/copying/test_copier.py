"""The loop of a copy: what it makes of a source that lies, repeats, or loses blocks, and of a target that has some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.copying.copier import Copier, CopyCounts
from tiered_kv.copying.source import BlocksToCopy, Selection
from tiered_kv.copying.target import Record, Row
from tiered_kv.reasons import Reason, RecordStatus
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.toolkit.administration import StoredBlock
from tiered_kv.toolkit.record import HEADER_BYTES, encode_record, record_bytes_max

BLOCK_BYTES = 512
DIGEST = bytes(range(16))
KEYS = make_keys(20)


class Source:
    """Blocks in batches of five, of which the first may be listed twice; a later one was used later."""

    def __init__(
        self,
        answers: dict[OffloadKey, RecordStatus | str] | None = None,
        *,
        empty: bool = False,
        repeats: int = 0,
        drift_s: float = 0.0,
    ) -> None:
        self._answers, self._empty, self._repeats = answers or {}, empty, repeats
        self._drift_s, self._later_s = drift_s, 0.0
        self.read: list[OffloadKey] = []

    def blocks(
        self, digest: str, keys: Collection[OffloadKey] | None, deadline: float
    ) -> Iterator[Sequence[StoredBlock]]:
        later_s, self._later_s = self._later_s, self._later_s + self._drift_s
        for start in range(0, len(KEYS), 5):
            batch = [*KEYS[start : start + 5], *[KEYS[start]] * self._repeats]
            yield [StoredBlock(key, BLOCK_BYTES + HEADER_BYTES, later_s + 100.0 * KEYS.index(key)) for key in batch]

    def read_records(
        self, digest: str, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], deadline: float
    ) -> list[RecordStatus | str]:
        self.read += [each.key for each in blocks]
        for block, row in zip(blocks, rows, strict=True):
            content = memoryview(block_content(block.key, BLOCK_BYTES))
            head, payload = encode_record(block.key, content, DIGEST)
            row[: HEADER_BYTES + BLOCK_BYTES] = bytes(HEADER_BYTES + BLOCK_BYTES) if self._empty else head + payload
        return [self._answers.get(each.key, RecordStatus.OK) for each in blocks]


class Target:
    """Keeps records in a dictionary."""

    job_blocks = 4

    def __init__(self, present: Collection[OffloadKey] = ()) -> None:
        self.records = dict.fromkeys(present, b"")
        self.stored = self.stored_bytes = 0
        self.refused: Counter[str] = Counter()

    def has(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [key in self.records for key in keys]

    def rows(self, count: int) -> list[Row]:
        assert count <= self.job_blocks
        return [Row(number, memoryview(bytearray(record_bytes_max(BLOCK_BYTES)))) for number in range(count)]

    def store(self, records: Sequence[Record]) -> None:
        for each in records:
            self.records[each.key] = bytes(each.row.memory[: each.size_bytes])
            self.stored += 1

    def drain(self) -> None:
        pass


def copied(source: Source, target: Target, bytes_max: int | None = None) -> CopyCounts:
    blocks = BlocksToCopy(source, DIGEST.hex(), BLOCK_BYTES, Selection(None, bytes_max))
    return Copier(blocks, target, None).run(blocks.plan())


def test_each_block_is_read_once_and_what_the_target_has_is_not() -> None:
    source, target = Source(repeats=1), Target(KEYS[:3])
    counts = copied(source, target)
    assert (counts.copied, counts.ok) == (17, True)
    assert sorted(source.read) == sorted(KEYS[3:])
    for key in KEYS[3:]:
        assert target.records[key][HEADER_BYTES:] == block_content(key, BLOCK_BYTES)


def test_what_the_source_does_not_give_is_counted_by_why() -> None:
    answers: dict[OffloadKey, RecordStatus | str] = {
        KEYS[0]: Reason.ABSENT,
        KEYS[1]: Reason.RESET,
        KEYS[2]: RecordStatus.BAD_CHECKSUM,
        KEYS[3]: RecordStatus.UNKNOWN_CODEC,
        KEYS[4]: Reason.IO_ERROR,
    }
    target = Target()
    counts = copied(Source(answers), target)
    assert (counts.copied, counts.gone, counts.ok) == (15, 2, False)
    assert counts.damaged == {"checksum": 1}
    assert counts.unreadable == {"unknown_codec": 1, "io_error": 1}
    assert not target.records.keys() & answers.keys()


def test_a_source_that_calls_garbage_sound_fills_no_target() -> None:
    target = Target()
    counts = copied(Source(empty=True), target)
    assert (counts.copied, counts.damaged, target.records) == (0, {"bad_magic": 20}, {})


@pytest.mark.parametrize("blocks", [0, 1, 7, 30])
def test_the_last_used_blocks_up_to_the_size_are_copied(blocks: int) -> None:
    target = Target()
    size_bytes = blocks * (BLOCK_BYTES + HEADER_BYTES)
    counts = copied(Source(), target, size_bytes)
    assert counts.ok
    assert sorted(target.records) == sorted(KEYS[max(0, len(KEYS) - blocks) :])


@pytest.mark.parametrize("drift_s", [-150.0, 1.0, 2.5, 150.0])
def test_a_source_whose_ages_differ_from_listing_to_listing_gives_the_planned_blocks(drift_s: float) -> None:
    target = Target()
    counts = copied(Source(drift_s=drift_s), target, 7 * (BLOCK_BYTES + HEADER_BYTES))
    assert (counts.copied, counts.ok) == (7, True)
    assert sorted(target.records) == sorted(KEYS[-7:])
