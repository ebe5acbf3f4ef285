"""A reset of a bucket stays done, whatever becomes of the mark that the bucket keeps of it."""

from __future__ import annotations

import pytest

from tests.support.fake_s3 import FakeS3, OpenRig, open_rig, server
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.toolkit import epoch

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]

KEYS = make_keys(4)


def store_and_reset(server: FakeS3, rig: TierRig) -> tuple[str, bytes]:
    """Return the mark's name, and what it was before the reset."""
    server.has_mark = False  # of the server's own
    assert rig.store(KEYS).success
    (name,) = (target for target in server.objects if target.endswith("/epoch"))
    old = server.objects[name]
    rig.tier.reset_cache()
    assert rig.store(make_keys(1, "new")).success
    assert server.objects[name] != old
    return name, old


def test_after_a_reset_others_keep_their_epoch_and_newcomers_take_the_new_one(
    server: FakeS3, open_rig: OpenRig
) -> None:
    first, second = open_rig(), open_rig()
    server.has_mark = False
    first.store(KEYS)
    assert second.load(KEYS) == set(KEYS)
    store_and_reset(server, first)
    assert first.load(KEYS) == set()
    assert second.load(KEYS) == set(KEYS), "nobody reset it"
    third = open_rig()
    assert third.load(KEYS) == set()
    assert third.load(make_keys(1, "new")) == set(make_keys(1, "new"))


def test_a_bucket_whose_mark_was_deleted_brings_no_block_back(server: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig()
    name, _ = store_and_reset(server, rig)
    rig.close()
    del server.objects[name]
    newcomer = open_rig()
    assert newcomer.load(KEYS) == set()
    assert not any(newcomer.lookup_all(KEYS))
    assert newcomer.store(KEYS).success
    assert newcomer.load(KEYS) == set(KEYS)


def test_a_process_never_joins_an_epoch_again_that_it_has_seen_retired(server: FakeS3, open_rig: OpenRig) -> None:
    rig = open_rig()
    name, old = store_and_reset(server, rig)
    rig.close()
    server.objects[name] = old  # as when a bucket is restored
    assert open_rig().load(KEYS) == set()
    assert server.objects[name] != old


def test_a_bucket_that_fell_back_is_repaired_while_a_process_runs(
    server: FakeS3, open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "CHECK_PAUSE_S", 0.0)
    rig = open_rig()
    name, old = store_and_reset(server, rig)
    new, server.objects[name] = server.objects[name], old
    rig.load(make_keys(1))
    assert server.objects[name] == new
