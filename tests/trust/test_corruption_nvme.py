"""Segment files damaged before an nvme tier is opened on them, or while it is open: only the damaged blocks are lost.

`tests.support.segment_map` says what each byte of a segment is. So every case has an exact expectation: unused bytes
cost nothing, a payload costs its block, a header the blocks that only it lists, and a summary nothing, since the
batches list the same.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.damage import SEED, Damage, Field, field_damages
from tests.support.entries import rig_of
from tests.support.figures import Figures, Profile
from tests.support.segment_map import (
    BATCH_FIELDS,
    BATCH_FIXED_BYTES,
    ENTRY_BYTES,
    FOOTER_FIELDS,
    PAGE_BYTES,
    SEGMENT_FIELDS,
    Part,
    SegmentMap,
    Stretch,
    entry_fields,
    seal,
)
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.rig import TierRig, block_content, compressible_content, make_keys

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]


BLOCK_BYTES = 4096
KEYS = make_keys(12)
CODECS = {"raw": block_content, "zstd": compressible_content}
SEGMENT_NAME = "segment-00010203-000000.kv"


@dataclass(frozen=True)
class Case:
    """A damage to a segment file, and what it may cost."""

    name: str
    data: bytes  # of the file afterwards
    left: frozenset[OffloadKey]  # the blocks that must load
    claimed: frozenset[OffloadKey] = frozenset()  # the lost blocks that a lookup still finds: their loads are counted
    is_discarded: bool = False  # the whole file


@dataclass
class SegmentBench:
    """A directory with one segment of three batches, made by a tier that was closed; opened again for each case."""

    path: Path
    pristine: Path
    codec: str
    figures: Figures
    tried: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    def open(self) -> TierRig:
        """Open the tier on the directory as it is."""
        entry = {"type": "nvme", "path": str(self.path), "capacity": "1MiB", "segment": "96KiB", "threads": 2}
        return rig_of(
            {**entry, "codec": self.codec}, block_bytes=BLOCK_BYTES, num_blocks=64, content=CODECS[self.codec]
        )

    def fill(self) -> None:
        """Store `KEYS` in three batches, close the tier, and keep a copy."""
        with closing(self.open()) as rig:
            for start in range(0, len(KEYS), 4):
                assert rig.store(KEYS[start : start + 4]).success
        for path in self.path.glob("segment-*.kv"):
            if path.name != SEGMENT_NAME:
                path.unlink()  # made ahead of time, and empty
        shutil.copytree(self.path, self.pristine)

    def segment(self, *, clean: bool) -> bytes:
        """Return the segment as it was closed, or as a crash before its end would have left it."""
        data = (self.pristine / SEGMENT_NAME).read_bytes()
        return data if clean else data[:-PAGE_BYTES] + bytes(PAGE_BYTES)

    def place(self, data: bytes) -> None:
        """Make the directory what it was, but for the segment."""
        shutil.rmtree(self.path)
        shutil.copytree(self.pristine, self.path)
        (self.path / SEGMENT_NAME).write_bytes(data)

    def try_reopening(self, case: Case) -> None:
        """Open the damaged directory, and note what does not hold."""
        self.tried += 1
        self.place(case.data)
        try:
            why = self._reopened(case)
        except Exception as error:  # an opening may raise none
            why = f"{type(error).__name__}: {error}"
        if why:
            self.failures[case.name] = why

    def _reopened(self, case: Case) -> str:
        with closing(self.open()) as rig:
            found = offered_by(rig)
            loaded = rig.load(KEYS)  # checks the bytes
            stats = rig.tier.stats()
            offered = offered_by(rig)
            healed = rig.store(KEYS).success and rig.load(KEYS) == set(KEYS)
        corrupt = count_of(stats, "corrupt_blocks_total")
        checks = {
            "blocks that were found and not loaded are not counted": corrupt == len(found - loaded),
            "a block is loaded that was not found": loaded <= found,
            "what failed to load is offered again": offered == loaded,
            "a new store does not make everything good again": healed,
            "a file of no use is not counted as discarded": stats["discarded_segments_total"] == int(case.is_discarded),
            f"{len(loaded)} blocks are left, and not {len(case.left)}": loaded == case.left,
            f"{len(found - loaded)} were claimed, and not {len(case.claimed)}": found - loaded == case.claimed,
        }
        return "; ".join(why for why, holds in checks.items() if not holds)

    def report(self, note: str = "") -> None:
        """Add the cases to the table of figures, and fail if one did not hold."""
        self.figures.add("corruption/nvme", self.tried, self.tried - len(self.failures), note)
        assert not self.failures, "\n".join(
            f"{self.codec}: {name}: {why}" for name, why in list(self.failures.items())[:20]
        )


def offered_by(rig: TierRig) -> set[OffloadKey]:
    return {key for key, is_offered in zip(KEYS, rig.lookup_all(KEYS), strict=True) if is_offered}


def cost(found: SegmentMap, hit: Stretch, *, clean: bool) -> tuple[frozenset[OffloadKey], frozenset[OffloadKey]]:
    """Return the blocks that are left when one byte of a stretch is another, and those that are claimed and lost."""
    everything = frozenset(KEYS)
    if hit.part is Part.HEADER:
        return frozenset(), frozenset()
    if hit.part is Part.PAYLOAD and clean:  # the summary lists the batch, so it is read at a load only
        return everything - {hit.key}, frozenset({hit.key})
    if hit.part in (Part.PAYLOAD, Part.BATCH_HEADER) and not clean:  # a batch that is not whole ends its segment
        before = found.batches[: hit.batch]
        return frozenset(key for batch in before for key, _, _ in batch.entries), frozenset()
    return everything, frozenset()


@pytest.fixture(params=list(CODECS))
def directory(request: pytest.FixtureRequest, tmp_path: Path, figures: Figures) -> SegmentBench:
    made = SegmentBench(tmp_path / "kv", tmp_path / "pristine", request.param, figures)
    made.fill()
    return made


@pytest.fixture(params=[True, False], ids=["closed", "crashed"])
def clean(request: pytest.FixtureRequest) -> bool:
    """Whether the segment was closed."""
    return bool(request.param)


@pytest.fixture
def found(directory: SegmentBench, clean: bool) -> SegmentMap:
    return SegmentMap(directory.segment(clean=clean))


def case_at(found: SegmentMap, damage: Damage, at: int, *, clean: bool) -> Case | None:
    """Return the case of a damage within one stretch; None if it changes nothing."""
    data = damage.apply(found.data)
    if data == found.data:
        return None
    hit = found.part_at(at)
    left, claimed = cost(found, hit, clean=clean)
    name = f"{'closed' if clean else 'crashed'}, {hit.part.value}, {damage.name}"
    return Case(name, data, left, claimed, hit.part is Part.HEADER)


def fields_of(found: SegmentMap, *, clean: bool) -> list[Field]:
    """Return every field of every header, with its place in the file."""
    fields = list(SEGMENT_FIELDS)
    for number, batch in enumerate(found.batches):
        entries_at = batch.offset + BATCH_FIXED_BYTES
        keys_at = entries_at + len(batch.entries) * ENTRY_BYTES
        fields += [_moved(each, batch.offset, f"batch {number}: ") for each in BATCH_FIELDS]
        for ordinal in range(len(batch.entries)):
            fields += entry_fields(entries_at + ordinal * ENTRY_BYTES, f"batch {number}, entry {ordinal}")
        fields.append(Field(f"batch {number}: keys", keys_at, sum(len(key) for key, _, _ in batch.entries)))
    if clean:
        (table,) = found.parts(Part.TABLE)
        fields += [_moved(each, len(found.data) - PAGE_BYTES, "footer: ") for each in FOOTER_FIELDS]
        for ordinal in range(len(KEYS)):
            fields += entry_fields(table.start + ordinal * ENTRY_BYTES, f"table, entry {ordinal}")
    return fields


def _moved(field: Field, by: int, label: str) -> Field:
    return Field(label + field.name, field.offset + by, field.length, field.values)


def _is_tried(damage: Damage) -> bool:
    """Return whether the full profile tries it: of each byte one bit and all of them, and every plausible value."""
    bit = _BIT.search(damage.name)
    if bit is not None:
        return int(bit[1]) % 8 == int(bit[1]) // 8 % 8
    return " inverted" in damage.name or ": byte " not in damage.name


PARTS = 2
"""So that no test takes minutes in the full profile."""
_BIT = re.compile(r": bit (\d+) flipped")


@pytest.mark.parametrize("part", range(PARTS))
def test_a_damaged_field_costs_what_it_answers_for(
    directory: SegmentBench, found: SegmentMap, clean: bool, part: int, profile: Profile
) -> None:
    fields = fields_of(found, clean=clean)
    is_full = profile is Profile.FULL
    damages = [
        (damage, each.offset)
        for each in fields
        for damage in field_damages(each, full=is_full)
        if not is_full or _is_tried(damage)
    ]
    chosen = damages[part::PARTS] if is_full else random.Random(SEED + part).sample(damages, 50)
    for damage, at in chosen:
        case = case_at(found, damage, at, clean=clean)
        if case is not None:
            directory.try_reopening(case)
    directory.report("fields of segments, batches, entries and summaries")


def test_a_flipped_byte_anywhere_costs_what_it_belongs_to(
    directory: SegmentBench, found: SegmentMap, clean: bool, profile: Profile
) -> None:
    """Of each stretch its first and last byte, and some within: paddings, gaps and the room behind the batches too."""
    chance = random.Random(SEED)
    samples = profile.pick(1, 10)
    places: list[int] = []
    for stretch in found.stretches:
        places += [stretch.start, stretch.end - 1]
        places += [chance.randrange(stretch.start, stretch.end) for _ in range(samples)]
    for at in places:
        damages = list(field_damages(Field(f"byte {at}", at, 1), full=False))
        case = case_at(found, chance.choice(damages[:3]), at, clean=clean)
        if case is not None:
            directory.try_reopening(case)
    directory.report()


def test_a_file_that_is_cut_or_grown_costs_what_was_cut_off(
    directory: SegmentBench, found: SegmentMap, profile: Profile
) -> None:
    cuts = {stretch.start for stretch in found.stretches} | {stretch.end - 1 for stretch in found.stretches}
    if profile is Profile.FULL:
        cuts |= set(range(0, len(found.data), 1021))
    for size in sorted(cuts):
        # What a cut leaves of the room and of the summary means nothing: batches that are whole are found.
        whole = frozenset(key for batch in found.batches if batch.end <= size for key, _, _ in batch.entries)
        name = f"cut to {size} bytes"
        directory.try_reopening(Case(name, found.data[:size], whole, is_discarded=size < PAGE_BYTES))
    for more in (1, PAGE_BYTES, 100_000):
        directory.try_reopening(Case(f"{more} zeros appended", found.data + bytes(more), frozenset(KEYS)))
        directory.try_reopening(Case(f"{more} ones appended", found.data + b"\xff" * more, frozenset(KEYS)))
    directory.report("cuts and growth")


def test_a_segment_that_says_it_is_shorter_is_not_sealed_over_its_payloads(directory: SegmentBench) -> None:
    """Closing writes the summary at the segment's end, which the header moves to where a payload lies."""
    found = SegmentMap(directory.segment(clean=False))
    size = next(field for field in SEGMENT_FIELDS if field.name == "segment size")
    end = found.batches[1].end + PAGE_BYTES
    data = seal(size.written(found.data, end), 0, PAGE_BYTES)
    kept = frozenset(key for batch in found.batches[:2] for key, _, _ in batch.entries)
    for _ in range(2):
        directory.try_reopening(Case("shorter than its batches", data, kept))
    directory.place(data)
    for _ in range(2):  # what the first closing leaves is what the second opening finds
        with closing(directory.open()) as rig:
            loaded = rig.load(KEYS)
            corrupt = count_of(rig.tier.stats(), "corrupt_blocks_total")
        if (loaded, corrupt) != (set(kept), 0):
            directory.failures["closed and opened again"] = f"{len(loaded)} loaded, {corrupt} corrupt"
    directory.report()


# Under an open tier.


def payload_changes(found: SegmentMap, profile: Profile) -> Iterator[tuple[str, bytes, set[OffloadKey]]]:
    """Yield a file with a few payloads damaged, and whose they are."""
    chance = random.Random(SEED)
    payloads = found.parts(Part.PAYLOAD)
    for round_number in range(40 if profile is Profile.FULL else 6):
        hit = chance.sample(payloads, 4)
        data = bytearray(found.data)
        for stretch, at in zip(hit, (0.0, 1.0, chance.random(), chance.random()), strict=True):
            data[min(stretch.start + int(at * (stretch.end - stretch.start)), stretch.end - 1)] ^= (
                1 << chance.randrange(8)
            )
        yield f"flips, round {round_number}", bytes(data), {stretch.key for stretch in hit}
    first, second, third = payloads[0], payloads[5], payloads[9]
    size = min(each.end - each.start for each in (first, second, third))
    data = bytearray(found.data)
    data[first.start : first.start + size] = found.data[second.start : second.start + size]
    data[second.start : second.start + size] = found.data[first.start : first.start + size]
    yield "two blocks swapped", bytes(data), {first.key, second.key}
    data = bytearray(found.data)
    data[third.start : third.start + size] = found.data[first.start : first.start + size]
    yield "another block's bytes", bytes(data), {third.key}
    data = bytearray(found.data)
    data[first.start : first.end] = bytes(first.end - first.start)
    yield "zeros, as a hole would read", bytes(data), {first.key}


def test_a_block_that_is_damaged_under_an_open_tier_is_a_counted_miss(
    directory: SegmentBench, profile: Profile
) -> None:
    found = SegmentMap(directory.segment(clean=True))
    for name, data, victims in payload_changes(found, profile):
        directory.place(found.data)
        directory.tried += len(victims)
        with closing(directory.open()) as rig:
            _write_in_place(directory.path / SEGMENT_NAME, data)
            loaded = rig.load(KEYS)
            counted = count_of(rig.tier.stats(), "corrupt_blocks_total")
            offered = offered_by(rig)
            healed = rig.store(sorted(victims)).success and rig.load(KEYS) == set(KEYS)
        if (loaded, counted, offered, healed) != (set(KEYS) - victims, len(victims), set(KEYS) - victims, True):
            directory.failures[name] = f"loaded {len(loaded)}, counted {counted}, offered {len(offered)}, {healed=}"
    directory.report("payloads under an open tier")


def test_headers_that_are_damaged_under_an_open_tier_cost_nothing_until_it_is_opened_again(
    directory: SegmentBench,
) -> None:
    """The index is in memory then. Closing writes the summary, which answers for batches, not for the first page."""
    found = SegmentMap(directory.segment(clean=True))
    for part in (Part.HEADER, Part.BATCH_HEADER, Part.GAP, Part.ROOM, Part.TABLE, Part.FOOTER):
        for stretch in found.parts(part):
            directory.tried += 1
            data = bytearray(found.data)
            data[stretch.start : stretch.end] = b"\xff" * (stretch.end - stretch.start)
            directory.place(found.data)
            with closing(directory.open()) as rig:
                _write_in_place(directory.path / SEGMENT_NAME, bytes(data))
                loaded = rig.load(KEYS)
                assert rig.store(make_keys(2, "later")).success
                rig.reopen()
                after = rig.load(KEYS)
                rig.store(KEYS)
                healed = rig.load(KEYS) == set(KEYS)
            kept = set() if part is Part.HEADER else set(KEYS)
            if (loaded, after, healed) != (set(KEYS), kept, True):
                why = f"{len(loaded)} loaded, {len(after)} after opening again, {healed=}"
                directory.failures[f"{part.value} at {stretch.start}"] = why
    directory.report("headers under an open tier")


def test_an_older_use_of_a_segment_brings_no_block_back(directory: SegmentBench) -> None:
    """The file of before a reset lies there again: its batches carry the old epoch."""
    old = directory.segment(clean=True)
    directory.tried += 2
    directory.place(old)
    with closing(directory.open()) as rig:
        assert rig.tier.reset_cache()
    for name, data in (("closed", old), ("crashed", directory.segment(clean=False))):
        _write_in_place(directory.path / SEGMENT_NAME, data)
        with closing(directory.open()) as rig:
            offered, loaded = rig.lookup_all(KEYS), rig.load(KEYS)
        if any(offered) or loaded:
            directory.failures[name] = f"{sum(offered)} are offered, {len(loaded)} loaded"
    directory.report("segments of before a reset")


def _write_in_place(path: Path, data: bytes) -> None:
    """Write over a file that others have open."""
    with path.open("r+b") as file:
        file.write(data)
        os.fsync(file.fileno())
