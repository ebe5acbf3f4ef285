"""The memory tier keeps the contract, its capacity, and nothing that is not intact."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable

import pytest

from tests.support.entries import rig_of
from tests.support.threads import meanwhile
from tiered_kv.base import OffloadKey
from tiered_kv.errors import ConfigError
from tiered_kv.testing.rig import TierRig, make_keys
from tiered_kv.toolkit.record import HEADER_BYTES

BLOCK_BYTES = 4096
RECORD_BYTES = HEADER_BYTES + BLOCK_BYTES

MakeRig = Callable[..., TierRig]


@pytest.fixture
def make_rig(closing: contextlib.ExitStack) -> MakeRig:
    def make(**settings: object) -> TierRig:
        rig = rig_of({"type": "memory", **settings}, block_bytes=BLOCK_BYTES, num_blocks=64)
        return closing.enter_context(contextlib.closing(rig))

    return make


def found(rig: TierRig, keys: list[OffloadKey]) -> list[bool]:
    return [bool(rig.lookup(key)) for key in keys]


def test_the_least_recently_used_block_is_evicted_and_the_head_of_a_prefix_last(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=4 * RECORD_BYTES)
    keys = make_keys(4)
    rig.store(keys)
    rig.store(make_keys(1, "new"))
    assert found(rig, keys) == [True, True, True, False]
    rig.tier.touch(keys[2:3], rig.new_request())
    rig.store(make_keys(1, "newer"))
    assert found(rig, keys) == [True, False, True, False]
    assert rig.load(keys[:1]) == {keys[0]}
    rig.wait([rig.submit_store([key]) for key in make_keys(2, "newest")])
    assert found(rig, keys) == [True, False, False, False]
    assert rig.tier.stats()["evicted_blocks_total"] == 4


def test_a_load_is_a_use_when_it_is_asked_for_and_not_when_a_thread_reads(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=4 * RECORD_BYTES)
    older, newer = make_keys(2, "older"), make_keys(2, "newer")
    rig.store(newer)
    rig.store(older)
    with rig.tier._records_lock:  # type: ignore[attr-defined]  # no thread reads before the second use
        loads = [rig.submit_load(older)]
        rig.tier.touch(newer, rig.new_request())
    rig.wait(loads)
    rig.store(make_keys(1, "new"))
    assert found(rig, [*older, *newer]) == [True, False, True, True]


def test_a_store_does_not_evict_the_blocks_that_it_found_stored(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=8 * RECORD_BYTES)
    keys = make_keys(8)
    rig.store(keys)
    job = [keys[-1], *make_keys(1, "new")]  # the least recently used block, and one more
    assert rig.store(job).success
    assert found(rig, job) == [True, True]


def test_a_load_that_raises_keeps_no_capacity(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*arguments: object) -> None:
        raise MemoryError

    rig = make_rig(capacity=32 * RECORD_BYTES)
    keys = make_keys(8)
    rig.store(keys)
    with monkeypatch.context() as patch:
        patch.setattr("tiered_kv_memory.tier.decode_record", raises)
        assert rig.load(keys) == set()
    rig.tier.reset_cache()
    assert rig.tier.stats()["used_bytes"] == 0


def test_the_capacity_holds_while_threads_store_load_and_reset(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=10 * RECORD_BYTES + 17)
    tier = rig.tier

    def watch() -> None:
        assert tier.stats()["used_bytes"] <= 10 * RECORD_BYTES + 17
        time.sleep(0.0005)

    with meanwhile(watch):
        choice = random.Random(5)
        jobs = []
        for _ in range(200):
            keys = make_keys(choice.randint(1, 6), f"batch-{choice.randint(0, 8)}")
            jobs.append(rig.submit_store(keys) if choice.random() < 0.5 else rig.submit_load(keys))
            if choice.random() < 0.05:
                rig.wait(jobs)
                tier.reset_cache()
            if len(jobs) % 8 == 0:
                rig.wait(jobs[-8:])
        rig.wait(jobs)
    kept = sum(found(rig, [key for number in range(9) for key in make_keys(6, f"batch-{number}")]))
    assert tier.stats()["used_bytes"] == kept * RECORD_BYTES


def test_a_reset_releases_what_it_forgets_in_parts_and_first_when_room_is_needed(make_rig: MakeRig) -> None:
    """A reset of a million blocks does not stop the scheduler's thread for a second."""
    capacity = 256 * RECORD_BYTES
    rig = make_rig(capacity=capacity)
    old, new = make_keys(256, "old"), make_keys(256, "new")
    for at in range(0, 256, 64):
        rig.store(old[at : at + 64])
    rig.tier.reset_cache()
    stats = rig.tier.stats()
    assert (stats["blocks"], stats["used_bytes"] > capacity // 2) == (0, True), "it looks at all blocks"
    assert not any(found(rig, old))
    assert rig.load(old[:64]) == set()
    for at in range(0, 256, 64):
        rig.store(new[at : at + 64])
        assert rig.tier.stats()["used_bytes"] <= capacity
    assert all(found(rig, new)), "blocks from before a reset have kept others out"
    assert rig.tier.stats()["used_bytes"] == capacity
    rig.tier.reset_cache()
    for _ in range(8):
        rig.load(new[:1])
    assert rig.tier.stats()["used_bytes"] == 0


def test_events_tell_what_came_and_went(make_rig: MakeRig) -> None:
    rig = make_rig(capacity=2 * RECORD_BYTES)
    first, second, third = make_keys(3)
    for key in (first, second, third):
        rig.store([key])
    events = [(event.removed, event.keys) for event in rig.tier.take_events()]
    assert events == [(False, [first, second]), (True, [first]), (False, [third])]
    assert list(rig.tier.take_events()) == []
    rig.store([first])
    removed, stored = rig.tier.take_events()
    assert (removed.removed, removed.keys, removed.medium) == (True, [second], rig.spec.name)
    assert (stored.removed, stored.keys, stored.block_size) == (False, [first], BLOCK_BYTES)
    rig.store([second])
    rig.tier.reset_cache()
    assert list(rig.tier.take_events()) == [], "the manager tells of a reset"


def test_a_capacity_below_one_record_is_refused(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError, match="do not hold one record of 4224 bytes"):
        make_rig(capacity=RECORD_BYTES - 1)
