"""A bucket that does not answer is asked in the background: only its first lookup waits."""

from __future__ import annotations

import pytest

from tests.support.fake_s3 import FakeS3, OpenRig, Then, error, open_rig, server
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys

pytest.importorskip("boto3", reason="boto3 is not installed")

__all__ = ["open_rig", "server"]


@pytest.mark.parametrize("has_read_mark", [True, False], ids=["in use", "since the opening"])
def test_lookups_ask_a_silent_bucket_once_and_find_its_blocks_when_it_answers(
    server: FakeS3, open_rig: OpenRig, has_read_mark: bool
) -> None:
    first = open_rig()
    keys = make_keys(8)
    assert first.store(keys).success
    rig = first if has_read_mark else open_rig()
    server.reply = lambda request: Then(b"", "close")
    assert not any(rig.lookup(key) for key in keys[:3])
    asked = len(server.seen)
    failures = rig.tier.lookup_failures
    for key in keys[3:]:
        assert not rig.lookup(key)
    of_blocks = {request.target for request in server.seen[asked:]}
    assert len(of_blocks) <= 1, "only the probe asks"
    assert rig.tier.lookup_failures == failures + 5, "the breaker hears of each"
    server.reply = lambda request: None
    wait_until(lambda: all(rig.lookup(key) for key in keys))


@pytest.mark.parametrize("reply", [error(403, "AccessDenied"), error(503, "SlowDown")], ids=["denied", "slow down"])
def test_a_bucket_that_refuses_is_not_silent(server: FakeS3, open_rig: OpenRig, reply: bytes) -> None:
    rig = open_rig()
    keys = make_keys(2)
    assert rig.store(keys).success
    server.reply = lambda request: reply if request.method == "HEAD" else None
    assert not rig.lookup(keys[0])
    asked = server.count("HEAD")
    assert not rig.lookup(keys[1])
    assert server.count("HEAD") > asked
