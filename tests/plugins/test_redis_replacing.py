"""How much of a quota in Redis is replaced between two surveys."""

from __future__ import annotations

import pytest

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.replacing import REPLACED_SHARE, Replacing

RECORD_BYTES = 1000
RECORDS = 10
QUOTA_BYTES = round(RECORDS * RECORD_BYTES / REPLACED_SHARE)


def test_no_more_than_the_share_is_replaced_until_somebody_has_surveyed() -> None:
    replacing = Replacing(QUOTA_BYTES, RECORD_BYTES)
    assert replacing.take(RECORDS - 1) == RECORDS - 1
    assert not replacing.is_short
    assert replacing.take(4) == 1
    assert replacing.is_short, "a survey is wanted"
    assert replacing.take(4) == 0
    replacing.note_survey(1)
    assert not replacing.is_short
    assert replacing.take(2 * RECORDS) == RECORDS


def test_what_was_not_replaced_is_free_again() -> None:
    replacing = Replacing(QUOTA_BYTES, RECORD_BYTES)
    assert replacing.take(RECORDS) == RECORDS
    replacing.give_back(3)
    assert replacing.take(RECORDS) == 3
    replacing.note_survey(1)
    replacing.give_back(3)  # taken before the survey
    assert replacing.take(2 * RECORDS) == RECORDS


@pytest.mark.parametrize(("owners", "records"), [(0, RECORDS), (1, RECORDS), (2, RECORDS // 2), (50, 1)])
def test_processes_share_it_and_each_may_replace_one_record(owners: int, records: int) -> None:
    replacing = Replacing(QUOTA_BYTES, RECORD_BYTES)
    replacing.note_survey(owners)
    assert replacing.take(2 * RECORDS) == records
