"""Processes of one namespace whose storage loses the epoch's mark: each with a clock, and a memory, of its own."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tiered_kv.toolkit import epoch as module
from tiered_kv.toolkit.epoch import Epoch

NEVER = math.inf
PROCESSES = 3
STEP_S = 100.0


class Storage:
    """One mark, in a storage that may not know conditional writes."""

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.is_conditional = True

    def read(self, deadline: float) -> bytes | None:
        return self.data

    def create(self, data: bytes, deadline: float) -> None:
        if self.data is None or not self.is_conditional:
            self.data = data

    def write(self, data: bytes, deadline: float) -> None:
        self.data = data


class Process:
    """A process that stores blocks of its weights, whose number is that of the last reset that it knew."""

    def __init__(self, storage: Storage, weights: int, ahead_s: float) -> None:
        self.epoch = Epoch(storage)
        self.weights = weights
        self.was_reset = False
        self.ahead_s = ahead_s
        self.retired: dict[str, None] = {}
        self.value = ""


class Losses(RuleBasedStateMachine):
    """Processes that store, reset and restart while the mark is lost again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.now_s = 1e9
        self.resets = 0
        self.stored: dict[str, set[int]] = {}  # the weights of the blocks in each epoch
        self.processes: list[Process] = []

    @initialize(is_conditional=st.booleans(), ahead_s=st.lists(st.integers(-14, 14), min_size=3, max_size=3))
    def start(self, is_conditional: bool, ahead_s: list[int]) -> None:
        self.storage.is_conditional = is_conditional
        self.processes = [Process(self.storage, 0, ahead) for ahead in ahead_s]
        for index in range(PROCESSES):
            self.use(index)

    @rule(index=st.integers(0, PROCESSES - 1))
    def use(self, index: int) -> None:
        process = self.processes[index]
        known = set(process.retired)
        clock = SimpleNamespace(time=lambda: self.now_s + process.ahead_s, monotonic=time.monotonic)
        with mock.patch.object(module, "_retired", process.retired), mock.patch.object(module, "time", clock):
            process.epoch.recheck()
            value = process.epoch.saved_value(NEVER)
            assert process.epoch.value(NEVER) == value
        assert value == process.value or value not in known, "it joined an epoch that it saw retired"
        process.value = value
        blocks = self.stored.setdefault(value, set())
        blocks.add(process.weights)
        self.now_s += STEP_S
        for each in self.processes:
            if each.was_reset:
                assert min(self.stored.get(each.value, {each.weights})) >= each.weights, "an old block after a reset"

    @rule(index=st.integers(0, PROCESSES - 1))
    def reset(self, index: int) -> None:
        process = self.processes[index]
        self.resets += 1
        clock = SimpleNamespace(time=lambda: self.now_s + process.ahead_s, monotonic=time.monotonic)
        with mock.patch.object(module, "_retired", process.retired), mock.patch.object(module, "time", clock):
            process.value = process.epoch.renew()
        process.weights, process.was_reset = self.resets, True
        self.use(index)

    @rule(index=st.integers(0, PROCESSES - 1))
    def restart(self, index: int) -> None:
        self.processes[index] = Process(self.storage, self.resets, self.processes[index].ahead_s)
        self.use(index)

    @rule(found=st.sampled_from([None, b"nonsense"]))
    def lose(self, found: bytes | None) -> None:
        self.storage.data = found
        self.now_s += STEP_S

    def teardown(self) -> None:
        if not self.processes:
            return
        for _ in range(2):
            for index in range(PROCESSES):
                self.use(index)
        if not self.resets:
            assert len({process.value for process in self.processes}) == 1, "the cache stays split"


TestLosses = Losses.TestCase
TestLosses.settings = settings(stateful_step_count=20)
