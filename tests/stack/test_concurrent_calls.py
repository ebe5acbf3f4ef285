"""Calls of several threads: what is stored comes to each of them, since a lack of room is a wait, and not a miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.faulty import FourMethodTier, Gate, HeldJobsTier
from tests.support.stacks import PATIENT, Register, manager_of, stack_of
from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key
from tiered_kv.stack.async_stack import AsyncStack
from tiered_kv.stack.buffers import Blocks
from tiered_kv.stack.open import Stack, open_stack
from tiered_kv.testing.control import wait_until
from tiered_kv.tiering.base import TierSpec

BLOCK_BYTES = 4096
WAIT_S = 60.0
TIERS: dict[str, dict[str, object]] = {
    "memory": {"type": "memory", "capacity": "8MiB", **PATIENT},
    "nvme": {"type": "nvme", "capacity": "64MiB", **PATIENT},
    "fs": {"type": "fs", "capacity": "64MiB", **PATIENT},
}


def value_of(number: int, blocks: int) -> tuple[list[bytes], Blocks]:
    """Return the keys of a value, and its blocks."""
    content = np.random.default_rng(number).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    return [b"value %d, block %d" % (number, block) for block in range(blocks)], content


def entries_of(tiers: Sequence[str], directory: Path) -> list[dict[str, object]]:
    """Return new entries, which a test may change."""
    return [TIERS[name] | ({} if name == "memory" else {"path": str(directory / name)}) for name in tiers]


def put_all(stack: Stack, values: int, blocks: int) -> None:
    for number in range(values):
        keys, content = value_of(number, blocks)
        assert stack.put(keys, content, timeout=WAIT_S) == blocks
    assert stack.flush(WAIT_S)


@pytest.mark.one_quick(2)
@pytest.mark.parametrize(
    ("rows", "blocks", "threads", "tiers"),
    [
        (64, 40, 8, ["nvme"]),  # gets that are larger than half of the memory
        (8, 20, 12, ["memory"]),  # larger than all of it, and more threads than rows
        (2, 5, 6, ["nvme"]),
        (8, 20, 6, ["memory", "nvme"]),
        (8, 20, 6, ["fs"]),
    ],
)
def test_each_thread_gets_all_that_is_stored(
    rows: int, blocks: int, threads: int, tiers: list[str], tmp_path: Path
) -> None:
    with open_stack(stack_of(*entries_of(tiers, tmp_path), blocks=rows)) as stack, ThreadPoolExecutor(threads) as pool:
        put_all(stack, 4, blocks)

        def use(number: int) -> list[int]:
            counts = []
            for turn in range(4):
                keys, content = value_of((number + turn) % 4, blocks)
                out = np.empty_like(content)
                counts.append(stack.get(keys, out, timeout=WAIT_S))
                assert (out[: counts[-1]] == content[: counts[-1]]).all()
                new, content = value_of(100 + 4 * number + turn, 2)
                assert stack.put(new, content, timeout=WAIT_S) == 2
            return counts

        counts, counters = list(pool.map(use, range(threads))), stack.counters()
        misses = {name: counters[name]["misses_total"] for name in ("cpu", *tiers)}
        assert counts == [[blocks] * 4] * threads, misses
        refused = [stack.counters()[name]["refused_promotion_blocks_total"] for name in tiers]
        assert refused == [0] * len(tiers)


def test_blocks_of_a_slower_tier_do_not_wait_behind_those_of_a_faster_one(tmp_path: Path) -> None:
    memory, nvme = entries_of(["memory", "nvme"], tmp_path)
    memory["capacity"] = 12 * BLOCK_BYTES  # it has the ends of some values only
    with open_stack(stack_of(memory, nvme, blocks=8)) as stack, ThreadPoolExecutor(6) as pool:
        for number in range(3):
            keys, content = value_of(number, 16)
            assert stack.put(keys[:10], content[:10], timeout=WAIT_S) == 10
            assert stack.flush(WAIT_S)
        for number in range(3):
            keys, content = value_of(number, 16)
            assert stack.put(keys, content, timeout=WAIT_S) == 16
            assert stack.flush(WAIT_S)
        got = pool.map(lambda number: len(stack.get(value_of(number % 3, 16)[0], timeout=WAIT_S)), range(12))
        assert list(got) == [16] * 12


def test_prefetches_of_several_threads_wait_for_room(tmp_path: Path) -> None:
    with open_stack(stack_of(*entries_of(["nvme"], tmp_path), blocks=8)) as stack, ThreadPoolExecutor(6) as pool:
        put_all(stack, 3, 8)
        found = pool.map(lambda number: stack.prefetch(value_of(number % 3, 8)[0], WAIT_S), range(12))
        assert list(found) == [4] * 12  # half of the rows


def test_fifty_tasks_of_an_asyncio_program_get_all_that_is_stored(tmp_path: Path) -> None:
    async def use(stack: AsyncStack, number: int) -> int:
        return len(await stack.get(value_of(number % 4, 12)[0], timeout=WAIT_S))

    async def main() -> list[int]:
        async with AsyncStack(open_stack(stack_of(*entries_of(["nvme"], tmp_path), blocks=8))) as stack:
            await asyncio.to_thread(put_all, stack.stack, 4, 12)  # type: ignore[arg-type]  # it is no host's
            return await asyncio.gather(*(use(stack, number) for number in range(50)))

    assert asyncio.run(main()) == [12] * 50


@pytest.fixture
def held(register: Register, gate: Gate) -> dict[str, object]:
    """A tier whose jobs begin when the gate is open. It has room for the loads of four blocks."""

    class Held(HeldJobsTier):
        def __init__(self, spec: TierSpec, view: memoryview, tier_type: str) -> None:
            super().__init__(FourMethodTier(spec, view, tier_type), gate)

    register("held", Held)
    return {"type": "held", "load_budget": 4 * BLOCK_BYTES, **PATIENT}


@pytest.mark.parametrize("lacking", ["load budget", "promotion budget"])
def test_a_get_without_room_waits_until_there_is_some(held: dict[str, object], gate: Gate, lacking: str) -> None:
    primary: dict[str, object] = {"promotion_budget": (4 if lacking == "promotion budget" else 16) * BLOCK_BYTES}
    entry = held if lacking == "load budget" else {**held, "load_budget": 16 * BLOCK_BYTES}
    with open_stack(stack_of(entry, primary=primary)) as stack, ThreadPoolExecutor(2) as pool:
        put_all(stack, 4, 16)
        gate.close()
        first = pool.submit(stack.get, value_of(0, 16)[0], None, WAIT_S)
        wait_until(lambda: stack.counters()["cpu"]["promotion_blocks"] >= 4)
        second = pool.submit(stack.get, value_of(1, 16)[0], None, WAIT_S)
        began_s = time.monotonic()
        assert len(stack.get(value_of(2, 16)[0], timeout=0.05)) == 0  # it keeps its timeout
        assert time.monotonic() - began_s < WAIT_S / 2
        assert len(stack.get([b"unknown"], timeout=WAIT_S)) == 0  # a miss is none that waits
        assert time.monotonic() - began_s < WAIT_S / 2
        assert not first.done()
        assert not second.done()
        gate.open()
        for number, each in enumerate((first, second)):
            assert (each.result(WAIT_S) == value_of(number, 16)[1]).all()


def test_a_get_that_waits_ends_where_a_block_is_missing(held: dict[str, object], gate: Gate) -> None:
    with open_stack(stack_of(held)) as stack, ThreadPoolExecutor(2) as pool:
        put_all(stack, 3, 16)
        keys, content = value_of(1, 16)
        gate.close()
        first = pool.submit(stack.get, value_of(0, 16)[0], None, WAIT_S)
        wait_until(lambda: stack.counters()["cpu"]["promotion_blocks"] >= 4)
        second = pool.submit(stack.get, [*keys[:7], b"unknown", *keys[8:]], None, WAIT_S)
        gate.open()
        assert (second.result(WAIT_S) == content[:7]).all()
        assert len(first.result(WAIT_S)) == 16


def test_the_longest_waiting_get_is_first_to_get_room(held: dict[str, object], gate: Gate) -> None:
    with open_stack(stack_of(held)) as stack, ThreadPoolExecutor(5) as pool:
        put_all(stack, 6, 16)
        is_over = False

        def load_again_and_again(number: int) -> int:
            rounds = 0
            while not is_over:
                assert len(stack.get(value_of(number, 16)[0], timeout=WAIT_S)) == 16
                rounds += 1
            return rounds

        others = [pool.submit(load_again_and_again, number) for number in range(4)]
        try:
            for _ in range(5):
                assert len(stack.get(value_of(5, 16)[0], timeout=WAIT_S)) == 16
        finally:
            is_over = True
        assert all(each.result(WAIT_S) for each in others)


def test_a_put_names_each_block_to_the_manager_once() -> None:
    with open_stack(stack_of(blocks=256)) as stack:
        named: list[int] = []
        manager = manager_of(stack)
        prepare = manager.prepare_store

        def counted(keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
            named.append(len(keys))
            return prepare(keys, req_context)

        manager.prepare_store = counted  # type: ignore[method-assign]
        keys, content = value_of(0, 300)
        assert stack.put(keys, content, timeout=WAIT_S) == 256
        assert sum(named) == 256
        assert (stack.get(keys, timeout=WAIT_S) == content[:256]).all()


@pytest.mark.parametrize("kept", ["all", "all by one of two", "none without time", "none", "those of before"])
def test_a_put_counts_what_a_tier_has_taken_or_memory_has(held: dict[str, object], gate: Gate, kept: str) -> None:
    """It asks tiers for blocks only if none has taken some of them: to ask each time would cost a request of it."""
    late = {**TIERS["memory"], "name": "late", "admit_after": 2}
    entries = {"all by one of two": [late, held], "none": [late]}.get(kept, [held])
    with open_stack(stack_of(*entries)) as stack:
        keys, content = value_of(0, 40)
        if kept == "those of before":
            gate.close()
            assert stack.put(keys[:4], content[:4], timeout=WAIT_S) == 4  # these transfers use up the budget
            assert stack.put(keys[4:8], content[4:8], timeout=0) == 4
            gate.open()
            assert stack.flush(WAIT_S)
        if kept == "none without time":
            gate.close()
        put = stack.put(keys, content, timeout=0 if kept == "none without time" else WAIT_S)
        gate.open()
        assert stack.flush(WAIT_S)
        assert put <= stack.contains(keys, WAIT_S)
        assert (stack.get(keys, timeout=WAIT_S)[:put] == content[:put]).all()
        assert (put == 40) is (kept not in ("none", "none without time"))


def test_a_put_evicts_none_of_its_blocks_for_its_later_ones(gate: Gate) -> None:
    """It waits for the rows that another call reads, and gets those of other calls."""
    with open_stack(stack_of(blocks=64)) as stack, ThreadPoolExecutor(1) as pool:
        others, content = value_of(1, 64)
        assert stack.put(others, content, timeout=WAIT_S) == 64
        context = ReqContext("reader")
        manager = manager_of(stack)
        manager.on_new_request(context)
        pinned = [make_offload_key(key, 0) for key in others[:8]]
        assert manager.lookup_many(pinned, context) == [True] * 8
        manager.prepare_load(pinned, context)
        manager.on_schedule_end()
        keys, content = value_of(0, 64)
        assert stack.put(keys, content, timeout=0.1) == 56
        assert (stack.get(keys) == content[:56]).all()
        manager.complete_load(pinned, context)
        manager.on_request_finished(context)
        assert pool.submit(stack.put, keys, content, timeout=WAIT_S).result(WAIT_S) == 64
        assert (stack.get(keys) == content).all()
