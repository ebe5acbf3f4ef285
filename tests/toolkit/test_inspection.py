"""Surveys count in bounded memory, and records are judged without their keys."""

from __future__ import annotations

import pytest

from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.administration import Ages, Verification
from tiered_kv.toolkit.codecs import PLAIN
from tiered_kv.toolkit.inspection import NAMESPACES_MAX, AgeSample, Census, RecordCheck, block_bytes_in
from tiered_kv.toolkit.record import digest_of, encode_record
from tiered_kv.toolkit.status import RecordStatus

DIGEST = bytes(range(16))


def test_a_few_ages_have_an_exact_median_and_none_have_none() -> None:
    sample = AgeSample()
    assert sample.ages() is None
    for age_s in (5.0, 1.0, -3.0, 9.0, 2.0):
        sample.add(age_s)
    assert sample.ages() == Ages(9.0, 2.0, 0.0)


def test_the_median_of_many_ages_is_estimated() -> None:
    sample = AgeSample()
    for age_s in range(100_000):
        sample.add(float(age_s))
    ages = sample.ages()
    assert ages is not None
    assert (ages.oldest_s, ages.newest_s) == (99_999.0, 0.0)
    assert 45_000 < ages.median_s < 55_000


def test_further_namespaces_and_foreign_names_are_only_counted() -> None:
    census = Census()
    for number in range(NAMESPACES_MAX + 10):
        census.add(f"{number:032x}", 2)
    survey = census.survey(lambda digest: {})
    assert len(survey.namespaces) == NAMESPACES_MAX
    assert survey.foreign is not None
    assert (survey.foreign.entries, survey.foreign.size_bytes, len(survey.foreign.names)) == (10, 20, 8)


def test_one_unknown_size_makes_the_sum_unknown() -> None:
    census = Census()
    for size_bytes in (1, None, 1):
        census.add("ab" * 16, size_bytes)
    (found,) = census.survey(lambda digest: {}).namespaces
    assert (found.stored.blocks, found.stored.size_bytes) == (3, None)


@pytest.mark.parametrize("block_bytes", [4096, None])
def test_a_record_is_checked_without_its_key(block_bytes: int | None) -> None:
    (key, other) = make_keys(2)
    header, payload = encode_record(key, memoryview(bytes(4096)), DIGEST)
    record = memoryview(bytearray(header + payload))
    check = RecordCheck(DIGEST, PLAIN, block_bytes)
    assert check.check(record) is RecordStatus.OK
    assert check.check(record, digest_of(key)) is RecordStatus.OK
    assert check.check(record, digest_of(other)) is RecordStatus.WRONG_KEY
    assert RecordCheck(bytes(16), PLAIN, block_bytes).check(record) is RecordStatus.WRONG_NAMESPACE
    assert check.check(record[:-1]) is RecordStatus.TRUNCATED
    record[2000] ^= 1
    assert check.check(record) is RecordStatus.BAD_CHECKSUM
    assert check.room(1 << 40) is None


@pytest.mark.parametrize("size", [0, -1, True, 1e99, "4096", None, 1 << 60])
def test_an_impossible_size_of_blocks_is_none(size: object) -> None:
    assert block_bytes_in({"block": {"bytes": size}}) is None
    assert block_bytes_in({"block": size}) is None


def test_only_damaged_blocks_are_to_be_deleted_and_only_if_wished() -> None:
    for repairs in (False, True):
        found = Verification(block_bytes=4096, repairs=repairs)
        assert [found.note(status, 10) for status in (RecordStatus.OK, RecordStatus.UNKNOWN_KEY, "io_error")] == [
            False
        ] * 3
        assert found.note(RecordStatus.BAD_CHECKSUM, 10) is repairs
        assert (found.blocks, found.size_bytes, found.damaged) == (4, 40, {"checksum": 1})
        assert found.unreadable == {"unknown_key": 1, "io_error": 1}
