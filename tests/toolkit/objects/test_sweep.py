"""A sweep restores `ttl` and `capacity`, oldest first, also beside other sweeps; and blocks in use are renewed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from tiered_kv.errors import TierError
from tiered_kv.metrics.counters import Counters
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.toolkit.objects.deletion_age import DeletionAge
from tiered_kv.toolkit.objects.metrics import OBJECT_METRICS
from tiered_kv.toolkit.objects.naming import Naming
from tiered_kv.toolkit.objects.presence import Presence
from tiered_kv.toolkit.objects.settings import ObjectSettings
from tiered_kv.toolkit.objects.store import Listed, ObjectControl, ObjectStore
from tiered_kv.toolkit.objects.sweeper import Sweeper
from tiered_kv.toolkit.objects.verdict import Verdict

NAMING = Naming("kv", bytes(16))
EPOCH = "0123456789abcdef"
NAMES = [NAMING.block(EPOCH, key) for key in make_keys(20)]
RECORD_BYTES = 10


class SharedBucket:
    """The control plane of a bucket in which block 0 is the oldest; `meanwhile` is called at every request."""

    def __init__(self, count: int) -> None:
        self.written_s = {NAMES[age]: 100.0 + age for age in range(count)}
        self.now_s = 200.0
        self.refused: set[str] = set()  # names
        self.renewed: list[str] = []
        self.marks: dict[str, tuple[float, bytes]] = {}  # when written, and what
        self.listings = 0
        self.meanwhile: Callable[[], None] = lambda: None

    @property
    def used_bytes(self) -> int:
        return RECORD_BYTES * len(self.written_s)

    def listed(self, prefix: str) -> Iterator[list[Listed]]:
        self.listings += 1
        names = sorted(self.written_s)
        for start in range(0, len(names), 3):
            existing = [name for name in names[start : start + 3] if name in self.written_s]
            yield [Listed(self.now_s - self.written_s[name], name, RECORD_BYTES) for name in existing]
            self.meanwhile()

    def delete(self, names: Sequence[str]) -> dict[int, str]:
        self.meanwhile()
        for name in names:
            if name not in self.refused:
                self.written_s.pop(name, None)
                self.marks.pop(name, None)
        return {at: "AccessDenied" for at, name in enumerate(names) if name in self.refused}

    def age_s(self, name: str) -> float | None:
        return self.now_s - self.written_s[name] if name in self.written_s else None

    def read(self, name: str, bytes_max: int) -> tuple[float, bytes]:
        written_s, data = self.marks.get(name, (-math.inf, b""))
        return self.now_s - written_s, data

    def write(self, name: str, data: bytes) -> None:
        self.marks[name] = self.now_s, data

    def renew(self, name: str) -> bool:
        if name not in self.written_s:
            return False
        self.renewed.append(name)
        self.written_s[name] = self.now_s
        return True


def sweeper_of(
    bucket: SharedBucket, capacity_bytes: int | None = None, ttl_s: float | None = None, interval_s: float = 3600.0
) -> tuple[Sweeper, Presence, Counters]:
    counters = Counters(OBJECT_METRICS)
    control = cast(ObjectControl, bucket)
    limits = {"capacity": capacity_bytes, "ttl": ttl_s, "sweep_interval": interval_s, "presence_ttl": 60}
    settings = ObjectSettings.model_validate({"type": "objects", **limits})
    presence = Presence(cast(ObjectStore, None), counters, settings.presence_ttl)
    sweeper = Sweeper(control, NAMING, presence, counters, settings, "sweeper")
    return sweeper, presence, counters


@contextmanager
def running(sweeper: Sweeper) -> Iterator[None]:
    """End a sweeper's threads after a `with` statement."""
    yield
    sweeper.stop()
    sweeper.join(60.0)


@pytest.mark.parametrize("candidates_max", [20, 5], ids=["at once", "in several listings"])
def test_one_sweep_restores_the_capacity_oldest_first(monkeypatch: pytest.MonkeyPatch, candidates_max: int) -> None:
    monkeypatch.setattr("tiered_kv.toolkit.objects.sweeper.CANDIDATES_MAX", candidates_max)
    bucket = SharedBucket(20)
    sweeper, presence, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    sweeper.sweep()
    assert sorted(bucket.written_s) == sorted(NAMES[12:])
    assert counters["deleted_blocks_total"] == 12
    assert sweeper.used_bytes == 8 * RECORD_BYTES
    assert presence.known(NAMES[0]) is Verdict.ABSENT
    assert presence.known(NAMES[12]) is None
    with running(sweeper):
        sweeper.note_stored(RECORD_BYTES)
        assert sweeper.used_bytes == 9 * RECORD_BYTES, "between two sweeps the blocks can exceed the capacity"


def test_a_sweep_deletes_blocks_past_their_ttl_and_no_foreign_objects() -> None:
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


def test_the_thread_continues_after_failed_sweeps() -> None:
    bucket = SharedBucket(20)
    bucket.refused = set(NAMES)
    sweeper, _, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES, interval_s=0.01)
    with pytest.raises(TierError, match="AccessDenied"):
        sweeper.sweep()
    with running(sweeper):
        sweeper.note_stored(RECORD_BYTES)
        wait_until(lambda: counters["failed_sweeps_total"] >= 2, what="failures")
        bucket.refused = set()
        wait_until(lambda: bucket.used_bytes == 8 * RECORD_BYTES, what="a sweep")


def test_blocks_that_cannot_be_deleted_cost_no_others_their_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.toolkit.objects.sweeper.DELETED_AT_ONCE", 2)
    monkeypatch.setattr("tiered_kv.toolkit.objects.sweeper.REFUSED_MAX", 3)
    bucket = SharedBucket(20)
    bucket.refused = set(NAMES[:12:2])  # one in each request
    sweeper, presence, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    with pytest.raises(TierError, match="AccessDenied"):
        sweeper.sweep()
    assert sorted(bucket.written_s) == sorted([*NAMES[:12:2], *NAMES[12:]])
    assert (counters["deleted_blocks_total"], sweeper.used_bytes) == (6, bucket.used_bytes)
    assert [presence.known(name) for name in NAMES[:2]] == [None, Verdict.ABSENT]


def test_a_block_that_is_used_late_is_renewed_and_survives_the_sweep() -> None:
    bucket = SharedBucket(20)
    sweeper, _, counters = sweeper_of(bucket, ttl_s=90.0)
    with running(sweeper):
        sweeper.renew(NAMES[0])
        wait_until(lambda: bucket.renewed == [NAMES[0]], what="its renewal")
        bucket.written_s.pop(NAMES[1])
        sweeper.renew(NAMES[1])
        wait_until(lambda: counters["failed_renewals_total"] == 1, what="the failure for a deleted block")
        sweeper.renew(NAMES[2])
        wait_until(lambda: len(bucket.renewed) == 2, what="another renewal after it")
    sweeper_of(bucket, ttl_s=90.0)[0].sweep()
    assert sorted(bucket.written_s) == sorted([NAMES[0], NAMES[2], *NAMES[10:]])


def test_a_sweep_for_the_capacity_spares_what_this_process_uses_and_renews_it() -> None:
    bucket = SharedBucket(20)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    with running(sweeper):
        sweeper.note_load(NAMES[0], 100.0)
        sweeper.note_uses(NAMES[1:3])
        sweeper.sweep()
        assert sorted(bucket.written_s) == sorted([*NAMES[:3], *NAMES[15:]])
        wait_until(lambda: sorted(bucket.renewed) == sorted(NAMES[:3]), what="their renewal")


def test_a_sweep_renews_no_block_that_was_only_stored() -> None:
    bucket = SharedBucket(0)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    with running(sweeper):
        for name in NAMES[:12]:
            bucket.written_s[name] = bucket.now_s - 1.0  # a server gives times in whole seconds
            sweeper.uses.note_stored(name)
            sweeper.note_stored(RECORD_BYTES)
        sweeper.sweep()
        assert not sweeper._renewals
    assert not bucket.renewed


def test_a_used_block_is_spared_also_where_all_are_seconds_old() -> None:
    bucket = SharedBucket(0)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    bucket.written_s.update({name: bucket.now_s - 1.5 + number / 100 for number, name in enumerate(NAMES[:12])})
    with running(sweeper):
        sweeper.note_load(NAMES[0], 1.5)
        sweeper.sweep()
    assert sorted(bucket.written_s) == sorted([NAMES[0], *NAMES[5:12]])


def test_before_a_first_sweep_deletes_anything_the_other_processes_renew_what_they_use() -> None:
    bucket = SharedBucket(12)
    first, second = (sweeper_of(bucket, capacity_bytes=16 * RECORD_BYTES)[0] for _ in range(2))
    with running(first), running(second):
        first.sweep_if_due()
        second.sweep_if_due()
        second.note_load(NAMES[0], bucket.age_s(NAMES[0]) or 0.0)
        wait_until(lambda: bucket.renewed == [NAMES[0]], what="the renewal of the oldest block")
        for name in NAMES[12:]:
            bucket.written_s[name] = bucket.now_s
        first.sweep_if_due()
        assert sorted(bucket.written_s) == sorted([NAMES[0], *NAMES[5:]])


def test_a_sweep_of_a_bucket_that_is_half_empty_lets_others_renew_nothing() -> None:
    bucket = SharedBucket(8)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=16 * RECORD_BYTES)
    sweeper.sweep()
    assert sweeper.deletion_age.renewed_s == math.inf


@pytest.mark.parametrize("use", ["load", "memory"])
def test_a_process_that_only_loads_renews_by_the_sweeps_of_others_and_sweeps_never(use: str) -> None:
    bucket = SharedBucket(20)
    first = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0]
    second, _, _ = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES, interval_s=0.01)
    first.sweep_if_due()
    listings, bucket.meanwhile = bucket.listings, lambda: None
    mark = bucket.marks[NAMING.sweep][1]
    with running(second):

        def is_renewed() -> bool:
            if use == "load":
                second.note_load(NAMES[12], 88.0)
            else:
                second.note_uses([NAMES[12]])
            return bucket.renewed == [NAMES[12]]

        wait_until(is_renewed, what="the renewal of an old block")
    assert (bucket.listings, bucket.marks[NAMING.sweep][1]) == (listings, mark)


def test_if_all_blocks_are_used_the_least_recently_used_are_deleted() -> None:
    bucket = SharedBucket(6)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=4 * RECORD_BYTES)
    with running(sweeper):
        for name in reversed(NAMES[:6]):
            sweeper.note_uses([name])
        sweeper.sweep()
        assert sorted(bucket.written_s) == sorted(NAMES[:4])


def test_one_process_sweeps_for_all_and_the_others_renew_by_what_it_deletes() -> None:
    bucket = SharedBucket(20)
    first, second = (sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0] for _ in range(2))
    with running(first), running(second):
        first.sweep_if_due()
        listings = bucket.listings
        for _ in range(3):
            second.sweep_if_due()
        assert bucket.listings == listings, "it is enough that one lists the bucket"
        assert second.used_bytes == first.used_bytes == 8 * RECORD_BYTES
        assert second.deletion_age.renewed_s == first.deletion_age.renewed_s < 100.0
        second.note_load(NAMES[12], 88.0)
        wait_until(lambda: bucket.renewed == [NAMES[12]], what="the renewal of an old block")
        first.sweep_if_due()
        assert bucket.listings == listings + 1, "the one that sweeps goes on"


def test_a_used_block_that_another_process_has_deleted_is_reported_once_and_until_it_is_stored_again() -> None:
    bucket = SharedBucket(20)
    first = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0]
    second, _, counters = sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)
    with running(first), running(second):
        for name in NAMES[:3]:
            second.uses.note_age(name, 100.0)
        first.sweep_if_due()
        second.sweep_if_due()
        assert second.note_uses(NAMES[:3]) == set()
        wait_until(lambda: counters["failed_renewals_total"] == 3, what="renewals, which find nothing")
        second.uses.note_age(NAMES[2], 0.0)
        assert second.note_uses(NAMES[:3]) == set(NAMES[:2])
        assert second.note_uses(NAMES[:3]) == set()


def test_a_used_block_that_this_process_has_deleted_is_reported() -> None:
    bucket = SharedBucket(6)
    sweeper, _, _ = sweeper_of(bucket, capacity_bytes=4 * RECORD_BYTES)
    with running(sweeper):
        sweeper.note_uses(NAMES[:6])
        sweeper.sweep()
        assert sweeper.note_uses(NAMES[:6]) == set(NAMES[:6]) - set(bucket.written_s)


def test_another_process_takes_over_when_the_one_that_swept_is_gone() -> None:
    bucket = SharedBucket(20)
    first, second = (sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0] for _ in range(2))
    first.sweep_if_due()
    listings, bucket.now_s = bucket.listings, bucket.now_s + 3600.0
    second.sweep_if_due()
    assert bucket.listings == listings + 1


@pytest.mark.parametrize("data", [b"", b"nonsense", b"tiered-kv sweep 2 0123456789abcdef inf 0\n"])
def test_a_process_sweeps_if_it_cannot_read_who_does(data: bytes) -> None:
    bucket = SharedBucket(20)
    bucket.marks[NAMING.sweep] = bucket.now_s, data
    sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0].sweep_if_due()
    assert bucket.used_bytes == 8 * RECORD_BYTES


def test_a_process_that_may_not_delete_leaves_the_sweep_to_others() -> None:
    bucket = SharedBucket(20)
    bucket.refused = set(NAMES)
    first, second = (sweeper_of(bucket, capacity_bytes=8 * RECORD_BYTES)[0] for _ in range(2))
    with pytest.raises(TierError):
        first.sweep_if_due()
    bucket.refused = set()
    second.sweep_if_due()
    assert bucket.used_bytes == 8 * RECORD_BYTES


def test_the_deletion_age_is_that_of_the_youngest_deleted_block_then_grows_slowly_and_ends_in_a_half_empty_bucket() -> (
    None
):
    age = DeletionAge(ttl_s=1000.0, capacity_bytes=100.0)
    age.note_sweep(120, oldest_s=80.0, youngest_deleted_s=60.0)
    assert (age.by_capacity_s, age.renewed_s) == (60.0, 30.0)
    age.note_sweep(75, oldest_s=60.0, youngest_deleted_s=None)
    assert age.by_capacity_s == 80.0, "60 s of stores have filled three quarters"
    age.note_sweep(60, oldest_s=300.0, youngest_deleted_s=None)
    assert age.by_capacity_s == 160.0, "it at most doubles"
    age.note_sweep(60, oldest_s=90.0, youngest_deleted_s=1001.0)
    assert age.by_capacity_s == 150.0, "a block that `ttl` deletes says nothing of the capacity"
    age.note_sweep(10, oldest_s=90.0, youngest_deleted_s=None)
    assert age.by_capacity_s == 300.0
    for _ in range(3):
        age.note_sweep(10, oldest_s=90.0, youngest_deleted_s=None)
    assert age.renewed_s == 500.0, "half of `ttl`"
