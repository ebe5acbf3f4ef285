"""A whole stack: opened from one configuration, used from several threads, closed without a trace."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier
from tests.support.shortages import DescriptorsLeft, Resource, Shortage, outage
from tests.support.stacks import PATIENT, Register, block_hashes, manager_of, stack_of
from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.config.stack_config import load_config
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.errors import ConfigError, ResourceError, ShutdownError, TierError
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import Stack, open_region, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.rig import make_keys
from tiered_kv.tiering.base import TierSpec

BLOCK_BYTES = 4096
WAIT_S = 60.0


def hashes(count: int, label: str = "block") -> list[bytes]:
    return block_hashes(make_keys(count, label))


def blocks_of(count: int, seed: int = 0) -> Blocks:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)


def empty(count: int) -> Blocks:
    return np.zeros((count, BLOCK_BYTES), dtype=np.uint8)


class Copied(np.ndarray[Any, np.dtype[np.uint8]]):
    """Blocks that call something with the number of each that is copied, from here or to here."""

    on_copy: Callable[[int], None] | None = None
    first = 0  # the number of its first block

    def __array_finalize__(self, parent: Any) -> None:
        self.on_copy = getattr(parent, "on_copy", None)
        self.first = getattr(parent, "first", 0)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and self.on_copy is not None:
            self.on_copy(self.first + index)
        found = super().__getitem__(index)
        if isinstance(index, slice) and isinstance(found, Copied):
            found.first = self.first + (index.start or 0)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.on_copy is not None:
            self.on_copy(index)
        super().__setitem__(index, value)


def copied(blocks: Blocks, on_copy: Callable[[int], None]) -> Any:
    watched = blocks.view(Copied)
    watched.on_copy = on_copy
    return watched


def test_measured_prefill_needs_an_engine() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.tokens_per_s: only vLLM's connector measures it; write how many"):
        open_stack(stack_of(prefill={"tokens_per_s": "measured"}))


@contextmanager
def opened_at_the_end(gate: Gate) -> Iterator[None]:
    """Open a gate before threads are waited for, also after an error."""
    try:
        yield
    finally:
        gate.open()


@pytest.mark.parametrize("first", range(1, 6))
def test_a_stack_that_gets_no_thread_is_an_error_and_leaves_nothing(first: int) -> None:
    config = stack_of(metrics={"listen": "127.0.0.1:0"}, events={"publish": "tcp://127.0.0.1:*"})
    with Shortage(Resource.THREAD, first, 100), pytest.raises(ResourceError, match=r"cannot be started: .*pids\.max"):
        open_stack(config)
    open_stack(config).close()


def test_a_stack_without_descriptors_is_an_error_that_says_what_to_do() -> None:
    with DescriptorsLeft(8), pytest.raises(ResourceError, match="Too many open files; raise the limit of open files"):
        open_stack(stack_of(events={"publish": "tcp://127.0.0.1:*"}))


def test_a_region_that_was_given_to_a_stack_that_cannot_listen_is_closed() -> None:
    config = load_config(stack_of(metrics={"listen": "127.0.0.1:0"}))
    region = open_region(config)
    with outage(Resource.DESCRIPTOR), pytest.raises(ConfigError, match="raise the limit of open files"):
        Stack(config, backend=CPUBackend(region))
    assert not region.array.size


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A stack of a primary tier alone."""
    with open_stack(stack_of()) as stack:
        yield stack


@pytest.fixture
def four(register: Register) -> None:
    register("four", FourMethodTier)


class TestResets:
    @pytest.mark.parametrize("at", [0, 15])
    def test_a_put_that_began_before_a_reset_stores_nothing(self, at: int, stack: Stack) -> None:
        keys, blocks = hashes(16), blocks_of(16)

        def reset(index: int) -> None:
            if index == at:
                stack.reset_cache()

        assert stack.put(keys, copied(blocks, reset)) == 0
        assert stack.get(keys, empty(16)) == 0
        assert stack.put(keys, blocks) == 16

    def test_a_put_that_waits_for_a_reset_stores_nothing(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        keys, blocks, run = hashes(4), blocks_of(4), stack._call_thread.run

        def run_late(call: Callable[[], int]) -> int:
            run(manager_of(stack).reset_cache)
            return run(call)

        with monkeypatch.context() as patched:
            patched.setattr(stack._call_thread, "run", run_late)
            assert stack.put(keys, blocks) == 0
        assert stack.get(keys, empty(4)) == 0

    def test_a_get_that_began_before_a_reset_loads_no_block_after_it(self, stack: Stack) -> None:
        keys, old, new = hashes(16), blocks_of(16), blocks_of(16, seed=1)
        stack.put(keys, old)
        out = empty(16)

        def reset(index: int) -> None:
            if stack.epoch == 0:
                stack.reset_cache()
                stack.put(keys, new)

        loaded = stack.get(keys, copied(out, reset))
        assert 0 < loaded < 16
        assert np.array_equal(out[:loaded], old[:loaded])
        stack.put(keys, new)  # those too that the `get` was copying
        assert stack.get(keys, out) == 16
        assert np.array_equal(out, new)

    def test_blocks_of_an_earlier_epoch_are_refused(self, stack: Stack) -> None:
        keys, blocks, epoch = hashes(4), blocks_of(4), stack.epoch
        assert stack.put(keys[:2], blocks[:2], epoch=epoch) == 2
        stack.reset_cache()
        assert stack.put(keys, blocks, epoch=epoch) == 0
        assert stack.get(keys, empty(4)) == 0
        assert stack.put(keys, blocks, epoch=stack.epoch) == 4


class TestPutAndGet:
    def test_get_ends_at_the_first_miss_and_leaves_the_rest_alone(self, stack: Stack) -> None:
        keys, blocks, out = hashes(6), blocks_of(6), empty(6)
        stack.put(keys[:3], blocks[:3])
        stack.put(keys[4:], blocks[4:])
        assert stack.get(keys, out) == 3
        assert np.array_equal(out[:3], blocks[:3])
        assert not out[3:].any()

    def test_stored_blocks_count_as_stored_again_and_stay(self, stack: Stack) -> None:
        keys, blocks, out = hashes(4), blocks_of(4), empty(4)
        stack.put(keys[:2], blocks[:2])
        assert stack.put(keys, np.zeros_like(blocks) + 7) == 4
        assert stack.get(keys, out) == 4
        assert np.array_equal(out[:2], blocks[:2])
        assert (out[2:] == 7).all()

    def test_a_repeated_key_is_stored_with_its_first_block(self, stack: Stack) -> None:
        key, blocks, out = hashes(1)[0], blocks_of(2), empty(1)
        assert stack.put([key, key], blocks) == 2
        assert stack.get([key], out) == 1
        assert np.array_equal(out[0], blocks[0])

    def test_without_other_tiers_no_more_is_stored_than_the_primary_tier_holds(self, stack: Stack) -> None:
        keys, blocks, out = hashes(40), blocks_of(40), empty(40)
        assert stack.put(keys, blocks) == 16
        assert stack.get(keys, out) == 16
        assert stack.counters()["cpu"]["evicted_blocks_total"] == 0
        assert np.array_equal(out[:16], blocks[:16])

    @pytest.mark.usefixtures("four")
    def test_far_more_than_the_primary_tier_holds_goes_through_it(self) -> None:
        keys, blocks, out = hashes(100), blocks_of(100), empty(100)
        with open_stack(stack_of({"type": "four", **PATIENT})) as stack:
            assert stack.put(keys, blocks, timeout=WAIT_S) == 100
            assert stack.flush(WAIT_S)
            assert stack.get(keys, out, timeout=WAIT_S) == 100
            assert count_of(stack.counters()["four"], "skipped_blocks_total", "budget") == 0
        assert np.array_equal(out, blocks)

    def test_a_full_primary_tier_of_pinned_blocks_takes_fewer_and_does_not_hang(self, stack: Stack) -> None:
        keys, blocks = hashes(16), blocks_of(16)
        stack.put(keys, blocks)
        context = ReqContext(req_id="engine")
        manager_of(stack).prepare_load(make_keys(13), context)
        assert stack.put(hashes(8, "other"), blocks_of(8)) == 3
        manager_of(stack).complete_load(make_keys(13), context)
        manager_of(stack).on_request_finished(context)

    def test_a_block_hash_is_a_key_and_an_engine_s_of_group_0(self, stack: Stack) -> None:
        stack.put([b"a hash"], blocks_of(1))
        context = ReqContext(req_id="engine")
        assert manager_of(stack).lookup(make_offload_key(b"a hash", 0), context) is True
        assert manager_of(stack).lookup(make_offload_key(b"a hash", 1), context) is False
        manager_of(stack).on_request_finished(context)
        (explanation,) = stack.explain([b"a hash"])
        assert (explanation.key, explanation.tiers[0].fate) == (b"a hash", "present")

    def test_rows_of_a_larger_array_will_do(self, stack: Stack) -> None:
        wide = np.zeros((3, 2 * BLOCK_BYTES), dtype=np.uint8)
        wide[:, :BLOCK_BYTES] = blocks_of(3)
        out = np.zeros_like(wide)
        assert stack.put(hashes(3), wide[:, :BLOCK_BYTES]) == 3
        assert stack.get(hashes(3), out[:, BLOCK_BYTES:]) == 3
        assert np.array_equal(out[:, BLOCK_BYTES:], wide[:, :BLOCK_BYTES])

    @pytest.mark.parametrize(
        ("keys", "blocks", "message"),
        [
            (["text"], empty(1), "a key is a block hash, bytes that are not empty; found 'text'"),
            ([b""], empty(1), "a key is a block hash"),
            (b"a hash", empty(6), "a key is a block hash"),
            (hashes(2), empty(1), "must be 2 blocks of 4096 bytes, found 4096 bytes"),
            (hashes(1), b"", "must be 1 blocks of 4096 bytes, found 0 bytes"),
            (hashes(1), [b"0" * BLOCK_BYTES], r"must be a buffer \(bytes, .* torch\), found list"),
            (hashes(1), np.full(BLOCK_BYTES // 8, None), "found one of Python objects"),
            (hashes(1), np.full(BLOCK_BYTES // 8, None).data, "found one of Python objects"),
            (hashes(2), np.zeros((2, 2 * BLOCK_BYTES), np.uint8)[:, ::2], "contiguous rows"),
            (hashes(2), np.zeros((1024, 2), np.float32).T, "contiguous, in C order"),
            (hashes(1), memoryview(bytearray(2 * BLOCK_BYTES))[::2], "contiguous, in C order"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, keys: Any, blocks: Any, message: str, stack: Stack) -> None:
        for method in (stack.put, stack.get):
            with pytest.raises((TypeError, ValueError), match=message):
                method(keys, blocks)

    def test_keys_may_come_from_a_generator(self, stack: Stack) -> None:
        def keys() -> Any:
            return iter(hashes(2))

        assert stack.put(keys(), blocks_of(2)) == 2
        assert stack.contains(keys()) == stack.prefetch(keys()) == len(stack.get(keys())) == 2
        assert len(stack.explain(keys())) == 2

    def test_blocks_are_not_loaded_over_each_other(self, stack: Stack) -> None:
        assert stack.put(hashes(2), blocks_of(2)) == 2
        memory = np.zeros(2 * BLOCK_BYTES, np.uint8)
        out = np.lib.stride_tricks.as_strided(memory, (2, BLOCK_BYTES), (BLOCK_BYTES - 1, 1))
        with pytest.raises(ValueError, match="out must have rows that do not overlap"):
            stack.get(hashes(2), out)
        assert not memory.any()
        assert stack.get(hashes(2), memory.reshape(2, -1)[::-1]) == 2

    def test_a_mask_of_an_array_hides_no_block(self, stack: Stack) -> None:
        blocks, out = blocks_of(2), np.ma.masked_array(empty(2), mask=True, hard_mask=True)
        assert stack.put(hashes(2), np.ma.masked_array(blocks, mask=True)) == 2
        assert stack.get(hashes(2), out) == 2
        assert np.array_equal(out.data, blocks)

    def test_a_read_only_buffer_cannot_be_loaded_into(self, stack: Stack) -> None:
        out = empty(1)
        out.flags.writeable = False
        for each in (out, bytes(BLOCK_BYTES), out.data):
            with pytest.raises(ValueError, match="out is read-only"):
                stack.get(hashes(1), each)

    @pytest.mark.parametrize(
        "of",
        [
            bytearray,
            lambda data: memoryview(bytearray(data)).cast("f", (3, 1024)),
            lambda data: (ctypes.c_short * 6144).from_buffer_copy(data),
            lambda data: np.frombuffer(bytearray(data), "<f2").reshape(3, 2, 1024),
            lambda data: np.frombuffer(bytearray(data), "datetime64[s]"),
        ],
        ids=["bytearray", "memoryview", "ctypes", "half", "datetime"],
    )
    def test_any_contiguous_buffer_of_the_right_size_is_blocks(self, of: Callable[[bytes], Any], stack: Stack) -> None:
        data, out = blocks_of(3).tobytes(), of(bytes(3 * BLOCK_BYTES))
        assert stack.put(hashes(3), of(data)) == 3
        assert stack.get(hashes(3), out) == 3
        assert (out.tobytes() if isinstance(out, np.ndarray) else bytes(out)) == data
        assert stack.put(hashes(3, "others"), data) == 3
        assert stack.get(hashes(3, "others")).tobytes() == data

    def test_a_tensor_of_torch_on_the_cpu_is_blocks(self, stack: Stack) -> None:
        torch = pytest.importorskip("torch")
        blocks = torch.randn(3, 2, BLOCK_BYTES // 4, requires_grad=True).to(torch.bfloat16)
        out = torch.zeros_like(blocks)
        assert stack.put(hashes(3), blocks) == 3
        assert stack.get(hashes(3), out) == 3
        assert torch.equal(out, blocks)
        with pytest.raises(TypeError, match="in the CPU's memory, found a tensor on meta"):
            stack.put(hashes(3), blocks.to("meta"))
        with pytest.raises(ValueError, match=r"contiguous, in C order; pass its \.contiguous"):
            stack.put(hashes(3), blocks.transpose(0, 1))
        for lazy in (torch.zeros(3, BLOCK_BYTES // 8, dtype=torch.complex64).conj(), torch._neg_view(blocks.detach())):
            with pytest.raises(ValueError, match=r"own bytes; pass its \.resolve_conj\(\)\.resolve_neg\(\)"):
                stack.put(hashes(3), lazy)
        with pytest.raises(ValueError, match="3 blocks of 4096 bytes, found 8192 bytes"):
            stack.get(hashes(3), out[:2])

    def test_a_get_into_nothing_returns_the_blocks_that_were_found(self, stack: Stack) -> None:
        keys, blocks = hashes(4), blocks_of(4)
        assert stack.get(keys).shape == (0, BLOCK_BYTES)
        stack.put(keys[:2], blocks[:2])
        found = stack.get(keys)
        assert found.dtype == np.uint8
        assert np.array_equal(found, blocks[:2])
        assert stack.get([]).shape == (0, BLOCK_BYTES)


class Silent(FourMethodTier):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return None


class TestContains:
    def test_it_counts_the_prefix_in_all_tiers_and_loads_nothing(self) -> None:
        keys = hashes(8)
        with open_stack(stack_of({"type": "memory", "capacity": "1MiB", **PATIENT})) as stack:
            assert stack.contains(keys, timeout=WAIT_S) == 0
            stack.put(keys[:6], blocks_of(6))
            for number in range(4):
                stack.put(hashes(8, f"other-{number}"), blocks_of(8))
            stack.flush(WAIT_S)
            before = stack.counters()
            assert stack.contains(keys, timeout=WAIT_S) == 6
            assert stack.contains(keys[6:], timeout=WAIT_S) == 0
            assert stack.contains([*hashes(2, "other-3"), keys[0], keys[7], keys[1]], timeout=WAIT_S) == 3
            after = stack.counters()
            for name in ("blocks_total", "misses_total", "submitted_jobs_total"):
                assert [each.get(name) for each in after.values()] == [each.get(name) for each in before.values()]
            assert stack.get(keys, empty(8), timeout=0) == 0, "it is not in the primary tier"
            stack.reset_cache()
            assert stack.contains(keys, timeout=WAIT_S) == 0

    def test_a_tier_that_does_not_answer_or_fails_has_no_block(self, register: Register) -> None:
        class Failing(FourMethodTier):
            def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
                raise OSError("cannot look")

        register("silent", Silent)
        register("failing", Failing)
        with open_stack(stack_of({"type": "failing"}, {"type": "silent"})) as stack:
            stack.put(hashes(2), blocks_of(2))
            assert stack.contains(hashes(4), timeout=0.01) == 2
            assert stack.contains(hashes(4), timeout=0) == 2

            def has_failed() -> object:
                assert stack.contains(hashes(4), timeout=0.01) == 2
                return stack.counters()["failing"]["exceptions_total"]

            wait_until(has_failed)


class TestPrefetch:
    def test_what_was_prefetched_needs_no_secondary_tier(self) -> None:
        keys, blocks, out = hashes(8), blocks_of(8), empty(8)
        with open_stack(stack_of({"type": "memory", "capacity": "1MiB"})) as stack:
            stack.put(keys[:6], blocks[:6])
            stack.flush(WAIT_S)
            for number in range(4):  # it has room for 16
                stack.put(hashes(8, f"other-{number}"), blocks_of(8))
            stack.flush(WAIT_S)
            assert stack.get(keys, out, timeout=0) == 0
            assert stack.prefetch(keys, timeout=WAIT_S) == 6
            assert stack.get(keys, out, timeout=0) == 6
            assert stack.put(hashes(16, "any"), blocks_of(16)) == 16, "nothing is held any more"
        assert np.array_equal(out[:6], blocks[:6])

    def test_blocks_behind_a_missing_one_are_not_loaded(self) -> None:
        keys = hashes(8)
        with open_stack(stack_of({"type": "memory", "capacity": "1MiB", **PATIENT})) as stack:
            stack.put(keys[1:], blocks_of(7))
            stack.flush(WAIT_S)
            for number in range(4):
                stack.put(hashes(8, f"other-{number}"), blocks_of(8))
            stack.flush(WAIT_S)
            assert stack.get(keys, empty(8), timeout=WAIT_S) == 0
            assert stack.prefetch([keys[1], *hashes(1, "no"), *keys[2:]], timeout=WAIT_S) == 1
            stack.flush(WAIT_S)
            assert stack.counters()["memory"]["loaded_blocks_total"] == 1

    def test_blocks_behind_one_that_another_thread_stores_are_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys, blocks, out = hashes(6), blocks_of(6), empty(6)
        loading, asked = list[Future[int]](), threading.Event()

        def load_meanwhile(index: int) -> None:
            if not loading:
                loading.append(program.submit(stack.get, keys, out, WAIT_S))
                assert asked.wait(WAIT_S)

        with ThreadPoolExecutor(1) as program, open_stack(stack_of({"type": "memory", "capacity": "1MiB"})) as stack:
            stack.put(keys[2:], blocks[2:])
            manager = manager_of(stack)
            ask = manager.lookup_prefix

            def noted(*given: Any) -> list[bool | None]:  # under the lock
                asked.set()
                return ask(*given)

            monkeypatch.setattr(manager, "lookup_prefix", noted)
            assert stack.put(keys[:2], copied(blocks[:2], load_meanwhile)) == 2
            assert loading[0].result(WAIT_S) == 6
        assert np.array_equal(out, blocks)

    def test_a_get_that_skips_loads_asks_no_tier(self, register: Register) -> None:
        class Asked(FourMethodTier):
            is_nonblocking = True

            def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
                asked.append(key)
                return super().lookup(key, req_context)

        asked = list[OffloadKey]()
        register("asked", Asked)
        with open_stack(stack_of({"type": "asked"})) as stack:
            assert len(stack.get(hashes(4), hints={"skip": "load"})) == 0
            assert not asked
            assert len(stack.get(hashes(4))) == 0
            assert asked

    def test_a_tier_that_raises_is_not_asked_in_each_turn_of_a_call_that_waits(self, register: Register) -> None:
        class Failing(FourMethodTier):
            is_nonblocking = True

            def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
                raise OSError("cannot look")

        register("silent", Silent)
        register("failing", Failing)
        with open_stack(stack_of({"type": "failing"}, {"type": "silent"})) as stack:
            assert stack.get(hashes(4), empty(4), timeout=0.05) == 0
            assert 0 < stack.counters()["failing"]["exceptions_total"] <= 2

    def test_it_takes_half_of_the_primary_tier_at_most(self) -> None:
        keys, blocks = hashes(32), blocks_of(32)
        with open_stack(stack_of({"type": "memory", "capacity": "1MiB"})) as stack:
            stack.put(keys, blocks)
            stack.flush(WAIT_S)
            stack.put(hashes(8, "latest"), blocks_of(8, 1))
            assert stack.prefetch(keys, timeout=WAIT_S) == 8
            assert stack.get(hashes(8, "latest"), empty(8), timeout=0) == 8

    def test_a_tier_that_does_not_answer_is_waited_for_until_the_timeout(self, register: Register) -> None:
        register("silent", Silent)
        keys = hashes(4)
        with open_stack(stack_of({"type": "silent"})) as stack:
            stack.put(keys[:2], blocks_of(2))
            assert stack.prefetch(keys, timeout=0.01) == 2

    def test_what_is_no_key_is_refused(self, stack: Stack) -> None:
        with pytest.raises(TypeError, match="a key is a block hash"):
            stack.prefetch([b""])


class TestThreads:
    def test_the_lock_is_free_while_blocks_are_copied(self, stack: Stack) -> None:
        keys, blocks = hashes(2), blocks_of(2)
        stack.put(keys, blocks)
        during: list[int] = []

        def put_another(number: int) -> None:
            during.append(stack.put(hashes(1, f"other-{number}"), blocks_of(1)))

        assert stack.get(keys, copied(empty(2), put_another)) == 2
        assert set(during) == {1}

    def test_a_copy_that_fails_leaves_neither_pin_nor_half_a_block(self, stack: Stack) -> None:
        keys, blocks = hashes(16), blocks_of(16)

        def fail(number: int) -> None:
            if number == 1:
                raise RuntimeError("unplugged")

        with pytest.raises(RuntimeError, match="unplugged"):
            stack.put(keys, copied(blocks, fail))
        assert stack.get(keys, empty(16), timeout=0) == 0
        assert stack.put(keys, blocks) == 16
        with pytest.raises(RuntimeError, match="unplugged"):
            stack.get(keys, copied(empty(16), fail))
        assert stack.put(hashes(16, "other"), blocks_of(16)) == 16


class TestOpening:
    def test_a_stack_has_what_an_engine_needs(self, register: Register) -> None:
        specs: list[TierSpec] = []

        class Noting(FourMethodTier):
            def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
                super().__init__(offloading_spec, primary_kv_view, tier_type)
                specs.append(offloading_spec)

        register("noting", Noting)
        config = tiered_kv.load_config(stack_of({"type": "noting"}, {"type": "noting", "name": "second"}))
        with tiered_kv.open_engine_stack(config) as stack:
            assert stack.kv_view.shape == (16, BLOCK_BYTES)
            assert stack.primary is stack.manager.primary
            assert stack.tier_names == ["noting", "second"]
            assert [type(tier) for tier in stack.secondary_tiers] == [Noting, Noting]
            assert sorted(stack.counters()) == ["cpu", "noting", "second"]
        assert [(spec.name, spec.block_bytes) for spec in specs] == [("noting", BLOCK_BYTES), ("second", BLOCK_BYTES)]
        assert {spec.namespace_digest for spec in specs} == {config.identity.digest}
        assert specs[0].namespace == config.identity.described

    def test_if_a_tier_cannot_be_opened_those_before_it_are_closed(self, register: Register) -> None:
        closed: list[str] = []

        class First(FourMethodTier):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self._stop = threading.Event()
                self._thread = threading.Thread(target=self._stop.wait)
                self._thread.start()

            def shutdown(self) -> None:
                self._stop.set()
                self._thread.join()
                closed.append("first")
                raise RuntimeError("a second error, which is not reported")

        class Second(FourMethodTier):
            def __init__(self, *arguments: Any) -> None:
                raise OSError("no such disk")

        register("first", First)
        register("second", Second)
        source = stack_of({"type": "first"}, {"type": "second"})
        with pytest.raises(TierError, match="tier 'second' cannot be opened: OSError: no such disk"):
            open_stack(source)
        assert closed == ["first"]

    def test_an_engine_s_stack_explains_whole_keys(self) -> None:
        key = make_offload_key(b"a hash", 3)
        with tiered_kv.open_engine_stack(stack_of()) as stack:
            (explanation,) = stack.explain([key])
        assert (explanation.key, explanation.tiers[0].fate) == (key, "unknown")


class TestClosing:
    def test_a_closed_stack_says_so(self) -> None:
        stack = open_stack(stack_of())
        stack.close()
        stack.close()
        calls: list[Callable[[], object]] = [
            lambda: stack.put(hashes(1), blocks_of(1)),
            lambda: stack.get(hashes(1), empty(1)),
            lambda: stack.contains(hashes(1)),
            stack.flush,
            stack.counters,
        ]
        for call in calls:
            with pytest.raises(ShutdownError, match="closed"):
                call()

    @pytest.mark.usefixtures("four")
    def test_closing_ends_calls_that_wait(self, register: Register, gate: Gate) -> None:
        class NeverKnows(FourMethodTier):
            def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
                waiting.set()
                return None

        waiting = threading.Event()
        register("never", NeverKnows)
        stack = open_stack(stack_of({"type": "never", "lookup_timeout": "1h"}, primary={"promotion_hold": "1h"}))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(stack.get, hashes(1), empty(1), 600.0)
            assert waiting.wait(WAIT_S)
            began_s = time.monotonic()
            stack.close(WAIT_S)
            assert time.monotonic() - began_s < WAIT_S / 2, "it waits for the call, which does not end"
            with pytest.raises(ShutdownError):
                call.result(WAIT_S)

    def test_without_a_limit_a_close_waits_for_a_call(self, gate: Gate) -> None:
        stack = open_stack(stack_of(metrics={"listen": "127.0.0.1:0"}))
        gate.close()
        with ThreadPoolExecutor(2) as pool, opened_at_the_end(gate):
            call = pool.submit(stack.put, hashes(1), copied(blocks_of(1), lambda _: gate.pass_through()))
            wait_until(lambda: gate.waiting == 1)
            closing = pool.submit(stack.close, math.inf)
            assert not wait([closing], 0.2).done
            gate.open()
            closing.result(WAIT_S)
            assert isinstance(call.exception(WAIT_S), ShutdownError) or call.result() == 1
        assert stack.region.close() is True

    @pytest.mark.parametrize("verb", ["put", "get"])
    def test_a_call_that_still_copies_after_the_close_touches_its_blocks_only(self, verb: str, gate: Gate) -> None:
        def hold_up(_: int) -> None:
            gate.pass_through()

        stack = open_stack(stack_of({"type": "memory", "capacity": "1MiB"}))
        stack.put(hashes(1), blocks_of(1))
        stack.flush()
        gate.close()
        with ThreadPoolExecutor(1) as pool, opened_at_the_end(gate):
            if verb == "put":
                call = pool.submit(stack.put, hashes(2), copied(blocks_of(2), hold_up))
            else:
                call = pool.submit(stack.get, hashes(1), copied(empty(1), hold_up))
            wait_until(lambda: gate.waiting == 1)
            stack.close(0.0)
            assert stack.region.array.shape == (16, BLOCK_BYTES), "memory that is still copied to was unmapped"
            gate.open()
            with pytest.raises(ShutdownError, match="before this call had ended"):
                call.result(WAIT_S)
        assert stack.region.close() is True

    def test_a_call_that_comes_while_the_manager_is_shut_down_does_not_wait(
        self, register: Register, gate: Gate
    ) -> None:
        class ClosesSlowly(FourMethodTier):
            is_nonblocking = True

            def shutdown(self) -> None:
                gate.pass_through()

        register("slow", ClosesSlowly)
        stack = open_stack(stack_of({"type": "slow"}))
        gate.close()
        with ThreadPoolExecutor(1) as pool, opened_at_the_end(gate):
            closing = pool.submit(stack.close)
            wait_until(lambda: gate.waiting == 1)
            with pytest.raises(ShutdownError, match="closed"):
                stack.get(hashes(1), empty(1))
            assert not closing.done()
            gate.open()
            closing.result(WAIT_S)


class OneAfterAnother(FourMethodTier):
    """Answers for each block a tenth of a second after the block before."""

    asked: dict[OffloadKey, float]
    began_s: float

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if not hasattr(self, "asked"):
            self.asked, self.began_s = {}, time.monotonic()
        due_s = self.asked.setdefault(key, self.began_s + 0.1 * len(self.asked))
        return None if time.monotonic() < due_s else super().lookup(key, req_context)


def test_a_tier_that_brings_one_block_after_another_does_not_outlast_the_timeout(register: Register) -> None:
    register("trickle", OneAfterAnother)
    entry = {"type": "trickle", "lookup_timeout": "1h"}
    with open_stack(stack_of(entry, primary={"promotion_budget": BLOCK_BYTES})) as stack:
        keys = hashes(200)
        assert stack.put(keys, blocks_of(200), timeout=WAIT_S) == 200
        assert stack.flush(WAIT_S)
        assert stack.get(keys[:100], empty(100), timeout=0.25) < 50  # all of them take ten seconds


def test_a_put_keeps_its_room_in_the_tiers_while_others_put(register: Register) -> None:
    gate = Gate(is_open=False)

    class Held(HeldJobsTier):
        def __init__(self, spec: TierSpec, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    tier = {"type": "held", "store_budget": 4 * BLOCK_BYTES, **PATIENT}
    with open_stack(stack_of(tier)) as stack, ThreadPoolExecutor(1) as pool, opened_at_the_end(gate):
        others: list[Future[int]] = []
        asked: list[bool] = []
        reserve = manager_of(stack).reserve_stores

        def note(num_blocks: int) -> bool:
            asked.append(reserve(num_blocks))
            return asked[-1]

        def let_another_put(_: int) -> None:
            """Return when the other put has ended, or has found no room and waits."""
            if not others:
                others.append(pool.submit(stack.put, hashes(4, "other"), blocks_of(4), timeout=WAIT_S))
                wait_until(lambda: others[0].done() or False in asked, WAIT_S)

        first = copied(blocks_of(4, seed=1), let_another_put)
        manager_of(stack).reserve_stores = note  # type: ignore[method-assign]  # to see that the other waits
        assert stack.put(hashes(4), first, timeout=WAIT_S) == 4
        gate.open()
        assert others[0].result(WAIT_S) == 4
        assert stack.flush(WAIT_S)
        counted = stack.counters()["held"]
        assert (count_of(counted, "stored_blocks_total"), count_of(counted, "skipped_blocks_total")) == (8, 0)


def test_a_put_waits_for_rows_that_other_calls_copy() -> None:
    memory = {"type": "memory", "capacity": "1 MiB", **PATIENT}
    gate, asked = Gate(is_open=False), list[None]()
    keys = hashes(16)
    with open_stack(stack_of(memory)) as stack, ThreadPoolExecutor(5) as pool, opened_at_the_end(gate):
        assert stack.put(keys, blocks_of(16), timeout=WAIT_S) == 16
        assert stack.flush(WAIT_S)
        out = copied(empty(4), lambda _: gate.pass_through())
        others = [pool.submit(stack.get, keys[start : start + 4], out, WAIT_S) for start in range(0, 16, 4)]
        wait_until(lambda: gate.waiting == 4, WAIT_S)
        step = manager_of(stack).on_schedule_end

        def note() -> None:
            asked.append(None)
            step()

        manager_of(stack).on_schedule_end = note  # type: ignore[method-assign]  # to see that the put waits
        put = pool.submit(stack.put, hashes(4, "other"), blocks_of(4), timeout=WAIT_S)
        wait_until(lambda: put.done() or len(asked) > 3, WAIT_S)
        gate.open()
        assert [other.result(WAIT_S) for other in others] == [4] * 4
        assert put.result(WAIT_S) == 4
