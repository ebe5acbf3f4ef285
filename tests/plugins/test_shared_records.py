"""Records on a shared storage that one process cannot read or cannot delete: a miss for it, and replaced all the same.

A writer and a stranger share a storage. The stranger has not got the key that the writer encrypts with, or not the
library of its codec. What the stranger stores the writer can read, as in the middle of a change of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.disk_use import occupied_bytes
from tests.support.redis_servers import redis_server
from tests.support.shared_storage import SharedStorage, storage
from tests.support.stacks import ReplaceModule
from tiered_kv.base import OffloadKey
from tiered_kv.metrics.instruments import count_of
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import TierRig, make_keys

__all__ = ["redis_server", "storage"]

KEY_1, KEY_2 = "11" * 32, "22" * 32


@dataclass(frozen=True)
class Cause:
    """Why the stranger cannot read what the writer has stored.

    Args:
        writer, stranger: Codec and keys of each.
        lacks_zstandard: Whether the stranger's installation lacks the library.
    """

    writer: Mapping[str, object]
    stranger: Mapping[str, object]
    lacks_zstandard: bool = False

    def open_pair(self, storage: SharedStorage) -> tuple[TierRig, TierRig]:
        """Return the writer and the stranger."""
        return storage.open(self.writer), storage.open(self.stranger)

    def begin(self, replace_module: ReplaceModule) -> None:
        """Take from the stranger what it lacks; the writer has stored, and so has loaded its library."""
        if self.lacks_zstandard:
            replace_module("zstandard")


UNKNOWN_KEY = Cause(
    {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1, 2: KEY_2}, "write_key": 1}},
    {"codec": "aes-256-gcm", "encryption": {"keys": {2: KEY_2}}},
)
UNKNOWN_CODEC = Cause(
    {"codec": "zstd+aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
    {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
    lacks_zstandard=True,
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
    storage: SharedStorage, why: str, cause: Cause, replace_module: ReplaceModule
) -> None:
    writer, stranger = cause.open_pair(storage)
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
    if storage.kind == "s3":  # which asks the bucket of nothing before it stores, where no answer is remembered
        return
    stranger.epoch = 2
    assert stranger.store(keys).success
    stranger.epoch = 1
    assert stranger.load(keys) == set(keys), "what can be read is not replaced"


def test_blocks_that_cannot_be_read_are_stored_among_new_ones_and_ones_that_can(storage: SharedStorage) -> None:
    writer, stranger = UNKNOWN_KEY.open_pair(storage)
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
    storage: SharedStorage,
) -> None:
    writer, stranger = UNKNOWN_KEY.open_pair(storage)
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
@pytest.mark.parametrize("storage", ["fs"], indirect=True)
def test_a_capacity_holds_while_processes_replace_each_other_s_blocks(storage: SharedStorage, tmp_path: Path) -> None:
    limit_bytes, block_bytes = 8 << 20, 65_536
    settings = [{"codec": "aes-256-gcm", "encryption": {"keys": {number: KEY_1}}} for number in (1, 2)]
    rigs = [storage.open({**each, "capacity": limit_bytes}, block_bytes=block_bytes) for each in settings]
    keys = make_keys(16)

    def replace(rig: TierRig) -> bool:
        is_stored = rig.store(keys).success
        assert occupied_bytes(tmp_path / "kv") <= limit_bytes
        return is_stored

    for _ in range(20):
        for rig in rigs:
            rig.load(keys)  # what the other has stored is noted
            wait_until(partial(replace, rig), 60.0, what="room again")
    assert sum(counted(rig, "unknown_key") for rig in rigs) * block_bytes > limit_bytes, "nothing was replaced"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "checksum": lambda stored: stored[:500] + bytes([stored[500] ^ 1]) + stored[501:],
    "truncated": lambda stored: stored[:-1],
    "bad_length": lambda stored: stored + bytes(1 << 20),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_block_is_a_counted_miss_and_deleted_and_costs_no_other_of_its_job(
    storage: SharedStorage, reason: str
) -> None:
    rig, door = storage.open({"codec": "raw"}), storage.door
    keys = make_keys(8)
    assert rig.store(keys).success
    victim = keys[3]
    door.write(victim, DAMAGES[reason](door.read(victim) or b""))
    assert rig.load(keys) == {*keys} - {victim}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    assert door.read(victim) is None
    assert rig.lookup_all(keys) == [key != victim for key in keys]
    assert rig.store(keys).success
    assert rig.load(keys) == set(keys)


def test_a_damaged_block_that_may_not_be_deleted_is_offered_no_more_and_replaced(storage: SharedStorage) -> None:
    rig, door = storage.open({"codec": "raw"}), storage.door
    (key,) = make_keys(1, "undeletable")
    rig.store([key])
    stored = door.read(key)
    assert stored is not None
    damaged = stored[:500] + bytes([stored[500] ^ 1]) + stored[501:]
    door.write(key, damaged)
    storage.refuse_deletions()
    assert rig.lookup_all([key]) == [True]  # nobody has looked into it yet
    assert not rig.load([key])
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
    assert door.read(key) == damaged, "it was deleted, and this test is about nothing"
    assert rig.lookup_all([key]) == [False]
    assert rig.store([key]).success
    assert door.read(key) != damaged
    assert rig.lookup_all([key]) == [True]
    assert rig.load([key]) == {key}
    assert count_of(rig.tier.stats(), "corrupt_blocks_total") == 1
