"""Sound records that one process of a shared storage cannot read: a miss for it, kept for the others, and replaced.

A writer and a stranger share a storage. The stranger has not got the key that the writer encrypts with, or not the
library of its codec. What the stranger stores the writer can read, as in the middle of a change of keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support.disk_use import occupied_bytes
from tiered_kv.base import OffloadKey
from tiered_kv.counters import count_of
from tiered_kv.testing.clock import ManualClock
from tiered_kv.testing.redis_servers import PATIENT, fake_redis_url, redis_server
from tiered_kv.testing.rig import TierRig, compressible_content, make_keys
from tiered_kv.testing.s3_servers import S3Server, missing_for_moto, moto_server
from tiered_kv.testing.waiting import wait_until
from tiered_kv.tiering.base import TierSpec
from tiered_kv.tiering.factory import SecondaryTierFactory
from tiered_kv.toolkit.unreadable import LIFETIME_S, Unreadable

__all__ = ["fake_redis_url", "moto_server", "redis_server"]

BLOCK_BYTES = 4096
SPEC = TierSpec("unreadable", BLOCK_BYTES, bytes(range(16)), {"model": "unreadable"})
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


CAUSES = {
    "unknown_key": Cause(
        {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1, 2: KEY_2}, "write_key": 1}},
        {"codec": "aes-256-gcm", "encryption": {"keys": {2: KEY_2}}},
    ),
    "unknown_codec": Cause(
        {"codec": "zstd+aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
        {"codec": "aes-256-gcm", "encryption": {"keys": {1: KEY_1}}},
        lacks_zstandard=True,
    ),
}
TIERS = ["fs", "redis", pytest.param("s3", marks=pytest.mark.slow)]


@dataclass
class Storage:
    """A storage that tiers of one kind share.

    Args:
        entry: A tier's entry, without codec and keys.
        open_rig: Opens one on a rig of its own; it is closed at the end of the test.
    """

    kind: str
    entry: dict[str, object]
    rigs: list[TierRig]

    def open(self, settings: Mapping[str, object], *, block_bytes: int = BLOCK_BYTES) -> TierRig:
        entry = {"type": self.kind, **self.entry, **settings}
        rig = TierRig(
            lambda spec, view: SecondaryTierFactory.create(spec, view, entry),
            num_blocks=256,
            block_bytes=block_bytes,
            wait_s=60.0,
            spec=TierSpec(SPEC.name, block_bytes, SPEC.namespace_digest, SPEC.namespace),
            content=compressible_content,
        )
        self.rigs.append(rig)
        return rig

    def open_pair(self, cause: Cause) -> tuple[TierRig, TierRig]:
        """Return the writer and the stranger."""
        return self.open(cause.writer), self.open(cause.stranger)


@pytest.fixture(scope="module", autouse=True)
def _moto_first(request: pytest.FixtureRequest) -> None:
    """Start what lasts for the session before a test that needs it, which would be taken for what that left behind."""
    needs_moto = any(item.path == request.path and "[s3" in item.name for item in request.session.items)
    if needs_moto and not missing_for_moto():
        request.getfixturevalue("moto_server")


@pytest.fixture
def storage(tier: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Storage]:
    entry: dict[str, object] = {"path": str(tmp_path / "kv"), "capacity": "64MiB"}
    if tier == "redis":
        pytest.importorskip("redis", reason="redis-py is not installed")
        entry = {**PATIENT, "url": request.getfixturevalue("fake_redis_url")}
    elif tier == "s3":
        pytest.importorskip("boto3", reason="boto3 is not installed")
        moto: S3Server = request.getfixturevalue("moto_server")
        # Every lookup asks the bucket: what hides a record is not an answer that is remembered.
        entry = moto.settings(moto.make_bucket(), prefix="kv", presence_ttl=0)
    storage = Storage(tier, {**entry, "lookup_timeout": "60s"}, [])
    yield storage
    for rig in storage.rigs:
        rig.close()


def counted(rig: TierRig, cause: str) -> int:
    if rig.tier.tier_type == "redis":
        return count_of(rig.tier.stats(), "failed_blocks_total", "load", cause)
    return count_of(rig.tier.stats(), "unreadable_blocks_total", cause)


def failed(rig: TierRig, keys: list[OffloadKey]) -> str:
    """Return why a load failed, of which nothing came."""
    (result,) = rig.wait([rig.submit_load(keys)])
    assert rig.succeeded(result) == set()
    return result.reason


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("tier", TIERS)
def test_what_only_others_can_read_is_a_counted_miss_that_stays_for_them_until_it_is_stored_again(
    storage: Storage, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, stranger = storage.open_pair(CAUSES[cause])
    if CAUSES[cause].lacks_zstandard:  # the writer has loaded it
        monkeypatch.setitem(sys.modules, "zstandard", None)
    keys, readable = make_keys(4), make_keys(2, "readable")
    assert writer.store(keys).success
    assert stranger.store(readable).success
    assert stranger.lookup_all(keys) == [True] * 4, "nobody has tried to read them"

    assert stranger.load([*keys, *readable]) == set(readable)
    assert counted(stranger, cause) == 4
    assert count_of(stranger.tier.stats(), "corrupt_blocks_total") == 0
    assert failed(stranger, keys[:1]) == cause
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


@pytest.mark.parametrize("tier", TIERS)
def test_blocks_that_cannot_be_read_are_stored_among_new_ones_and_ones_that_can(storage: Storage) -> None:
    writer, stranger = storage.open_pair(CAUSES["unknown_key"])
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


@pytest.mark.parametrize("tier", TIERS)
def test_what_another_process_has_replaced_is_found_after_the_lifetime_at_the_latest(
    storage: Storage, tier: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tier" if tier == "s3" else "blocks"
    monkeypatch.setattr(f"tiered_kv_{tier}.{module}.Unreadable", functools.partial(Unreadable, clock=clock))
    writer, stranger = storage.open_pair(CAUSES["unknown_key"])
    keys = make_keys(2)
    assert writer.store(keys).success
    assert failed(stranger, keys) == "unknown_key"
    other = storage.open(CAUSES["unknown_key"].stranger)
    assert failed(other, keys) == "unknown_key"
    assert other.store(keys).success
    assert stranger.lookup_all(keys) == [False] * 2
    clock.advance(LIFETIME_S)
    assert stranger.lookup_all(keys) == [True] * 2
    assert stranger.load(keys) == set(keys)


@pytest.mark.parametrize("tier", TIERS)
def test_a_block_that_could_not_be_read_before_a_reset_is_stored_after_it_like_any_other(storage: Storage) -> None:
    writer, stranger = storage.open_pair(CAUSES["unknown_key"])
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
@pytest.mark.parametrize("tier", ["s3"])
def test_an_answer_that_s3_remembers_neither_offers_a_block_nor_keeps_it_from_being_replaced(storage: Storage) -> None:
    storage.entry["presence_ttl"] = "1h"
    writer, stranger = storage.open_pair(CAUSES["unknown_key"])
    keys = make_keys(3)
    assert writer.store(keys).success
    assert stranger.lookup_all(keys) == [True] * 3
    assert failed(stranger, keys) == "unknown_key"
    assert stranger.lookup_all(keys) == [False] * 3
    stranger.epoch = writer.epoch = 1
    assert stranger.store(keys).success
    assert stranger.lookup_all(keys) == [True] * 3
    assert stranger.load(keys) == writer.load(keys) == set(keys)
    stranger.epoch = 2
    assert stranger.store(keys).success
    stranger.epoch = 1
    assert stranger.load(keys) == set(keys), "what can be read is not replaced"


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["fs"])
def test_a_capacity_holds_while_processes_replace_each_other_s_blocks(storage: Storage, tmp_path: Path) -> None:
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
