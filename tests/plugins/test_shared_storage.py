"""Storage that processes share: records that one cannot read or delete, and resets.

A writer and a stranger share a storage. The stranger has not got the key that the writer encrypts with, or not the
library of its codec. What the stranger stores the writer can read, as in the middle of a change of keys. A reset of one
process stays done, whatever becomes of the mark that the storage keeps of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.disk_use import occupied_bytes
from tests.support.places import SPEC, Place, PlaceOf
from tests.support.stacks import ReplaceModule
from tests.support.zstd import MODULES
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.counters import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, compressible_content, make_keys
from tiered_kv.toolkit.epoch import EpochMark, _retired

KEY_1, KEY_2 = "11" * 32, "22" * 32
OLD, NEW, LATE = make_keys(4, "old"), make_keys(4, "new"), make_keys(4, "late")


@pytest.fixture(params=["fs", "redis", "s3-small", "s3-remembers"])
def place(request: pytest.FixtureRequest, place_of: PlaceOf) -> Place:
    """A storage of each kind; a test may name one by `parametrize(..., indirect=True)`."""
    return place_of(request.param)


def opened(place: Place, settings: Mapping[str, object] | None = None, block_bytes: int = 4096) -> TierRig:
    spec = replace(SPEC, block_bytes=block_bytes)
    return place.open(spec, compressible_content, num_blocks=64, **(settings or {}))


@dataclass(frozen=True)
class Cause:
    """Why the stranger cannot read what the writer has stored.

    Args:
        writer, stranger: Codec and keys of each.
        lacks_zstd: Whether the stranger's installation lacks the library of `zstd`.
    """

    writer: Mapping[str, object]
    stranger: Mapping[str, object]
    lacks_zstd: bool = False

    def open_pair(self, place: Place) -> tuple[TierRig, TierRig]:
        """Return the writer and the stranger."""
        return opened(place, self.writer), opened(place, self.stranger)

    def begin(self, replace_module: ReplaceModule) -> None:
        """Take from the stranger what it lacks; the writer has stored, and so has loaded its library."""
        if self.lacks_zstd:
            for each in MODULES:
                replace_module(each)


UNKNOWN_KEY = Cause(
    {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1, 2: KEY_2}, "write_key": 1}},
    {"codec": "aes-256-gcm", "encryption": {"keys": {2: KEY_2}}},
)
UNKNOWN_CODEC = Cause(
    {"codec": "zstd+aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
    {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
    lacks_zstd=True,
)


def counted(rig: TierRig, cause: str) -> int:
    if rig.tier.tier_type == "redis":
        return count_of(rig.tier.stats(), "failed_blocks_total", "load", cause)
    return count_of(rig.tier.stats(), "unreadable_blocks_total", cause)


def failed(rig: TierRig, keys: list[OffloadKey]) -> str:
    """Return why a load failed, of which nothing came."""
    (result,) = rig.wait([rig.submit_load(keys)])
    assert rig.succeeded(result) == set()
    return result.reason


@pytest.mark.parametrize(("why", "cause"), [("unknown_key", UNKNOWN_KEY), ("unknown_codec", UNKNOWN_CODEC)])
def test_what_only_others_can_read_is_a_counted_miss_that_stays_for_them_until_it_is_stored_again(
    place: Place, why: str, cause: Cause, replace_module: ReplaceModule
) -> None:
    writer, stranger = cause.open_pair(place)
    keys, readable = make_keys(4), make_keys(2, "readable")
    assert writer.store(keys).success
    cause.begin(replace_module)
    assert stranger.store(readable).success
    assert stranger.lookup_all(keys) == [True] * 4, "nobody has tried to read them"

    assert stranger.load([*keys, *readable]) == set(readable)
    assert counted(stranger, why) == 4
    assert count_of(stranger.tier.stats(), "corrupt_blocks_total") == 0
    assert failed(stranger, keys[:1]) == why
    assert stranger.lookup_all([*keys, *readable]) == [False] * 4 + [True] * 2
    assert [stranger.lookup(key) for key in keys] == [False] * 4, "and not for any other request"

    assert writer.lookup_all(keys) == [True] * 4
    assert writer.load(keys) == set(keys), "it has been left to those who can read it"

    stranger.epoch = 1  # other content, so that it is seen whose is there
    assert stranger.store(keys).success
    assert stranger.lookup_all(keys) == [True] * 4
    assert stranger.load(keys) == set(keys)
    writer.epoch = 1
    assert writer.load(keys) == set(keys), "both can read what replaces it"
    if place.kind == "s3-small":  # which asks the bucket of nothing before it stores, where no answer is remembered
        return
    stranger.epoch = 2
    assert stranger.store(keys).success
    stranger.epoch = 1
    assert stranger.load(keys) == set(keys), "what can be read is not replaced"


def test_blocks_that_cannot_be_read_are_stored_among_new_ones_and_ones_that_can(place: Place) -> None:
    writer, stranger = UNKNOWN_KEY.open_pair(place)
    foreign, readable, new = make_keys(3, "foreign"), make_keys(3, "readable"), make_keys(3, "new")
    assert writer.store(foreign).success
    assert stranger.store(readable).success
    assert failed(stranger, foreign) == "unknown_key"
    mixed = [key for keys in zip(foreign, readable, new, strict=True) for key in keys]
    assert stranger.store(mixed).success
    assert stranger.load(mixed) == set(mixed)
    assert writer.load(mixed) == set(mixed)
    again = make_keys(6, "again")  # most of what is offered is there, which the redis tier then asks first
    assert writer.store(again).success
    assert failed(stranger, again[:2]) == "unknown_key"
    assert stranger.store([*mixed, *again[:2]]).success
    assert stranger.load([*mixed, *again[:2]]) == {*mixed, *again[:2]}
    assert failed(stranger, again[2:]) == "unknown_key", "those that nobody had tried to read were left"


def test_a_block_that_could_not_be_read_before_a_reset_is_stored_after_it_like_any_other(
    place: Place,
) -> None:
    writer, stranger = UNKNOWN_KEY.open_pair(place)
    keys = make_keys(2)
    assert writer.store(keys).success
    assert failed(stranger, keys) == "unknown_key"
    assert stranger.tier.reset_cache()
    stranger.epoch = 1
    assert stranger.store(keys).success
    assert stranger.lookup_all(keys) == [True] * 2
    assert stranger.load(keys) == set(keys)
    assert writer.load(keys) == set(keys), "nobody else was reset"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["fs"], indirect=True)
def test_a_capacity_holds_while_processes_replace_each_other_s_blocks(place: Place, tmp_path: Path) -> None:
    limit_bytes, block_bytes = 8 << 20, 65_536
    settings = [{"codec": "aes-256-gcm", "encryption": {"keys": {number: KEY_1}}} for number in (1, 2)]
    rigs = [opened(place, {**each, "capacity": limit_bytes}, block_bytes) for each in settings]
    keys = make_keys(16)

    def store_again(rig: TierRig) -> bool:
        is_stored = rig.store(keys).success
        assert occupied_bytes(tmp_path / "kv") <= limit_bytes
        return is_stored

    for _ in range(20):
        for rig in rigs:
            rig.load(keys)  # what the other has stored is noted
            wait_until(partial(store_again, rig), 60.0, what="room again")
    assert sum(counted(rig, "unknown_key") for rig in rigs) * block_bytes > limit_bytes, "nothing was replaced"


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_damaged_block_is_deleted_and_one_that_may_not_be_is_offered_no_more_and_replaced(
    place: Place, is_deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/trust/test_corruption.py` tries every damage."""
    rig = opened(place, {"codec": "raw"})
    door = place.door(rig)
    (key,) = make_keys(1)
    rig.store([key])
    stored = door.read(key)
    assert stored is not None
    damaged = stored[:500] + bytes([stored[500] ^ 1]) + stored[501:]
    door.write(key, damaged)
    if not is_deleted:
        place.refuse_deletions(monkeypatch)
    assert rig.lookup_all([key]) == [True]  # nobody has looked into it yet
    assert not rig.load([key])
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    assert door.read(key) == (None if is_deleted else damaged)
    assert rig.lookup_all([key]) == [False]
    assert rig.store([key]).success
    assert door.read(key) == stored
    assert rig.lookup_all([key]) == [True]
    assert rig.load([key]) == {key}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1


# Resets.

without_presence_cache = pytest.mark.parametrize("place", ["fs", "redis", "s3-small"], indirect=True)


@without_presence_cache
def test_after_a_reset_others_keep_their_epoch_and_newcomers_take_the_new_one(place: Place) -> None:
    resetting, other = opened(place), opened(place)
    assert resetting.store(OLD).success
    assert other.load(OLD) == set(OLD)
    assert resetting.tier.reset_cache()
    assert resetting.store(NEW).success
    assert other.store(LATE).success
    newcomer = opened(place)
    for rig in (resetting, newcomer):
        assert rig.lookup_all([*OLD, *LATE, *NEW]) == [False] * 8 + [True] * 4
        assert rig.load([*OLD, *LATE, *NEW]) == set(NEW)
    assert other.load([*OLD, *LATE, *NEW]) == {*OLD, *LATE}, "nobody reset it"


@without_presence_cache
def test_a_purge_after_a_reset_leaves_no_mark_that_a_process_from_before_it_can_restore(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, resetting = opened(place), opened(place)
    assert before.store(OLD).success
    assert resetting.load(OLD) == set(OLD)
    assert resetting.tier.reset_cache()
    assert resetting.store(NEW).success
    resetting.close()
    with closing(place.administration()) as administration:
        (stored,) = administration.survey(time.monotonic() + 20).namespaces
        assert administration.purge(stored.digest, time.monotonic() + 20).left == ()
        assert administration.survey(time.monotonic() + 20).namespaces == ()
    _retired.clear()  # the process from before the reset has seen no reset
    monkeypatch.setattr("tiered_kv.toolkit.epoch.CHECK_PAUSE_S", 0.0)
    before.store(OLD)
    _retired.clear()  # nor has the newcomer
    assert not any(opened(place).lookup_all(OLD))


@without_presence_cache
def test_a_mark_of_another_release_stays_at_a_purge_and_is_told_and_the_blocks_go(place: Place) -> None:
    rig = opened(place)
    assert rig.store(OLD).success
    door = place.door(rig)
    rig.close()
    door.write_mark(b"tiered-kv epoch 2 another form\n")
    with closing(place.administration()) as administration:
        (stored,) = administration.survey(time.monotonic() + 20).namespaces
        purged = administration.purge(stored.digest, time.monotonic() + 20)
    assert purged.blocks == 4
    assert [text.partition(":")[0] for text in purged.left] == ["the epoch's mark"]
    assert door.read_mark() == b"tiered-kv epoch 2 another form\n"


@pytest.mark.one_quick(3)
@without_presence_cache
@pytest.mark.parametrize("found", [None, b"", b"nonsense", b"x" * 5000])
def test_a_mark_that_is_gone_or_damaged_is_drawn_anew_and_brings_no_block_back(
    place: Place, found: bytes | None
) -> None:
    rig = opened(place)
    door = place.door(rig)
    assert rig.store(OLD).success
    rig.close()
    before = door.read_mark()
    door.write_mark(found)
    newcomer = opened(place)
    assert newcomer.load(OLD) == set()
    assert not any(newcomer.lookup_all(OLD))
    wait_until(lambda: newcomer.store(NEW).success)
    assert newcomer.load(NEW) == set(NEW)
    mark = EpochMark.decode(door.read_mark() or b"")
    assert mark is not None
    assert mark != EpochMark.decode(before or b"")


@without_presence_cache
@pytest.mark.parametrize("falls_back", [False, True], ids=["lost", "older"])
def test_a_mark_that_is_lost_or_older_while_a_process_runs_is_written_again_and_counted(
    place: Place, falls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = opened(place)
    door = place.door(rig)
    assert rig.store(OLD).success
    old = door.read_mark()
    assert rig.tier.reset_cache()
    assert rig.store(NEW).success
    wait_until(lambda: door.read_mark() != old)
    mark = door.read_mark()
    door.write_mark(old if falls_back else None)  # as when a server comes back with an older snapshot
    monkeypatch.setattr("tiered_kv.toolkit.epoch.CHECK_PAUSE_S", 0.0)
    assert rig.load([*OLD, *NEW]) == set(NEW)
    assert door.read_mark() == mark
    assert rig.tier.stats()["epoch_repairs_total"] == 1
    _retired.clear()  # as in a process that has not seen the reset
    assert opened(place).load([*OLD, *NEW]) == set(NEW)
