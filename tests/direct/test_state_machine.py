"""Any order of calls, with tiers that hold, fail and hang: right answers, right bytes, and no write after a report."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.direct.conftest import WAIT_S, memory_tier, open_direct
from tests.support.faulty import Gate, HeldJobsTier
from tests.support.stacks import PATIENT, plugged_class
from tiered_kv.base import OffloadKey
from tiered_kv.testing.control import wait_until
from tiered_kv.testing.faults import FailingTier
from tiered_kv.testing.rig import block_content, make_keys
from tiered_kv.tiering.base import SecondaryTierManager, TierSpec

BLOCK_BYTES = 900
STRIDE = 1024
KEYS = make_keys(8)
NUMBERS = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=5, unique=True)
POISON = 0xEE
_names = itertools.count()


@dataclass(eq=False)
class Open:
    """A task whose report has not been processed."""

    kind: str
    keys: list[OffloadKey]
    offsets: list[int]
    epoch: int  # of the call
    answers: list[bool] | None = None

    def report(self, answers: list[bool]) -> None:
        assert self.answers is None, "reported twice"
        self.answers = list(answers)


class DirectMachine(RuleBasedStateMachine):
    """A host with two tiers: a memory tier with faults, and one of the type under test."""

    tier_type: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.pool = np.full(64 * STRIDE, POISON, dtype=np.uint8)
        self.free = list(range(64))
        self.gate = Gate()
        self.epoch = 0
        self.open: list[Open] = []
        self.stored: set[OffloadKey] = set()  # since the last reset
        self.jitter = itertools.cycle([0, 17, 124, 3])
        self.directory = tempfile.mkdtemp()
        self.first = f"disturbed-{next(_names)}"
        machine = self

        class Disturbed(SecondaryTierManager):
            def __new__(cls, spec: TierSpec, view: memoryview, tier_type: str) -> Any:
                machine.failing = FailingTier(memory_tier(spec, view))
                return HeldJobsTier(machine.failing, machine.gate)

        self.registered = plugged_class(self.first, Disturbed)
        self.registered.__enter__()
        place = {} if self.tier_type == "memory" else {"path": f"{self.directory}/tier"}
        limits = {"store_budget": 3 * BLOCK_BYTES, "load_budget": 2 * BLOCK_BYTES, "breaker_failures": 1_000_000}
        self.tiers = open_direct(
            self.pool,
            {"type": self.first, "name": "first", **limits, **PATIENT},
            {"type": self.tier_type, "name": "second", "capacity": "64 MiB", **place, **limits, **PATIENT},
            block_bytes=BLOCK_BYTES,
        )

    failing: FailingTier

    def begin(self, kind: str, numbers: list[int]) -> Open | None:
        if kind != "contains" and len(self.free) < len(numbers):
            return None
        keys = [KEYS[number] for number in numbers]
        places = [] if kind == "contains" else [self.free.pop() for _ in numbers]
        task = Open(kind, keys, [place * STRIDE + next(self.jitter) for place in places], self.epoch)
        self.open.append(task)
        return task

    def block(self, offset: int) -> Any:
        return self.pool[offset : offset + BLOCK_BYTES]

    @rule(numbers=NUMBERS)
    def store(self, numbers: list[int]) -> None:
        task = self.begin("store", numbers)
        if task is not None:
            for key, offset in zip(task.keys, task.offsets, strict=True):
                self.block(offset)[:] = np.frombuffer(block_content(key, BLOCK_BYTES, self.epoch), dtype=np.uint8)
            self.tiers.store(task.keys, task.offsets, task.report)

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        task = self.begin("load", numbers)
        if task is not None:
            self.tiers.load(task.keys, task.offsets, task.report)

    @rule(numbers=NUMBERS)
    def contains(self, numbers: list[int]) -> None:
        task = self.begin("contains", numbers)
        assert task is not None
        self.tiers.contains(task.keys, task.report)

    @rule()
    def reset(self) -> None:
        self.tiers.reset()
        self.epoch += 1
        self.stored.clear()

    @rule(is_open=st.booleans())
    def hold(self, is_open: bool) -> None:
        (self.gate.open if is_open else self.gate.close)()

    @rule(failing=st.booleans())
    def fail(self, failing: bool) -> None:
        self.failing.failing = failing

    @invariant()
    def take_back(self) -> None:
        """Check the reported tasks, and overwrite their memory at once."""
        for task in [task for task in self.open if task.answers is not None]:
            self.open.remove(task)
            self.check(task)
            for offset in task.offsets:
                self.block(offset)[:] = POISON
                self.free.insert(0, offset // STRIDE)

    def check(self, task: Open) -> None:
        assert task.answers is not None
        assert len(task.answers) == len(task.keys)
        for key, offset, answer in zip(task.keys, task.offsets, task.answers, strict=False):
            found = bytes(self.block(offset))
            if task.kind == "store":
                assert found == block_content(key, BLOCK_BYTES, task.epoch), "a store does not write"
                if answer and task.epoch == self.epoch:
                    self.stored.add(key)
            elif answer:
                epochs = range(task.epoch, self.epoch + 1)
                assert any(found == block_content(key, BLOCK_BYTES, epoch) for epoch in epochs), "wrong bytes"

    @rule()
    def settle(self) -> None:
        self.gate.open()
        self.failing.failing = False
        wait_until(lambda: all(task.answers is not None for task in self.open), WAIT_S)
        self.take_back()
        assert (self.pool == POISON).all(), "a tier wrote after a report"
        keys = list(self.stored)
        assert self.tiers.wait("contains", keys) == [True] * len(keys)

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.gate.open()
            is_closed = self.tiers.close()
            self.registered.__exit__(None, None, None)
            shutil.rmtree(self.directory)
        assert is_closed
        assert (self.pool == POISON).all()


def case_of(tier_type: str) -> Any:
    machine = type(f"Direct{tier_type.title()}", (DirectMachine,), {"tier_type": tier_type})
    case: Any = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30)
    return case


TestMemory: Callable[[], None] = case_of("memory")
TestNvme: Callable[[], None] = case_of("nvme")
TestFs: Callable[[], None] = case_of("fs")
