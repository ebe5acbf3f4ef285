"""Segment files damaged under an open nvme tier, and the small files beside them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.figures import Figures, Profile
from tests.support.patient_nvme import patient_nvme
from tests.support.segment_bench import CODECS, KEYS, SEGMENT_NAME, SegmentBench
from tests.support.segment_map import Part, SegmentMap
from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.errors import FormatError
from tiered_kv.testing.damage import SEED
from tiered_kv.testing.rig import make_keys

__all__ = ["patient_nvme"]

pytestmark = [pytest.mark.trust, pytest.mark.slow, pytest.mark.usefixtures("patient_nvme")]


@pytest.fixture(params=list(CODECS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> SegmentBench:
    made = SegmentBench(tmp_path / "kv", tmp_path / "pristine", request.param)
    made.fill()
    return made


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


def test_a_block_that_is_damaged_while_the_tier_is_open_is_a_counted_miss(
    directory: SegmentBench, profile: Profile, figures: Figures
) -> None:
    found = SegmentMap(directory.segment(clean=True))
    for name, data, victims in payload_changes(found, profile):
        directory.place(found.data)
        directory.tried += len(victims)
        rig = directory.open()
        try:
            _write_in_place(directory.path / SEGMENT_NAME, data)
            loaded = rig.load(KEYS)
            counted = count_of(rig.tier.stats(), "corrupt_blocks_total")
            offered = {key for key, here in zip(KEYS, rig.lookup_all(KEYS), strict=True) if here}
            healed = rig.store(sorted(victims)).success and rig.load(KEYS) == set(KEYS)
        finally:
            rig.close()
        if (loaded, counted, offered, healed) != (set(KEYS) - victims, len(victims), set(KEYS) - victims, True):
            directory.failures[name] = f"loaded {len(loaded)}, counted {counted}, offered {len(offered)}, {healed=}"
    directory.report(figures, "payloads under an open tier")


def test_headers_that_are_damaged_while_the_tier_is_open_cost_nothing_until_it_is_opened_again(
    directory: SegmentBench, figures: Figures
) -> None:
    """The index is in memory then. Closing writes the summary, which answers for batches, not for the first page."""
    found = SegmentMap(directory.segment(clean=True))
    for part in (Part.HEADER, Part.BATCH_HEADER, Part.GAP, Part.ROOM, Part.TABLE, Part.FOOTER):
        for stretch in found.parts(part):
            directory.tried += 1
            data = bytearray(found.data)
            data[stretch.start : stretch.end] = b"\xff" * (stretch.end - stretch.start)
            directory.place(found.data)
            rig = directory.open()
            try:
                _write_in_place(directory.path / SEGMENT_NAME, bytes(data))
                loaded = rig.load(KEYS)
                assert rig.store(make_keys(2, "later")).success
                rig.reopen()
                after = rig.load(KEYS)
                rig.store(KEYS)
                healed = rig.load(KEYS) == set(KEYS)
            finally:
                rig.close()
            kept = set() if part is Part.HEADER else set(KEYS)
            if (loaded, after, healed) != (set(KEYS), kept, True):
                why = f"{len(loaded)} loaded, {len(after)} after opening again, {healed=}"
                directory.failures[f"{part.value} at {stretch.start}"] = why
    directory.report(figures, "headers under an open tier")


def test_a_file_that_is_cut_while_the_tier_is_open_is_a_counted_miss(directory: SegmentBench, figures: Figures) -> None:
    found = SegmentMap(directory.segment(clean=True))
    for stretch in found.stretches:
        directory.tried += 1
        directory.place(found.data)
        rig = directory.open()
        try:
            os.truncate(directory.path / SEGMENT_NAME, stretch.start)
            loaded = rig.load(KEYS)
            counted = count_of(rig.tier.stats(), "corrupt_blocks_total")
            healed = rig.store(KEYS).success and rig.load(KEYS) == set(KEYS)
        finally:
            rig.close()
        whole = {each.key for each in found.parts(Part.PAYLOAD) if each.end <= stretch.start}
        if (loaded, counted) != (whole, len(KEYS) - len(whole)) or not healed:
            directory.failures[f"cut to {stretch.start}"] = f"{len(loaded)} loaded, {counted} counted, {healed=}"
    directory.report(figures, "")


def test_an_older_use_of_a_segment_brings_no_block_back(directory: SegmentBench, figures: Figures) -> None:
    """The file of before a reset lies there again: its batches carry the old epoch."""
    old = directory.segment(clean=True)
    directory.tried += 2
    directory.place(old)
    rig = directory.open()
    assert rig.tier.reset_cache()
    rig.close()
    for name, data in (("closed", old), ("crashed", directory.segment(clean=False))):
        _write_in_place(directory.path / SEGMENT_NAME, data)
        rig = directory.open()
        try:
            offered, loaded = rig.lookup_all(KEYS), rig.load(KEYS)
        finally:
            rig.close()
        if any(offered) or loaded:
            directory.failures[name] = f"{sum(offered)} are offered, {len(loaded)} loaded"
    directory.report(figures, "segments of before a reset")


def test_a_damaged_marker_or_epoch_refuses_or_forgets_and_never_gives_wrong_bytes(
    directory: SegmentBench, profile: Profile, figures: Figures
) -> None:
    for name in ("tiered-kv-nvme.json", "epoch"):
        pristine = (directory.pristine / name).read_bytes()
        relevant = len(pristine) if name.endswith("json") else 32
        step = 1 if profile is Profile.FULL else 11
        contents = [
            pristine[:at] + bytes([pristine[at] ^ mask]) + pristine[at + 1 :]
            for at in range(0, relevant, step)
            for mask in ((0x01, 0x80) if profile is Profile.FULL else (0x02,))
        ]
        contents += [b"", pristine[:10], pristine + b"x", bytes(len(pristine)), b"[" * 100_000, b"\xff" * 5000]
        for number, content in enumerate(contents):
            directory.tried += 1
            directory.place(directory.segment(clean=True))
            (directory.path / name).write_bytes(content)
            before = (directory.path / SEGMENT_NAME).read_bytes()
            try:
                rig = directory.open()
            except FormatError as error:
                untouched = (directory.path / SEGMENT_NAME).read_bytes() == before
                said = (directory.path / name).read_bytes() == content and str(directory.path) in str(error)
                if name == "epoch" or not (untouched and said):
                    directory.failures[f"{name} {number}"] = f"{error}, {untouched=}"
                continue
            except Exception as error:
                directory.failures[f"{name} {number}"] = f"{type(error).__name__}: {error}"
                continue
            try:
                loaded = rig.load(KEYS)
                rig.store(KEYS)
                if loaded not in (set(), set(KEYS)) or rig.load(KEYS) != set(KEYS):
                    directory.failures[f"{name} {number}"] = f"{len(loaded)} loaded"
            finally:
                rig.close()
    directory.report(figures, "markers and epochs")


def _write_in_place(path: Path, data: bytes) -> None:
    """Write over a file that others have open."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
