"""A policy that others wrote costs its hits at most: never wrong bytes, never an exception to the engine."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.base import OffloadKey, ReqContext, make_offload_key
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.cpu.policies import BUILT_IN_POLICIES, RequestChain, RowTable, make_policy
from tiered_kv.cpu.policies.checked import CheckedPolicy
from tiered_kv.cpu.policies.recency import LRUPolicy
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.cpu.rows import PrimaryRows
from tiered_kv.errors import ConfigError
from tiered_kv.stack.facade import rows_of
from tiered_kv.tiering.manager import TieringOffloadingManager

NUM_BLOCKS = 8
CALLS_BEFORE_FAULT = 10
Evicted = list[int] | None


class Own(LRUPolicy):
    """A policy of another module, without faults."""


class Sorting(Own):
    """Reorders the lists that it is given."""

    def admit(self, rows: Sequence[int], chain: RequestChain) -> None:
        super().admit(rows, chain)
        rows.reverse()  # type: ignore[attr-defined]  # it is a list

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        super().use(rows, chain)
        rows.reverse()  # type: ignore[attr-defined]


class Cleaning(Own):
    """Takes the chain from each block that leaves."""

    def remove(self, rows: Collection[int]) -> None:
        super().remove(rows)
        for row in rows:
            self.table.chain[row] = None


class Raising(Own):
    """Raises in one of its methods, before or after the method has done its work."""

    method = "evict"
    is_late = False
    calls = 0

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__(name)
        if name != Raising.method:
            return own

        def call(*arguments: object) -> object:
            self.calls += 1
            if self.calls > CALLS_BEFORE_FAULT:
                if Raising.is_late:
                    own(*arguments)
                raise RuntimeError("out of order")
            return own(*arguments)

        return call


class Lazy(Own):
    """Does not set the blocks' chain and position."""

    def use(self, rows: Sequence[int], chain: RequestChain) -> None:
        return


class Wrong(Own):
    """Returns from `evict` what `answer` makes of the right victims, of all blocks ever seen and of the step."""

    answer: Callable[[Any, list[int], RowTable, int], Any]
    calls = 0

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self.seen: dict[int, None] = {}

    def add(self, rows: Collection[int]) -> None:
        self.seen.update(dict.fromkeys(rows))
        super().add(rows)

    def evict(self, count: int, step: int, spare: RequestChain | None = None) -> Evicted:
        self.calls += 1
        victims = super().evict(count, step, spare)
        if self.calls < CALLS_BEFORE_FAULT or victims is None:
            return victims
        wrong: Evicted = Wrong.answer(victims, [row for row in self.seen if row not in victims], self.table, step)
        return wrong


ANSWERS: dict[str, Callable[[Any, list[int], RowTable, int], Any]] = {
    "pinned": lambda right, others, table, _: [
        *right[:-1],
        next((row for row in others if table.ref_cnt[row] > 0), right[-1]),
    ],
    "being written": lambda right, others, table, _: [
        *right[:-1],
        next((row for row in others if table.ref_cnt[row] < 0), right[-1]),
    ],
    "of this step": lambda right, others, table, step: [
        *right[1:],
        next((row for row in others if table.step[row] == step), right[0]),
    ],
    "no row": lambda right, *_: [*right[1:], NUM_BLOCKS],
    "before the first": lambda right, *_: [*right[1:], -1],
    "no number": lambda right, *_: [*right[1:], "7"],
    "too few": lambda right, *_: right[1:],
    "too many": lambda right, others, *_: [*right, *others],
    "twice": lambda right, *_: [*right[1:], right[-1], right[-1]],
    "no list": lambda *_: 3,
    "lost": lambda *_: None,
}


class Engine:
    """Requests store and load at random; `memory` is what each row's bytes would be."""

    def __init__(self, policy: str) -> None:
        self.manager = TieringOffloadingManager(PrimaryRows(CPUBackend(PrimaryRegion(NUM_BLOCKS, 64)), policy))
        self.random = random.Random(5)
        self.memory: dict[int, OffloadKey] = {}
        self.stores: list[tuple[list[OffloadKey], ReqContext]] = []
        self.loads: list[tuple[list[OffloadKey], list[int], ReqContext]] = []
        self.num_loaded = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            context = ReqContext(f"request-{step}")
            self.manager.on_new_request(context)
            first = self.random.randrange(20)
            wanted = [make_offload_key(b"hash-%d" % number, 0) for number in range(first, first + 4)]
            hits = [key for key in wanted if self.manager.lookup(key, context)]
            self._begin_store(wanted[: self.random.randrange(1, 5)], context)
            if hits:
                rows = rows_of(self.manager.prepare_load(hits, context))
                self.loads.append((hits, rows, context))
            while len(self.loads) > 1:
                self._end_load(*self.loads.pop(0))
            while len(self.stores) > 1:
                self.manager.complete_store(*self.stores.pop(0))
            if step % 50 == 49:
                self.manager.reset_cache()
            self.manager.on_schedule_end()

    def end(self) -> None:
        for load in self.loads:
            self._end_load(*load)
        for store in self.stores:
            self.manager.complete_store(*store)
        self.manager.reset_cache()
        assert self.manager.primary.backend.get_num_free_blocks() == NUM_BLOCKS, "a row was lost"
        self.manager.shutdown()

    def _begin_store(self, wanted: list[OffloadKey], context: ReqContext) -> None:
        output = self.manager.prepare_store(wanted, context)
        if output is not None:
            self.memory.update(zip(rows_of(output.store_spec), output.keys_to_store, strict=True))
            self.stores.append((output.keys_to_store, context))

    def _end_load(self, wanted: list[OffloadKey], rows: list[int], context: ReqContext) -> None:
        assert [self.memory[row] for row in rows] == wanted, "wrong bytes"
        self.num_loaded += len(rows)
        self.manager.complete_load(wanted, context)


def run(policy: str) -> None:
    engine = Engine(policy)
    engine.run(300)
    assert engine.num_loaded > 100
    engine.end()


def test_a_policy_that_keeps_the_rules_stays(caplog: pytest.LogCaptureFixture) -> None:
    run(f"{__name__}:Own")
    run(f"{__name__}:Sorting")  # it may do with its lists as it likes
    run(f"{__name__}:Cleaning")
    assert not caplog.records


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("method", ["admit", "add", "remove", "use", "evict", "end_step"])
def test_a_policy_that_raises_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str, is_late: bool
) -> None:
    monkeypatch.setattr(Raising, "method", method)
    monkeypatch.setattr(Raising, "is_late", is_late)
    run(f"{__name__}:Raising")
    assert [record.getMessage() for record in caplog.records] == [REPLACED % ("Raising", method)]


@pytest.mark.parametrize("answer", ANSWERS)
def test_wrong_victims_are_not_evicted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(Wrong, "answer", staticmethod(ANSWERS[answer]), raising=False)
    run(f"{__name__}:Wrong")
    assert [record.getMessage() for record in caplog.records] == [REPLACED % ("Wrong", "evict")]


def test_a_policy_that_does_not_place_its_blocks_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    run(f"{__name__}:Lazy")
    assert [record.getMessage() for record in caplog.records] == [REPLACED % ("Lazy", "use")]


def test_built_in_policies_are_called_directly() -> None:
    for name in BUILT_IN_POLICIES:
        engine = Engine(name)
        assert not isinstance(engine.manager.primary.policy, CheckedPolicy)
        engine.end()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
        (
            "from tiered_kv.cpu.policies.recency import LRUPolicy\nclass Own(LRUPolicy):\n  def __init__(self): pass",
            "2 blocks",
        ),
    ],
)
def test_a_policy_that_cannot_be_made_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    (tmp_path / "own_policy.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_policy", raising=False)
    with pytest.raises(ConfigError, match=message):
        make_policy("own_policy:Own", RowTable(2))


REPLACED = f"the eviction policy {__name__}:%s is replaced by lru, because of its %s"
