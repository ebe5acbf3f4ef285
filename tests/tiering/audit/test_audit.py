"""The audit: real stacks, and an engine whose model may change under one namespace."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiered_kv
from tests.support.shortages import Resource, outage
from tests.support.stacks import manager_of, stack_of
from tiered_kv.base import OffloadKey, PrepareStoreOutput, ReqContext
from tiered_kv.mediums import CPULoadStoreSpec
from tiered_kv.metrics.counters import count_of
from tiered_kv.stack.open import Stack
from tiered_kv.testing.rig import make_keys as keys
from tiered_kv.tiering.audit.audit import is_chosen
from tiered_kv.tiering.audit.comparison import BLOCKS_MAX, AuditedGroup
from tiered_kv.tiering.audit.manager import AuditedManager

BLOCK_BYTES = 4096
NUM_BLOCKS = 256

Rows = np.ndarray[Any, np.dtype[np.uint8]]
Config = dict[str, object]
OpenStack = Callable[[Config], Stack]


class Engine:
    """Computes blocks of float32 from their keys and its weights, and drives a stack as schedulers do."""

    def __init__(self, stack: Stack, *, weights: int = 0, noise: float = 0.0) -> None:
        self.stack = stack
        self.weights = weights
        self.noise = noise
        self._numbers = itertools.count()

    def compute(self, names: list[OffloadKey]) -> Rows:
        values = [
            np.random.default_rng([self.weights, *name]).normal(size=BLOCK_BYTES // 4) * (1 + self.noise)
            for name in names
        ]
        return np.array(values, dtype=np.float32).view(np.uint8)

    def begin(self, names: list[OffloadKey], req_id: str = "") -> tuple[ReqContext, int]:
        """Look up a request's blocks and load what is found; return how many those are."""
        manager, context = manager_of(self.stack), ReqContext(req_id or f"request-{next(self._numbers)}")
        manager.on_new_request(context)
        while None in (answers := [manager.lookup(name, context) for name in names]):
            manager.drain_jobs(10.0)
            manager.on_schedule_end()
        found = len(list(itertools.takewhile(bool, answers)))
        if found:
            manager.prepare_load(names[:found], context)
            manager.complete_load(names[:found], context)
        return context, found

    def prepare(self, names: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Take rows for blocks and write them; return which."""
        output = manager_of(self.stack).prepare_store(names, context)
        assert output is not None
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        if output.keys_to_store:
            self.stack.region.array[output.store_spec.block_ids] = self.compute(output.keys_to_store)
        return output.keys_to_store

    def serve(self, names: list[OffloadKey], req_id: str = "") -> int:
        """Serve a whole request; return how many of its blocks were found."""
        context, found = self.begin(names, req_id)
        written = self.prepare(names[found:], context)
        manager_of(self.stack).complete_store(written, context)
        manager_of(self.stack).on_schedule_end()
        manager_of(self.stack).on_request_finished(context)
        self.settle()
        return found

    def settle(self) -> None:
        assert manager_of(self.stack).drain_jobs(10.0)
        manager_of(self.stack).on_schedule_end()


def config(*tiers: Config, blocks: int = NUM_BLOCKS, dtype: str = "float32", **top: Any) -> Config:
    namespace = {"model": "said to be the same", "dtype": dtype}
    return stack_of(*tiers, **{"blocks": blocks, "namespace": namespace, "audit": 1.0, **top})


@pytest.fixture
def open_stack(closing: ExitStack) -> OpenStack:
    return lambda settings: closing.enter_context(tiered_kv.open_stack(settings))


@pytest.fixture
def engine(open_stack: OpenStack) -> Engine:
    """An engine over a memory tier, all of whose requests are audited."""
    return Engine(open_stack(config(MEMORY)))


def nvme(tmp_path: Path) -> Config:
    return {"type": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"}


MEMORY: Config = {"type": "memory", "capacity": "16MiB"}


def counted(stack: Stack, tier: str) -> dict[str, Any]:
    """Return what the audit has counted for a tier."""
    return {name: value for name, value in stack.counters()[tier].items() if "audit" in name and value}


def check_nothing_is_held(stack: Stack) -> None:
    primary = manager_of(stack).primary
    assert not [key for key, block in primary.blocks.items() if block.ref_cnt]
    assert len(primary.blocks) + primary.backend.get_num_free_blocks() == NUM_BLOCKS


# What is compared.


def test_an_engine_that_computes_the_same_is_quiet(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.serve(keys(8)) == 0
    assert engine.serve(keys(8)) == 0, "the blocks were found, and the request was to be computed anew"
    assert counted(engine.stack, "cpu") == {
        "audited_requests_total": 1,
        "audited_blocks_total": {"identical": 8},
    }
    check_nothing_is_held(engine.stack)
    assert not caplog.records


def test_of_several_groups_the_whole_blocks_of_one_are_compared_where_they_lie(engine: Engine) -> None:
    manager, noise = manager_of(engine.stack), np.random.default_rng(0)
    assert isinstance(manager, AuditedManager)
    manager.audit_only(AuditedGroup(number=1, tokens=16, used_bytes=1024, parts=2))
    names = [*keys(5, group_idx=1), *keys(4, group_idx=0)]
    for _ in range(2):
        context, found = engine.begin(names)
        assert found == 0
        for number, name in enumerate(names):
            context.set_offload_key_position(name, 72 if number == 4 else 16 * (number % 5 + 1))  # a tail of 8 tokens
        output = manager.prepare_store(names, context)
        assert isinstance(output, PrepareStoreOutput)
        assert isinstance(output.store_spec, CPULoadStoreSpec)
        rows = engine.compute(output.keys_to_store).reshape(-1, 2, BLOCK_BYTES // 2)
        rows[:, :, 1024:] = noise.integers(256, size=rows[:, :, 1024:].shape)  # what was there before
        engine.stack.region.array[output.store_spec.block_ids] = rows.reshape(-1, BLOCK_BYTES)
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        engine.settle()
    assert counted(engine.stack, "cpu") == {"audited_requests_total": 1, "audited_blocks_total": {"identical": 4}}
    check_nothing_is_held(engine.stack)


def test_a_prefetch_is_not_audited(engine: Engine) -> None:
    manager, context = manager_of(engine.stack), ReqContext("aborted while it waits")
    manager.on_new_request(context)
    manager.prefetch(keys(4), context)
    manager.on_schedule_end()
    manager.on_request_finished(context)
    for _ in range(2):
        assert engine.serve(keys(4)) == 0
    assert counted(engine.stack, "cpu") == {
        "audited_requests_total": 1,
        "audited_blocks_total": {"identical": 4},
    }


@pytest.mark.parametrize("tier", ["memory", "nvme"])
def test_blocks_of_other_weights_in_a_secondary_tier_are_found(
    tier: str, open_stack: OpenStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stack = open_stack(config(MEMORY if tier == "memory" else nvme(tmp_path)))
    Engine(stack).serve(keys(8))
    evict_all(stack)
    Engine(stack, weights=1).serve(keys(8), "the audited one")
    found = counted(stack, tier)
    assert found.pop("audit_largest_difference_ratio") == pytest.approx(1.1, rel=0.2)
    assert found == {"audited_blocks_total": {"different": 8}}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "8 of 8 stored blocks differ" in record.getMessage()
    assert "the audited one" not in record.getMessage(), "names of requests stay out of logs"
    check_nothing_is_held(stack)


def test_blocks_that_the_primary_tier_promoted_count_for_the_tier_that_they_came_from(
    open_stack: OpenStack, tmp_path: Path
) -> None:
    with tiered_kv.open_stack(config(nvme(tmp_path), audit=0)) as stack:
        Engine(stack).serve(keys(4))
    stack = open_stack(config(nvme(tmp_path), audit=0.5))
    plain, audited = ids_by_choice(0.5)
    engine = Engine(stack, weights=1)
    assert engine.serve(keys(4), plain) == 4
    assert engine.serve(keys(4), audited) == 0
    assert counted(stack, "nvme")["audited_blocks_total"] == {"different": 4}
    assert "audited_blocks_total" not in counted(stack, "cpu")


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [({}, "close"), ({"audit_tolerance": 0.01}, "different"), ({"dtype": "auto"}, "different")],
)
def test_small_differences_are_close_within_the_tolerance_and_where_the_type_is_known(
    open_stack: OpenStack, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], verdict: str
) -> None:
    engine = Engine(open_stack(config(MEMORY, **settings)))
    engine.serve(keys(4))
    engine.noise = 0.02
    engine.serve(keys(4))
    found = counted(engine.stack, "cpu")
    assert found["audited_blocks_total"] == {verdict: 4}
    assert bool(caplog.records) == (verdict == "different")
    if "dtype" not in settings:
        assert found["audit_largest_difference_ratio"] == pytest.approx(0.02, rel=0.1)


def test_without_a_thread_that_compares_an_audit_gives_back_what_it_took(engine: Engine) -> None:
    engine.serve(keys(8))
    with outage(Resource.THREAD):
        engine.serve(keys(8), "the second one")
    check_nothing_is_held(engine.stack)
    assert counted(engine.stack, "cpu")["audit_abandoned_blocks_total"] == {"error": 8}
    engine.serve(keys(8), "the third one")
    assert count_of(counted(engine.stack, "cpu"), "audited_blocks_total") == 8


def test_blocks_that_no_tier_had_are_not_compared(engine: Engine) -> None:
    engine.serve(keys(4))
    engine.serve(keys(8))
    assert count_of(counted(engine.stack, "cpu"), "audited_blocks_total") == 4
    engine.serve(keys(4, "another"))
    assert counted(engine.stack, "cpu")["audited_requests_total"] == 1


def test_only_blocks_from_the_first_lookup_on_are_compared(engine: Engine) -> None:
    """An engine asks for nothing that it has itself; what it has may have come from the tier."""
    names, others = keys(8), keys(8, group_idx=1)
    engine.serve(names + others)
    engine.weights = 1
    context, _ = engine.begin(names[5:])
    manager_of(engine.stack).complete_store(engine.prepare(names + others, context), context)
    engine.settle()
    assert count_of(counted(engine.stack, "cpu"), "audited_blocks_total") == 3


def test_a_request_is_compared_up_to_a_limit(open_stack: OpenStack) -> None:
    engine = Engine(open_stack(config(MEMORY, blocks=1024)))
    engine.serve(keys(BLOCKS_MAX + 10))
    engine.serve(keys(BLOCKS_MAX + 10))
    assert count_of(counted(engine.stack, "cpu"), "audited_blocks_total") == BLOCKS_MAX


def test_put_and_get_are_audited(open_stack: OpenStack, tmp_path: Path) -> None:
    stack = open_stack(config(nvme(tmp_path)))
    names = keys(8)
    out = np.empty((8, BLOCK_BYTES), dtype=np.uint8)
    for weights in (0, 1):
        assert stack.get(names, out) == 0
        assert stack.put(names, Engine(stack, weights=weights).compute(names)) == 8
        assert stack.flush()
    assert counted(stack, "cpu")["audited_blocks_total"] == {"different": 8}


# What is chosen, and what it does to others.


def ids_by_choice(share: float) -> tuple[str, str]:
    """Return a request id that is not audited, and one that is."""
    names = [f"name-{number}" for number in range(100)]
    return next(n for n in names if not is_chosen(n, share)), next(n for n in names if is_chosen(n, share))


def test_the_share_is_kept_and_the_same_ids_are_chosen() -> None:
    chosen = [number for number in range(20_000) if is_chosen(f"request-{number}", 0.01)]
    assert 150 < len(chosen) < 250
    assert chosen == [number for number in range(20_000) if is_chosen(f"request-{number}", 0.01)]
    assert not any(is_chosen(f"request-{number}", 0.0) for number in range(100))


def test_other_requests_find_the_blocks_all_the_while(open_stack: OpenStack) -> None:
    plain, audited = ids_by_choice(0.5)
    engine = Engine(open_stack(config(MEMORY, audit=0.5)))
    names = keys(8)
    engine.serve(names, plain)
    expected = engine.compute(names)
    engine.weights = 1
    context, found = engine.begin(names, audited)
    assert found == 0
    assert found_by_another(engine.stack, names, plain, expected)
    written = engine.prepare(names, context)
    assert written == names
    assert found_by_another(engine.stack, names, plain, expected)
    manager_of(engine.stack).complete_store(written, context)
    assert found_by_another(engine.stack, names, plain, expected)
    engine.settle()
    assert found_by_another(engine.stack, names, plain, expected), "a row that was only there to be compared was kept"


def found_by_another(stack: Stack, names: list[OffloadKey], req_id: str, expected: Rows) -> bool:
    context = ReqContext(req_id)
    assert all([manager_of(stack).lookup(name, context) for name in names])  # noqa: C419  # all keys, as an engine does
    spec = manager_of(stack).prepare_load(names, context)
    same = bool((stack.region.array[spec.block_ids] == expected).all())
    manager_of(stack).complete_load(names, context)
    return same


def test_one_request_is_audited_at_a_time(engine: Engine) -> None:
    engine.serve(keys(4), "before")
    _, first = engine.begin(keys(4), "first")
    _, second = engine.begin(keys(4), "second")
    assert (first, second) == (0, 4)
    assert counted(engine.stack, "cpu")["audit_busy_requests_total"] == 1


# What may go wrong.


@pytest.mark.parametrize("tier", ["primary", "secondary"])
def test_a_store_that_fails_is_not_compared(tier: str, engine: Engine) -> None:
    engine.serve(keys(4))
    if tier == "secondary":
        evict_all(engine.stack)
    context, _ = engine.begin(keys(4))
    manager_of(engine.stack).complete_store(engine.prepare(keys(4), context), context, success=False)
    engine.settle()
    assert counted(engine.stack, "cpu") == {"audit_abandoned_blocks_total": {"failed_store": 4}}
    check_nothing_is_held(engine.stack)


def test_a_reset_while_the_engine_writes_leaves_no_row_behind(engine: Engine) -> None:
    engine.serve(keys(4))
    context, _ = engine.begin(keys(4))
    written = engine.prepare(keys(4), context)
    manager_of(engine.stack).reset_cache()
    assert engine.prepare(keys(4), context) == [], "a key was given to a second store before the first had ended"
    manager_of(engine.stack).complete_store(written, context)
    engine.settle()
    assert not manager_of(engine.stack).primary.blocks
    check_nothing_is_held(engine.stack)
    assert counted(engine.stack, "cpu") == {"audit_abandoned_blocks_total": {"reset": 4}}


def evict_all(stack: Stack) -> None:
    """Fill the primary tier with other blocks."""
    context = ReqContext()
    for number in range(4):
        others = keys(NUM_BLOCKS // 4, f"others-{number}")
        output = manager_of(stack).prepare_store(others, context)
        assert output is not None
        manager_of(stack).complete_store(output.keys_to_store, context, success=True)
        assert manager_of(stack).drain_jobs(10.0)
        manager_of(stack).on_schedule_end()
    assert not [key for key in keys(8) if key in manager_of(stack).primary.blocks]


# What follows.


def test_a_tier_that_differs_is_stopped_until_it_is_opened_again(open_stack: OpenStack, tmp_path: Path) -> None:
    with tiered_kv.open_stack(config(nvme(tmp_path), audit=0)) as stack:
        Engine(stack).serve(keys(4))
    settings = config(nvme(tmp_path), audit=0.5, audit_action="stop")
    plain, audited = ids_by_choice(0.5)
    with tiered_kv.open_stack(settings) as stack:
        engine = Engine(stack, weights=1)
        assert engine.serve(keys(4), plain) == 4, "nobody knows yet"
        assert engine.serve(keys(4), audited) == 0
        assert counted(stack, "nvme")["audit_stopped"] == 1
        assert engine.serve(keys(4), plain) == 0, "what the primary tier had from there is gone, too"
        assert engine.serve(keys(4), plain) == 4, "what this engine has stored since is found"
        assert count_of(stack.counters()["nvme"], "skipped_blocks_total", "disabled") > 0
    assert Engine(open_stack(settings)).serve(keys(4), plain) == 4


def test_every_lookup_is_a_miss_once_the_engine_differs_from_its_own_blocks(
    open_stack: OpenStack,
) -> None:
    plain, audited = ids_by_choice(0.5)
    engine = Engine(open_stack(config(MEMORY, audit=0.5, audit_action="stop")))
    engine.serve(keys(4), plain)
    engine.weights = 1
    engine.serve(keys(4), audited)
    assert counted(engine.stack, "cpu")["audit_stopped"] == 1
    assert engine.serve(keys(4), plain) == 0
    assert engine.serve(keys(4), plain) == 0
    engine.stack.put([b"one"], bytes(BLOCK_BYTES))
    assert len(engine.stack.get([b"one"])) == engine.stack.contains([b"one"]) == 0
