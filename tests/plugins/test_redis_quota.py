"""A namespace's quota in Redis: kept by all of its processes together, whatever the server loses or they suffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from tiered_kv.base import OffloadKey
from tiered_kv.errors import ConfigError
from tiered_kv.testing.conformance import TierConformance
from tiered_kv.testing.entries import rig_of
from tiered_kv.testing.quota_writers import BATCH, BLOCK_BYTES, overfill
from tiered_kv.testing.redis_clusters import RedisClusterServers, redis_cluster
from tiered_kv.testing.redis_servers import PATIENT, RedisServer, redis_server
from tiered_kv.testing.rig import OpenTier, TierRig, make_keys
from tiered_kv.testing.waiting import wait_for_each, wait_until

pytest.importorskip("redis", reason="redis-py is not installed")

from tiered_kv_redis.account import Account
from tiered_kv_redis.counters import Counters
from tiered_kv_redis.grants import Grants, QuotaLimits
from tiered_kv_redis.quota import Quota
from tiered_kv_redis.settings import RedisSettings
from tiered_kv_redis.tier import RedisTier
from tiered_kv_redis.topology import topology_of

__all__ = ["redis_cluster", "redis_server"]

RECORD_BYTES = BLOCK_BYTES + 128
QUOTA_BYTES = 8 << 20
OURS, THEIRS = bytes(range(16)), bytes(range(1, 17))
ACCOUNT = f"tkv1:{OURS.hex()}:account"
SURVEY = f"tkv1:{OURS.hex()}:survey"
KEY_BYTES = 20

wait_long_until = partial(wait_until, timeout_s=300.0)
"""For what a survey brings about: after one that a busy machine has held up everybody rests nine times as long."""

# One script sees one moment. It reads lengths without a connection's limit on replies.
USED = """
local total = 0
for _, name in ipairs(redis.call('KEYS', ARGV[1])) do total = total + redis.call('STRLEN', name) end
return total
"""

OpenRig = Callable[..., TierRig]


@pytest.fixture
def open_rig() -> Iterator[OpenRig]:
    """Open tiers in this process."""
    rigs: list[TierRig] = []

    def open_one(namespace: bytes = OURS, **settings: object) -> TierRig:
        entry = {"type": "redis", **PATIENT, **settings}
        rigs.append(rig_of(entry, block_bytes=BLOCK_BYTES, namespace=namespace))
        return rigs[-1]

    yield open_one
    for rig in rigs:
        rig.close()


def fill(rig: TierRig, label: str, size_bytes: int) -> int:
    """Store blocks of so many bytes, each batch of them as soon as there is room; return how many they are."""
    batches = size_bytes // (BATCH * BLOCK_BYTES)

    def store(number: int) -> bool:
        return rig.store(make_keys(BATCH, f"{label}-{number}")).success

    wait_for_each((partial(store, number) for number in range(batches)), what="room again")
    return batches * BATCH


def present(server: RedisServer, keys: Sequence[OffloadKey]) -> list[bool]:
    """Return which blocks are there. A lookup would count as a use of them."""
    names = {name[-KEY_BYTES:] for name in server.keys(f"tkv1:{OURS.hex()}:{'?' * 16}:*")}
    return [key in names for key in keys]


def used_bytes(server: RedisServer, namespace: bytes = OURS) -> int:
    """Return what a namespace's blocks take, at one moment."""
    reply = server.call("EVAL", USED, "0", f"tkv1:{namespace.hex()}:{'[0-9a-f]' * 16}:*")
    assert reply.startswith(b":"), reply
    return int(reply[1:])


@pytest.mark.slow
def test_processes_that_store_four_times_a_quota_never_exceed_it_together(
    redis_server: RedisServer, open_rig: OpenRig
) -> None:
    others = open_rig(THEIRS, url=redis_server.url)  # a tenant without a quota, on the same server
    theirs = fill(others, "theirs", 4 << 20)
    entry = {"type": "redis", **PATIENT, "url": redis_server.url, "quota": QUOTA_BYTES}
    overfilled = overfill(entry, OURS, QUOTA_BYTES, lambda: used_bytes(redis_server))
    assert overfilled.stored_bytes == 4 * QUOTA_BYTES, "there was room again for each of them"
    assert overfilled.most_bytes > QUOTA_BYTES // 2, "they have not filled it"
    assert used_bytes(redis_server, THEIRS) == theirs * RECORD_BYTES, "another's blocks made room"


@pytest.mark.slow
def test_a_quota_holds_over_all_masters_of_a_cluster(redis_cluster: RedisClusterServers, open_rig: OpenRig) -> None:
    redis_cluster.keep_masters()
    masters = [server for server in redis_cluster.servers if b"\r\nmaster\r\n" in server.call("ROLE")]
    assert len(masters) == 3
    rig = open_rig(mode="cluster", nodes=redis_cluster.addresses, quota=QUOTA_BYTES)
    for number in range(8):
        fill(rig, f"part-{number}", QUOTA_BYTES // 2)
        used = [used_bytes(server) for server in masters]
        assert all(used)
        assert sum(used) <= QUOTA_BYTES
    stats = rig.tier.stats()
    assert stats["evicted_blocks"] > 0
    assert stats["quota_bytes"] == QUOTA_BYTES
    assert 0 < stats["account_bytes"] <= QUOTA_BYTES


@pytest.mark.slow
def test_blocks_that_were_used_longest_ago_make_room(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url, quota=QUOTA_BYTES)
    kept, unused = make_keys(BATCH, "kept"), make_keys(10 * BATCH, "unused")

    def store(keys: Sequence[OffloadKey]) -> bool:
        return rig.store(keys).success

    batches = (kept, *(unused[start : start + BATCH] for start in range(0, len(unused), BATCH)))
    wait_for_each((partial(store, batch) for batch in batches), what="room")
    names = redis_server.keys(f"tkv1:{OURS.hex()}:{'?' * 16}:*")
    assert len(names) == len(kept) + len(unused)
    wait_until(lambda: all(int(redis_server.call("OBJECT", "IDLETIME", name)[1:]) >= 2 for name in names))
    assert rig.load(kept) == set(kept)
    for number in range(64):  # sixteen fill the quota
        if rig.tier.stats()["evicted_blocks"]:
            break
        fill(rig, f"more-{number}", QUOTA_BYTES // 16)
    wait_long_until(lambda: present(redis_server, unused).count(False) >= BATCH)
    assert present(redis_server, kept) == [True] * BATCH
    assert rig.lookup_all(kept) == [True] * BATCH


@pytest.mark.slow
def test_what_the_server_lost_by_itself_is_found_by_a_survey(redis_server: RedisServer, open_rig: OpenRig) -> None:
    rig = open_rig(url=redis_server.url, quota=QUOTA_BYTES)
    fill(rig, "first", QUOTA_BYTES // 2)
    for name in redis_server.keys(f"tkv1:{OURS.hex()}:{'?' * 16}:*"):
        redis_server.call("UNLINK", name)  # as expiry and eviction do
    fill(rig, "second", QUOTA_BYTES)
    wait_long_until(lambda: rig.tier.stats()["surveys"] >= 2)
    stats = rig.tier.stats()
    assert used_bytes(redis_server) <= stats["account_bytes"] <= QUOTA_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["lost", "somebody else's"])
def test_an_account_that_is_lost_is_opened_again(redis_server: RedisServer, open_rig: OpenRig, loss: str) -> None:
    rig = open_rig(url=redis_server.url, quota=QUOTA_BYTES)
    fill(rig, "first", QUOTA_BYTES // 2)
    redis_server.call("DEL", ACCOUNT)
    if loss != "lost":
        redis_server.set(ACCOUNT.encode(), b"not an account")
    wait_long_until(lambda: redis_server.call("HEXISTS", ACCOUNT, "offset") == b":1\r\n")
    fill(rig, "second", 2 * QUOTA_BYTES)
    # What had been granted before may have been used besides; the second survey after the loss finds it.
    wait_long_until(lambda: rig.tier.stats()["surveys"] >= 2 and used_bytes(redis_server) <= QUOTA_BYTES)


@pytest.mark.slow
def test_grants_of_a_process_that_ended_are_free_again_and_those_of_one_that_lives_are_not(
    redis_server: RedisServer,
) -> None:
    settings = RedisSettings.model_validate({**PATIENT, "url": redis_server.url, "quota": QUOTA_BYTES})
    # Who has ended is taken for dead after eight seconds. Who is held up by a busy machine must not be.
    limits = QuotaLimits(QUOTA_BYTES, RECORD_BYTES, room_wait_s=60.0, transfer_s=0.2, tick_s=0.05, valid_s=4.0)
    topologies = [topology_of(settings) for _ in range(2)]
    first, second = (Quota(topology, OURS, limits, Counters(), "redis") for topology in topologies)
    try:
        deadline = time.monotonic() + 60.0
        taken = first.grants.take(4, deadline)
        assert taken == 4
        redis_server.call("HSET", ACCOUNT, "g:ended", f"{6 << 20} 1")
        redis_server.call("HINCRBY", ACCOUNT, "net", str(6 << 20))
        wait_long_until(lambda: redis_server.call("HEXISTS", ACCOUNT, "g:ended") == b":0\r\n")
        # The living one's blocks in flight are still counted. Before the second has looked, it knows of nothing.
        wait_until(lambda: 4 * RECORD_BYTES <= second.grants.total_bytes < 2 << 20)
        owner = b"g:" + first._account.owner
        assert redis_server.call("HEXISTS", ACCOUNT, owner) == b":1\r\n"
        first.grants.settle(4, 0)
        wait_until(lambda: second.grants.total_bytes == 0)
        assert first.grants.outstanding_bytes == 0, "what is not used is given back"
    finally:
        for quota, topology in zip((first, second), topologies, strict=True):
            quota.close(10.0)
            topology.close()


@pytest.mark.slow
def test_a_quota_that_cannot_be_kept_now_refuses_stores_and_no_loads(
    redis_server: RedisServer, open_rig: OpenRig
) -> None:
    rig = open_rig(url=redis_server.url, quota=QUOTA_BYTES)
    keys = make_keys(BATCH)
    wait_long_until(lambda: rig.store(keys).success)
    wait_until(lambda: rig.tier.stats()["account_bytes"] > 0)
    # For ever; not while the tier is at a survey, which would find out afterwards what there is.
    wait_long_until(lambda: redis_server.call("SET", SURVEY, "another", "NX") == b"+OK\r\n")
    redis_server.call("HSET", ACCOUNT, "offset", str(QUOTA_BYTES), "survey", "another")
    more = [rig.store(make_keys(BATCH, f"more-{number}")) for number in range(12)]
    assert not more[-1].success
    assert more[-1].reason == "no_space"
    assert rig.tier.stats()["over_quota_blocks"] >= BATCH
    assert rig.load(keys) == set(keys)
    redis_server.call("DEL", SURVEY)
    wait_long_until(lambda: rig.store(make_keys(BATCH, "afterwards")).success)


def test_a_quota_that_is_too_small_is_an_error_that_names_it(open_rig: OpenRig) -> None:
    with pytest.raises(ConfigError, match=r"quota: 1048576 bytes are too few for records of \d+; give at least \d+"):
        open_rig(url="redis://127.0.0.1:1", quota="1MiB", connect_timeout="100ms")


@pytest.mark.slow
class TestRedisTierWithQuota(TierConformance):
    survives_reopen = True

    @pytest.fixture
    def open_tier(self, redis_server: RedisServer) -> OpenTier:
        settings = RedisSettings.model_validate({**PATIENT, "url": redis_server.url, "quota": "64MiB"})
        return lambda spec, view: RedisTier(spec, view, "redis", settings)


class NoRoom:
    """A keeper that makes no room."""

    def __init__(self) -> None:
        self.round = threading.Event()

    def wake(self) -> None:
        return


def test_a_process_that_was_taken_for_dead_gives_nothing_back_when_it_ends(redis_server: RedisServer) -> None:
    topology = topology_of(RedisSettings.model_validate({**PATIENT, "url": redis_server.url}))
    limits = QuotaLimits(QUOTA_BYTES, RECORD_BYTES, room_wait_s=0.1, transfer_s=1.0)
    stopped, other = Account(topology, OURS), Account(topology, OURS)
    deadline = time.monotonic() + 60
    try:
        begun = other.begin_survey(deadline)
        assert begun is not None
        other.note_survey(0, (), deadline)
        grants = Grants(stopped, limits, Counters(), NoRoom())
        assert grants.take(1, deadline) == 1
        grants.settle(1, RECORD_BYTES)  # one block is there now
        assert grants.outstanding_bytes > 0
        net_bytes = other.statement(deadline).net_bytes
        other.note_survey(RECORD_BYTES - net_bytes, [stopped.owner], deadline)  # nobody has heard of it for long
        assert other.statement(deadline).total_bytes == RECORD_BYTES
        grants._confirmed_s -= 2 * limits.valid_s  # it was stopped for so long
        grants.leave(deadline)
        assert other.statement(deadline).total_bytes == RECORD_BYTES
    finally:
        topology.close()
