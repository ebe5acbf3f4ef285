"""A sweep restores age and capacity, oldest first, whoever sweeps at the same time; and blocks in use are renewed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from tiered_kv.counters import Counters
from tiered_kv.errors import TierError, TierUnavailableError
from tiered_kv.testing.rig import make_keys
from tiered_kv.testing.waiting import wait_until
from tiered_kv_s3 import sweeper as sweeper_module
from tiered_kv_s3.bucket import Bucket
from tiered_kv_s3.control import Control, Listed
from tiered_kv_s3.counters import COUNTERS, COUNTERS_BY_LABEL
from tiered_kv_s3.naming import Naming
from tiered_kv_s3.presence import Presence
from tiered_kv_s3.settings import S3Settings
from tiered_kv_s3.sweeper import Sweeper
from tiered_kv_s3.verdict import Verdict

NAMING = Naming("kv", bytes(16))
EPOCH = "0123456789abcdef"
NAMES = [NAMING.block(EPOCH, key) for key in make_keys(20)]
RECORD_BYTES = 10


class SharedBucket:
    """What a sweep asks of a bucket: block 0 is the oldest. What others do meanwhile happens at every request."""

    def __init__(self, count: int) -> None:
        self.written_s = {NAMES[age]: 100.0 + age for age in range(count)}
        self.now_s = 200.0
        self.refusals: set[str] = set()
        self.renewed: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    @property
    def used_bytes(self) -> int:
        return RECORD_BYTES * len(self.written_s)

    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        names = sorted(self.written_s)
        for start in range(0, len(names), 3):
            there = [name for name in names[start : start + 3] if name in self.written_s]
            yield [Listed(self.now_s - self.written_s[name], name, RECORD_BYTES) for name in there]
            self.meanwhile()

    def delete(self, objects: Sequence[Mapping[str, str]]) -> set[str]:
        self.meanwhile()
        if self.refusals:
            return self.refusals
        for each in objects:
            self.written_s.pop(each["Key"], None)
        return set()

    def renew(self, name: str) -> None:
        if name not in self.written_s:
            raise TierUnavailableError("NoSuchKey")
        self.renewed.append(name)
        self.written_s[name] = self.now_s


def sweeper_of(
    bucket: SharedBucket, capacity_bytes: int | None = None, ttl_s: float | None = None, interval_s: float = 3600.0
) -> tuple[Sweeper, Presence, Counters]:
    counters = Counters(COUNTERS, COUNTERS_BY_LABEL)
    control = cast(Control, bucket)
    limits = {"capacity": capacity_bytes, "ttl": ttl_s, "sweep_interval": interval_s, "presence_ttl": 60}
    settings = S3Settings.model_validate({"bucket": "bucket", **limits})
    presence = Presence(cast(Bucket, None), control, counters, NAMING, settings)
    sweeper = Sweeper(control, NAMING, presence, counters, settings, "sweeper")
    return sweeper, presence, counters


@contextmanager
def running(sweeper: Sweeper) -> Iterator[None]:
    """Have a sweeper's threads end in the end."""
    yield
    sweeper.stop()
    sweeper.join(60.0)


def test_one_sweep_restores_the_capacity_oldest_first() -> None:
    bucket = SharedBucket(20)
    sweeper, presence, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    sweeper.sweep()
    assert sorted(bucket.written_s) == sorted(NAMES[12:])
    assert counters["deleted_blocks_total"] == 12
    assert sweeper.used_bytes == 8 * RECORD_BYTES
    assert presence.known(NAMES[0]) is Verdict.ABSENT
    assert presence.known(NAMES[12]) is None


def test_one_sweep_restores_the_capacity_where_more_has_to_go_than_it_can_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeper_module, "CANDIDATES_MAX", 5)
    bucket = SharedBucket(20)
    sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0].sweep()
    assert sorted(bucket.written_s) == sorted(NAMES[12:])


def test_blocks_past_their_time_go_whatever_room_there_is_and_foreign_objects_stay() -> None:
    bucket = SharedBucket(20)
    foreign = f"{NAMING.blocks}notes.txt"
    bucket.written_s[foreign] = 0.0
    sweeper_of(bucket, ttl_s=90.0, capacity_bytes=10 * RECORD_BYTES)[0].sweep()
    assert sorted(bucket.written_s) == sorted([*NAMES[10:], foreign])


def test_processes_that_sweep_at_the_same_time_delete_no_more_than_one_would() -> None:
    bucket = SharedBucket(20)
    first, second = (sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0] for _ in range(2))

    def sweep_too() -> None:
        bucket.meanwhile = lambda: None
        second.sweep()

    bucket.meanwhile = sweep_too
    first.sweep()
    assert sorted(bucket.written_s) == sorted(NAMES[12:])


def test_what_is_stored_between_two_sweeps_can_exceed_the_capacity_and_is_counted() -> None:
    sweeper, _, _ = sweeper_of(SharedBucket(8), capacity_bytes=8 * RECORD_BYTES)
    with running(sweeper):
        sweeper.sweep()
        sweeper.note_stored(RECORD_BYTES)
        assert sweeper.used_bytes == 9 * RECORD_BYTES


def test_the_thread_sweeps_again_and_again_and_lives_through_failures() -> None:
    bucket = SharedBucket(20)
    bucket.refusals = {"AccessDenied"}
    sweeper, _, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES, interval_s=0.01)
    with pytest.raises(TierError, match="AccessDenied"):
        sweeper.sweep()
    with running(sweeper):
        sweeper.note_stored(RECORD_BYTES)
        wait_until(lambda: counters["failed_sweeps_total"] >= 2, what="failures")
        bucket.refusals = set()
        wait_until(lambda: bucket.used_bytes == 8 * RECORD_BYTES, what="a sweep")


def test_a_block_that_is_used_late_is_renewed_and_survives_the_sweep() -> None:
    bucket = SharedBucket(20)
    sweeper, _, counters = sweeper_of(bucket, ttl_s=90.0)
    with running(sweeper):
        sweeper.renew(NAMES[0])
        wait_until(lambda: bucket.renewed == [NAMES[0]], what="its renewal")
        bucket.written_s.pop(NAMES[1])
        sweeper.renew(NAMES[1])
        wait_until(lambda: counters["failed_renewals_total"] == 1, what="the failure of what is gone")
        sweeper.renew(NAMES[2])
        wait_until(lambda: len(bucket.renewed) == 2, what="another renewal after it")
    sweeper_of(bucket, ttl_s=90.0)[0].sweep()
    assert sorted(bucket.written_s) == sorted([NAMES[0], NAMES[2], *NAMES[10:]])


def test_renewals_without_end_put_no_sweep_off() -> None:
    bucket = SharedBucket(20)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES, interval_s=0.01)
    bucket.renew = sweeper.renew  # type: ignore[method-assign]  # every block is used again at once
    with running(sweeper):
        sweeper.renew(NAMES[19])
        sweeper.note_stored(RECORD_BYTES)
        wait_until(lambda: bucket.used_bytes == 8 * RECORD_BYTES, what="a sweep")
