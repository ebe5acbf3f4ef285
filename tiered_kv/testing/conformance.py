"""The contract of a secondary tier, as a pytest class that a tier's author subclasses with one fixture.

    class TestMyTier(TierConformance):
        survives_reopen = True

        @pytest.fixture
        def open_tier(self, tmp_path: Path) -> OpenTier:
            return lambda spec, view: MyTier(spec, view, "mine", path=tmp_path)

pytest's thread calls the tier, and plays the scheduler. `docs/how-to/testing.md` says what each check proves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.errors import TierError
from tiered_kv.metrics.counters import flat_counts
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import OpenTier, TierRig, block_content, compressible_content, make_keys
from tiered_kv.tiering.base import JobId, JobMetadata, JobResult, SecondaryTierManager, TierSpec


class TierConformance:
    """Subclass it as `Test...`, and define the fixture `open_tier`.

    Attributes:
        survives_reopen: Whether the tier finds stored blocks when `open_tier` is called again after `shutdown`.
        compressible: Whether codecs can compress the blocks' content; set it for a tier that compresses.
        block_bytes, num_blocks: Bytes of a block, and rows of the region: at least 512.
        wait_s: Seconds that one job or lookup may take.
        call_limit_s: Seconds that a call may take if the tier says `is_nonblocking`. One call in ten may take longer,
            because the machine may be busy.
        shutdown_limit_s: Seconds that `shutdown` may take with jobs in flight.
    """

    survives_reopen: ClassVar[bool] = False
    compressible: ClassVar[bool] = False
    block_bytes: ClassVar[int] = 4096
    num_blocks: ClassVar[int] = 1024
    wait_s: ClassVar[float] = 20.0
    call_limit_s: ClassVar[float] = 0.05
    shutdown_limit_s: ClassVar[float] = 15.0

    def corrupt(self, tier: SecondaryTierManager) -> bool:
        """Damage the payload of every block that the open `tier` has stored, and return True.

        Optional: by default the checks that need it are skipped.
        """
        return False

    @pytest.fixture
    def open_tier(self) -> OpenTier:
        """Return a callable that opens the tier; every call within one test opens it on the same storage."""
        raise NotImplementedError("a subclass of TierConformance defines the fixture 'open_tier'")

    @pytest.fixture
    def rig(self, open_tier: OpenTier) -> Iterator[TierRig]:
        content = compressible_content if self.compressible else block_content
        rig = TierRig(
            open_tier, num_blocks=self.num_blocks, block_bytes=self.block_bytes, wait_s=self.wait_s, content=content
        )
        yield rig
        rig.close()

    # -- bytes -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("blocks", [0, 1, 2, 33, 256])
    def test_stored_blocks_load_as_the_same_bytes(self, rig: TierRig, blocks: int) -> None:
        keys = make_keys(blocks)
        assert rig.store(keys).success
        assert [rig.lookup(key) for key in keys] == rig.lookup_all(keys) == [True] * blocks
        assert rig.load(keys) == set(keys)

    @pytest.mark.parametrize(
        "order",
        [lambda rows: rows, lambda rows: rows[::-1], lambda rows: rows[::2] + rows[1::2]],
        ids=["rising", "falling", "every_other"],
    )
    def test_rows_may_be_adjacent_or_not_and_in_any_order(
        self, rig: TierRig, order: Callable[[list[int]], list[int]]
    ) -> None:
        keys = make_keys(24)
        rig.store(keys, rows=order(list(range(40, 64))))
        assert rig.load(keys, rows=order(list(range(100, 124)))) == set(keys)
        assert rig.load(keys, rows=list(range(200, 248, 2))) == set(keys)

    def test_blocks_may_begin_at_any_byte_of_a_host_s_memory(self, open_tier: OpenTier) -> None:
        size, keys, beyond = self.block_bytes, make_keys(6), (0, 4096, 512, 1, 4095, 4097)
        stride = (size // 4096 + 3) * 4096
        memory = np.zeros((12 * stride // size + 1, size), np.uint8)
        flat = memory.reshape(-1)
        sources = [number * stride + at for number, at in enumerate(beyond)]
        targets = [number * stride + at for number, at in enumerate(beyond[3:] + beyond[:3], 6)]
        for key, at in zip(keys, sources, strict=True):
            flat[at : at + size] = np.frombuffer(block_content(key, size), np.uint8)
        expected = flat.copy()
        for source, target in zip(sources, targets, strict=True):
            expected[target : target + size] = flat[source : source + size]
        spec = TierSpec("conformance", size, bytes(range(16)), {"model": "conformance"}, memory=flat.data)
        tier = open_tier(spec, memory.data)
        results: list[JobResult] = []

        def is_reported() -> bool:
            results.extend(tier.get_finished())
            return bool(results)

        try:
            if not tier.takes_offsets:
                pytest.skip("the tier knows rows only")
            for submit, offsets, is_load in ((tier.submit_store, sources, False), (tier.submit_load, targets, True)):
                submit(JobMetadata(int(is_load), keys, np.array(offsets), is_load, ReqContext("host")))
                tier.on_schedule_end()
                wait_until(is_reported, self.wait_s)
                assert results == [JobResult(int(is_load), True)]
                results.clear()
            assert np.array_equal(flat, expected)
        finally:
            tier.shutdown()

    def test_blocks_that_were_stored_together_load_apart_and_the_other_way_round(self, rig: TierRig) -> None:
        together, apart = make_keys(16, "together"), make_keys(16, "apart")
        rig.store(together)
        rig.wait([rig.submit_store([key]) for key in apart])
        mixed = [key for pair in zip(together[::-1], apart, strict=True) for key in pair]
        assert rig.load(mixed) == set(mixed)
        for key in mixed:
            assert rig.load([key]) == {key}

    def test_keys_may_be_of_any_length(self, rig: TierRig) -> None:
        keys = [make_offload_key(b"k" * length, 0) for length in (1, 3, 4, 8, 16, 20, 32, 64, 100, 300)]
        assert rig.store(keys).success
        assert rig.load(keys[::-1]) == set(keys)
        assert not rig.lookup(make_offload_key(b"k" * 5, 0))

    def test_groups_of_one_hash_are_different_blocks(self, rig: TierRig) -> None:
        stored = [make_offload_key(b"one hash", group) for group in (0, 1, 255, 256, 2**32 - 1)]
        rig.store(stored)
        assert rig.load(stored) == set(stored)
        assert not rig.lookup(make_offload_key(b"one hash", 2))

    def test_a_present_block_is_not_overwritten(self, rig: TierRig) -> None:
        keys = make_keys(4)
        rig.store(keys)
        rig.epoch = 1
        assert rig.store(keys).success
        rig.epoch = 0
        assert rig.load(keys) == set(keys)

    # -- misses ------------------------------------------------------------------------------------

    def test_an_absent_block_is_a_miss(self, rig: TierRig) -> None:
        rig.store(make_keys(4))
        absent = make_keys(4, "absent")
        assert not any(rig.lookup(key) for key in absent)
        assert rig.load(absent) == set()

    def test_a_load_of_present_and_absent_blocks_names_only_present_ones(self, rig: TierRig) -> None:
        present, absent = make_keys(6), make_keys(6, "absent")
        rig.store(present)
        mixed = [key for pair in zip(present, absent, strict=True) for key in pair]
        assert rig.load(mixed) <= set(present)
        assert rig.load(present) == set(present)

    def test_a_block_that_is_answered_true_during_its_store_can_be_loaded(self, rig: TierRig) -> None:
        keys = make_keys(256)
        store = rig.submit_store(keys)
        for key in keys[::4]:
            if rig.lookup(key):
                assert rig.load([key]) == {key}
        rig.wait([store])
        assert rig.load(keys) == set(keys)

    def test_lookup_many_answers_as_lookup_does(self, rig: TierRig) -> None:
        keys = make_keys(8)
        rig.store(keys[::2])
        request = rig.new_request()
        one_by_one = [rig.lookup(key, request) for key in keys]
        assert list(rig.tier.lookup_many(keys, request)) == one_by_one == [True, False] * 4

    def test_requests_come_and_go_in_any_order(self, rig: TierRig) -> None:
        keys = make_keys(4)
        rig.store(keys)
        first, second = rig.new_request(), rig.new_request()
        rig.tier.lookup(keys[0], first)
        rig.tier.touch(keys, second)
        rig.tier.on_request_finished(first)
        rig.tier.on_request_finished(first)
        rig.tier.on_request_finished(ReqContext("never seen"))
        assert rig.lookup(keys[0], second)
        assert rig.load(keys) == set(keys)

    def test_of_touched_blocks_only_missing_ones_are_reported_absent(self, rig: TierRig) -> None:
        keys, missing = make_keys(4), make_keys(4, "missing")
        rig.store(keys)
        rig.tier.touch([*keys, *missing], ReqContext())
        rig.wait([rig.submit_load(missing)])  # a tier may notice missing blocks later, or never
        absent = [*rig.tier.take_absent(), *rig.tier.take_absent()]
        assert set(absent) <= set(missing), "the others are stored"
        assert len(absent) == len(set(absent)), "each is reported once"
        assert rig.load(keys) == set(keys)

    # -- jobs --------------------------------------------------------------------------------------

    def test_many_jobs_in_flight_are_each_reported_once(self, rig: TierRig) -> None:
        batches = [make_keys(4, f"batch-{index}") for index in range(64)]
        stores = rig.wait([rig.submit_store(keys) for keys in batches])
        assert all(result.success for result in stores)
        loads = rig.wait([rig.submit_load(keys) for keys in batches])
        assert all(result.success for result in loads)
        for _ in range(20):
            rig.poll()  # a second report of any of them fails here

    def test_loads_and_stores_in_flight_do_not_disturb_each_other(self, rig: TierRig) -> None:
        old = [make_keys(8, f"old-{index}") for index in range(16)]
        rig.wait([rig.submit_store(keys) for keys in old])
        jobs = []
        for index, keys in enumerate(old):
            jobs.append(rig.submit_store(make_keys(8, f"new-{index}")))
            jobs.append(rig.submit_load(keys))
        assert all(result.success for result in rig.wait(jobs))

    @pytest.mark.parametrize("endless", ["loads", "stores"])
    def test_jobs_of_one_kind_that_never_end_do_not_starve_the_other(self, rig: TierRig, endless: str) -> None:
        batches = [(make_keys(4, f"batch-{row}"), range(row, row + 4)) for row in range(0, 100, 4)]  # keys, and rows
        rig.wait([rig.submit_store(*batch) for batch in batches[int(endless == "loads") :]])
        submit: Callable[..., JobId] = rig.submit_load if endless == "loads" else rig.submit_store
        in_flight = [(submit(*batch), batch) for batch in batches[1:]]
        other = (rig.submit_store if endless == "loads" else rig.submit_load)(*batches[0])
        end = time.monotonic() + self.wait_s
        while not rig.is_reported(other):
            assert time.monotonic() < end, f"a job waits {self.wait_s} s behind {endless} that are always in flight"
            in_flight = [(submit(*batch) if rig.is_reported(job) else job, batch) for job, batch in in_flight]
            rig.poll()
        assert all(result.success for result in rig.wait([other, *(job for job, _ in in_flight)]))

    def test_several_jobs_may_store_or_load_one_block_at_once(self, rig: TierRig) -> None:
        keys = make_keys(8)
        assert all(result.success for result in rig.wait([rig.submit_store(keys) for _ in range(6)]))
        assert all(result.success for result in rig.wait([rig.submit_load(keys) for _ in range(6)]))

    def test_a_key_may_stand_twice_in_a_store(self, rig: TierRig) -> None:
        keys = make_keys(3)
        assert rig.store(keys + keys[:1]).success
        assert rig.load(keys) == set(keys)

    def test_a_key_may_stand_twice_in_a_load_or_lookup(self, rig: TierRig) -> None:
        keys = make_keys(3)
        rig.store(keys)
        assert rig.load(keys + keys[:1]) == set(keys)  # and both rows have the block
        assert rig.lookup_all(keys + keys[:1]) == [True] * 4

    def test_a_job_past_its_deadline_is_reported_all_the_same(self, rig: TierRig) -> None:
        keys, late = make_keys(4), make_keys(4, "late")
        rig.store(keys)
        past = time.monotonic() - 1.0
        rig.wait([rig.submit_store(late, deadline=past), rig.submit_load(keys, deadline=past)])
        assert rig.store(late).success
        assert rig.load(keys + late) == set(keys + late)

    def test_calls_return_at_once_while_the_tier_is_busy(self, rig: TierRig) -> None:
        if not rig.tier.is_nonblocking:
            pytest.skip("the tier does not say is_nonblocking: the manager calls it on a separate thread")
        batches = [make_keys(8, f"batch-{index}") for index in range(32)]
        for key in itertools.chain.from_iterable(batches):
            block_content(key, self.block_bytes)  # fills its cache, so that the timed calls do not compute it
        request = rig.new_request()
        took_s: list[float] = []

        def timed(call: Callable[[], object]) -> None:
            begin = time.perf_counter()
            call()
            took_s.append(time.perf_counter() - begin)

        jobs = []
        for keys in batches:
            timed(lambda: jobs.append(rig.submit_store(keys)))  # noqa: B023  called at once
            timed(lambda: rig.tier.lookup(keys[0], request))  # noqa: B023
            timed(rig.poll)
        rig.wait(jobs)
        slow = [duration for duration in took_s if duration > self.call_limit_s]
        assert len(slow) <= len(took_s) // 10, f"{len(slow)} of {len(took_s)} calls took up to {max(slow):.3f} s"

    # -- the tier's life ---------------------------------------------------------------------------

    def test_shutdown_with_jobs_in_flight_is_bounded_and_may_be_repeated(self, rig: TierRig) -> None:
        rig.store(make_keys(64))
        rig.submit_load(make_keys(64))
        for index in range(8):
            rig.submit_store(make_keys(64, f"batch-{index}"))
        begin = time.monotonic()
        rig.tier.shutdown()
        rig.tier.shutdown()
        assert time.monotonic() - begin < self.shutdown_limit_s

    def test_a_reset_forgets_every_block_and_takes_new_ones(self, rig: TierRig) -> None:
        keys = make_keys(16)
        rig.store(keys)
        self._reset(rig)
        assert not any(rig.lookup(key) for key in keys)
        assert rig.load(keys) == set()
        rig.epoch = 1
        assert rig.store(keys[:8]).success
        assert rig.load(keys) == set(keys[:8])

    def test_a_reset_forgets_stores_in_flight(self, rig: TierRig) -> None:
        keys = make_keys(256)
        store = rig.submit_store(keys)
        self._reset(rig)
        rig.wait([store])
        assert not any(rig.lookup(key) for key in keys)
        assert rig.load(keys) == set()

    def test_a_reopened_tier_finds_what_was_stored(self, rig: TierRig) -> None:
        self._needs_reopen()
        keys = make_keys(48)
        rig.wait([rig.submit_store(keys[index : index + 8]) for index in range(0, 48, 8)])
        for _ in range(2):
            rig.reopen()
            assert [rig.lookup(key) for key in keys] == [True] * len(keys)
            assert rig.load(keys) == set(keys)

    def test_a_reset_holds_when_the_tier_is_reopened(self, rig: TierRig) -> None:
        self._needs_reopen()
        keys = make_keys(16)
        rig.store(keys)
        self._reset(rig)
        rig.epoch = 1
        rig.store(keys[:4])
        rig.reopen()
        assert [rig.lookup(key) for key in keys] == [True] * 4 + [False] * 12
        assert rig.load(keys) == set(keys[:4])

    def test_a_tier_that_was_shut_down_amid_stores_reopens_with_whole_blocks_only(self, rig: TierRig) -> None:
        self._needs_reopen()
        keys = make_keys(256)
        for index in range(0, 256, 32):
            rig.submit_store(keys[index : index + 32])
        rig.reopen()
        found = [key for key in keys if rig.lookup(key)]
        assert rig.load(found) == set(found)

    def test_namespaces_do_not_see_each_other(self, rig: TierRig) -> None:
        keys, own = make_keys(8), rig.spec
        rig.store(keys)
        try:
            rig.reopen(replace(own, namespace_digest=b"another space, 2", namespace={"model": "another"}))
        except TierError:
            pass  # an error is as good as a miss
        else:
            assert not any(rig.lookup(key) for key in keys)
            assert rig.load(keys) == set()
        rig.reopen(own)
        assert [rig.lookup(key) for key in keys] == [self.survives_reopen] * len(keys)

    # -- damage ------------------------------------------------------------------------------------

    def test_a_damaged_block_fails_to_load_and_is_a_miss_from_then_on(self, rig: TierRig) -> None:
        keys = self._store_and_corrupt(rig)
        assert rig.load(keys) == set()
        assert not any(rig.lookup(key) for key in keys)
        assert rig.store(keys).success
        assert rig.load(keys) == set(keys)

    def test_damage_is_found_after_reopening_too(self, rig: TierRig) -> None:
        self._needs_reopen()
        keys = self._store_and_corrupt(rig)
        rig.reopen()
        assert rig.load(keys) == set()

    def test_stats_are_numbers_and_the_description_has_names(self, rig: TierRig) -> None:
        rig.store(make_keys(4))
        assert all(
            isinstance(value, int) and {*map(type, path)} == {str} for path, value in flat_counts(rig.tier.stats())
        )
        assert all(isinstance(name, str) for name in rig.tier.describe())

    def _reset(self, rig: TierRig) -> None:
        if not rig.tier.reset_cache():
            pytest.skip("the tier cannot reset: the manager stops using it then")

    def _needs_reopen(self) -> None:
        if not self.survives_reopen:
            pytest.skip("the tier does not outlive its process")

    def _store_and_corrupt(self, rig: TierRig) -> list[OffloadKey]:
        keys = make_keys(16)
        rig.store(keys)
        if not self.corrupt(rig.tier):
            pytest.skip("the subclass does not override 'corrupt'")
        return keys
