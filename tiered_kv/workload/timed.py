"""The manager's calls as a scheduler makes them, with the time spent inside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

import numpy as np

from tiered_kv.base import BlockIDsLoadStoreSpec, OffloadKey, PrepareStoreOutput, ReqContext
from tiered_kv.tiering.manager import TieringOffloadingManager


class TimedManager:
    """Passes calls on to a manager and adds up how long they take. Used by one thread.

    Args:
        manager: The manager that is measured.
    """

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._manager = manager
        self._spent_s = 0.0

    def take_spent_s(self) -> float:
        """Return the time spent inside calls since this was last asked, in seconds."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def on_new_request(self, context: ReqContext) -> None:
        started = perf_counter()
        self._manager.on_new_request(context)
        self._spent_s += perf_counter() - started

    def lookup_many(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool | None]:
        started = perf_counter()
        answers = self._manager.lookup_many(keys, context)
        self._spent_s += perf_counter() - started
        return answers

    def prepare_load(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[int]:
        """Pin the blocks of `keys` and return their rows in the primary tier's region."""
        started = perf_counter()
        spec = self._manager.prepare_load(keys, context)
        self._spent_s += perf_counter() - started
        return rows_of(spec)

    def complete_load(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        started = perf_counter()
        self._manager.complete_load(keys, context)
        self._spent_s += perf_counter() - started

    def prepare_store(self, keys: Sequence[OffloadKey], context: ReqContext) -> PrepareStoreOutput | None:
        started = perf_counter()
        output = self._manager.prepare_store(keys, context)
        self._spent_s += perf_counter() - started
        return output

    def complete_store(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        started = perf_counter()
        self._manager.complete_store(keys, context)
        self._spent_s += perf_counter() - started

    def on_schedule_end(self) -> None:
        started = perf_counter()
        self._manager.on_schedule_end()
        self._spent_s += perf_counter() - started

    def on_request_finished(self, context: ReqContext) -> None:
        started = perf_counter()
        self._manager.on_request_finished(context)
        self._spent_s += perf_counter() - started


def rows_of(spec: object) -> list[int]:
    """Return the rows of the primary tier's region that a transfer spec names."""
    assert isinstance(spec, BlockIDsLoadStoreSpec), "the primary tier gives block ids"
    rows: list[int] = np.asarray(spec.block_ids).tolist()
    return rows
