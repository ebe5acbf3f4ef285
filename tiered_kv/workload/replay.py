"""Drives real bytes through a manager by a sequence of requests, and checks every loaded block.

The replay acts as an engine's scheduler and worker, in steps:

1. As scheduler it admits requests, makes the manager's calls for each, and ends with `on_schedule_end`.
2. As worker it compares every byte of the blocks that were pinned for a load, and writes the rows that were reserved
   for a store. The next step reports those transfers as complete.

Requests run in their order, as fast as the stack accepts them. Their timestamps are ignored. A request of a session
waits until the session's last request is done, and the requests after it wait, too. A request also waits while the
tiers' store budgets are used up. An engine would not wait: it has other work between two stores, the replay has none.

The command `replay` calls `replay`, and the simulation steps a `Replay` without bytes, each on one thread. What must
stay true: every loaded byte is compared, and the end leaves nothing pinned or reserved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ParamSpec, TypeVar

import numpy as np

from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.hints import HINTS_KEY, SESSION_KEY
from tiered_kv.stack.facade import rows_of
from tiered_kv.tiering.manager import TieringOffloadingManager
from tiered_kv.workload.content import BlockContent, Rows
from tiered_kv.workload.request import Request, block_key
from tiered_kv.workload.tally import CorruptBlock, Counts, LatencyUs, ReplayReport, Tally, traffic

Args = ParamSpec("Args")
Result = TypeVar("Result")

_LOOKUP_BLOCKS = 64
"""Keys in a lookup call. A request makes no further call after an absent block."""
_IDLE_S = 0.0005
"""Sleep after a step in which every request waited for storage."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How requests are driven."""

    concurrency: int = 8  # requests at once
    store_blocks: int = 32
    """Blocks that a step stores for one request, as a server stores a chunk of its prefill."""
    request_timeout_s: float = 5.0
    """How long a request waits for its prefix. Blocks that have not come by then count as missed."""
    store_timeout_s: float = 10.0
    """How long a request waits for store budget in every tier. Then a tier without budget skips the blocks."""
    drain_timeout_s: float = 30.0
    """How long to wait for stores in flight after the last request."""


def replay(
    manager: TieringOffloadingManager,
    kv_view: memoryview,
    requests: Iterable[Request],
    settings: ReplaySettings | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> ReplayReport:
    """Run `requests` through the manager of a stack that has no other user; `kv_view` is its primary region.

    `should_stop` is called before every step; when it returns True, the replay finishes normally. An exception of
    `requests`, as for a bad line of a trace, ends the replay, and leaves nothing pinned.
    """
    run = Replay(manager, np.asarray(kv_view), settings or ReplaySettings())
    return run.drive(iter(requests), should_stop, on_progress)


class _Phase(Enum):
    LOOKUP = "lookup"
    """It waits for answers about its prefix."""
    LOAD = "load"
    """The worker reads its pinned blocks."""
    ROOM = "room"
    """It waits for the tiers' store budgets."""
    STORE = "store"
    """The worker writes its reserved rows."""
    DONE = "done"


@dataclass(slots=True)
class _Running:
    """A request that has been admitted.

    Args:
        done_blocks: Number of its blocks that were loaded, or submitted to be stored.
        transfer_keys: Keys of the blocks that the worker transfers. `transfer_ids`, `transfer_rows` and
            `transfer_tiers` are their ids, their rows, and for a load the tiers that had them.
        reserved_blocks: Blocks for which every tier has reserved store budget.
        room_deadline_s: When the wait for store budgets ends, by the replay's clock.
    """

    session: str
    ids: tuple[int, ...]
    keys: list[OffloadKey]
    context: ReqContext
    deadline_s: float
    phase: _Phase = _Phase.LOOKUP
    done_blocks: int = 0
    transfer_keys: list[OffloadKey] = field(default_factory=list)
    transfer_ids: list[int] = field(default_factory=list)
    transfer_rows: list[int] = field(default_factory=list)
    transfer_tiers: list[str] = field(default_factory=list)
    reserved_blocks: int = 0
    room_deadline_s: float = 0.0


class Replay:
    """The state of one replay; used by one thread.

    Args:
        rows: The primary region; None for a simulation, which moves no bytes.
        clock: Seconds, for the deadlines of requests.
        sleep: Called after a step in which every request waited.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        rows: Rows | None,
        settings: ReplaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._manager = manager
        self._spent_s = 0.0
        """Seconds that calls of the manager took since the step began."""
        self._rows = rows
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._block_bytes = manager.primary.backend.block_size
        self._store_blocks = self._chunk_blocks()
        self._content = BlockContent(1 if rows is None else self._block_bytes)
        self._running: list[_Running] = []
        self._next: Request | None = None  # the request that waits for its session
        self._admitted = 0
        self.tally = Tally(hits=dict.fromkeys(manager.counters(), 0))

    @property
    def running(self) -> int:
        return len(self._running)

    def drive(
        self,
        requests: Iterator[Request],
        should_stop: Callable[[], bool],
        on_progress: Callable[[Tally], None],
    ) -> ReplayReport:
        started_s = time.monotonic()
        interrupted = False
        try:
            self._fill(requests)
            while self._running and not (interrupted := should_stop()):
                self.step()
                on_progress(self.tally)
                self._fill(requests)
        finally:
            self._abandon()
        drain_began_s = time.monotonic()
        drained = self._manager.drain_jobs(0.0 if interrupted else self._settings.drain_timeout_s)
        ended_s = time.monotonic()
        seconds, tally, counters = ended_s - started_s, self.tally, self._manager.counters()
        waiting_s = tally.waiting_s + ended_s - drain_began_s
        spent_s = {"bytes": tally.bytes_s, "manager": sum(tally.step_s), "waiting": waiting_s}
        hits = sum(tally.hits.values())
        return ReplayReport(
            **{each.name: getattr(tally, each.name) for each in fields(Counts)},
            misses=tally.blocks - hits,
            hit_rate=round(hits / tally.blocks, 6) if tally.blocks else 0.0,
            seconds=round(seconds, 3),
            spent_s={name: round(each, 3) for name, each in spent_s.items()},
            step_us=LatencyUs.of_seconds(tally.step_s),
            steps=len(tally.step_s),
            block_bytes=self._block_bytes,
            interrupted=interrupted,
            drained=drained,
            tiers={name: traffic(tier_hits, counters.get(name, {}), seconds) for name, tier_hits in tally.hits.items()},
        )

    def _fill(self, requests: Iterator[Request]) -> None:
        while len(self._running) < self._settings.concurrency:
            request = self._next or next(requests, None)
            self._next = None
            if request is None:
                break
            if self.serves(request.session):
                self._next = request
                break
            self.admit(request)

    def serves(self, session: str) -> bool:
        """Return whether a request of a session is running. The session's next request then has to wait."""
        return bool(session) and any(running.session == session for running in self._running)

    def admit(self, request: Request) -> None:
        params: dict[str, object] = {} if request.hints is None else {HINTS_KEY: request.hints}
        if request.session:
            params[SESSION_KEY] = request.session
        context = ReqContext(f"replay-{self._admitted}", params or None)
        self._timed(self._manager.on_new_request, context)
        deadline_s = self._clock() + self._settings.request_timeout_s
        keys = [block_key(hash_id) for hash_id in request.hash_ids]
        self._running.append(_Running(request.session, request.hash_ids, keys, context, deadline_s))
        self._admitted += 1

    def step(self) -> None:
        """Run one step of the scheduler for every request, and then the worker's transfers."""
        all_wait = True
        for running in self._running:
            all_wait &= not self._advance(running)
        self._timed(self._manager.on_schedule_end)
        self.tally.step_s.append(self._spent_s)
        self._spent_s = 0.0
        began_s = time.perf_counter()
        for running in self._running:
            self._transfer(running)
        ended_s = time.perf_counter()
        self.tally.bytes_s += ended_s - began_s
        self._running = [running for running in self._running if running.phase is not _Phase.DONE]
        if all_wait and self._running:
            self._sleep(_IDLE_S)
            self.tally.waiting_s += time.perf_counter() - ended_s

    def _advance(self, running: _Running) -> bool:
        """Make the scheduler's calls for one request; return False if it waits for its prefix, or for room."""
        if running.phase is _Phase.LOOKUP:
            prefix_blocks = self._look_up(running)
            if prefix_blocks is None:
                return False
            if self.tally.requests == 0:
                self.tally.first_request_hits = prefix_blocks
            self.tally.requests += 1
            self.tally.blocks += len(running.keys)
            if prefix_blocks:
                self._begin_load(running, prefix_blocks)
                return True
        elif running.phase is _Phase.LOAD:
            self._timed(self._manager.complete_load, running.transfer_keys, running.context)
        elif running.phase is _Phase.STORE:
            self._release_room(running)
            self._timed(self._manager.complete_store, running.transfer_keys, running.context)
            self.tally.stored_blocks += len(running.transfer_keys)
        return self._begin_store(running)

    def _timed(self, call: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        started_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._spent_s += time.perf_counter() - started_s

    def _look_up(self, running: _Running) -> int | None:
        """Return how many leading blocks can be loaded now; None if the request should wait."""
        known_blocks = 0
        waits = False
        for first in range(0, len(running.keys), _LOOKUP_BLOCKS):
            keys = running.keys[first : first + _LOOKUP_BLOCKS]
            answers = self._timed(self._manager.lookup_many, keys, running.context)
            hit = next((i for i, answer in enumerate(answers) if answer is not True), len(answers))
            if not waits:
                known_blocks += hit
            # Only a None before the first False can extend the prefix.
            absent = next((i for i, answer in enumerate(answers) if answer is False), len(answers))
            waits |= None in answers[:absent]
            if absent < len(answers):
                break
        if waits and self._clock() < running.deadline_s:
            return None
        self.tally.timed_out_requests += waits
        return known_blocks

    def _begin_load(self, running: _Running, prefix_blocks: int) -> None:
        keys = running.keys[:prefix_blocks]
        running.transfer_rows = rows_of(self._timed(self._manager.prepare_load, keys, running.context))
        running.transfer_keys = keys
        running.transfer_ids = list(running.ids[:prefix_blocks])
        running.transfer_tiers = [self._manager.hit_tier(key, running.context) for key in keys]
        for tier in running.transfer_tiers:
            self.tally.hits[tier] += 1
        running.done_blocks = prefix_blocks
        running.phase = _Phase.LOAD

    def _begin_store(self, running: _Running) -> bool:
        """Reserve rows for the next blocks of a request. It is done if it has no further block, or gets no rows.

        Returns:
            False if it waits for the tiers' store budgets.
        """
        while running.done_blocks < len(running.keys):
            chunk = slice(running.done_blocks, running.done_blocks + self._store_blocks)
            if not self._reserve_room(running, len(running.keys[chunk])):
                return False
            output = self._timed(self._manager.prepare_store, running.keys[chunk], running.context)
            if output is None:
                # Without these blocks the following ones cannot be used, so they are not offered.
                self.tally.skipped_stores += len(running.keys) - running.done_blocks
                break
            running.done_blocks = min(chunk.stop, len(running.keys))
            if output.keys_to_store:
                id_of = dict(zip(running.keys[chunk], running.ids[chunk], strict=True))
                running.transfer_keys = output.keys_to_store
                running.transfer_ids = [id_of[key] for key in output.keys_to_store]
                running.transfer_rows = rows_of(output.store_spec)
                running.phase = _Phase.STORE
                return True
            self._release_room(running)
        self._release_room(running)
        self._timed(self._manager.on_request_finished, running.context)
        running.phase = _Phase.DONE
        return True

    def _chunk_blocks(self) -> int:
        """Return how many blocks a step stores for a request: no more than every tier has store budget for."""
        blocks = self._settings.store_blocks
        if not self._settings.store_timeout_s:
            return blocks
        budgets: list[int | None] = [each.get("store_budget_bytes") for each in self._manager.counters().values()]
        return min([blocks, *(budget // self._block_bytes for budget in budgets if budget is not None)])

    def _reserve_room(self, running: _Running, blocks: int) -> bool:
        """Reserve store budget in every tier, until the store is complete; return False if the request should wait."""
        if not self._settings.store_timeout_s:
            return True
        if self._timed(self._manager.reserve_stores, blocks):
            running.reserved_blocks = blocks
            return True
        if running.phase is not _Phase.ROOM:
            running.phase = _Phase.ROOM
            running.room_deadline_s = self._clock() + self._settings.store_timeout_s
        return self._clock() >= running.room_deadline_s

    def _release_room(self, running: _Running) -> None:
        self._manager.release_stores(running.reserved_blocks)
        running.reserved_blocks = 0

    def _transfer(self, running: _Running) -> None:
        """Do the worker's part: check the blocks of a load, or write the blocks of a store."""
        if self._rows is None:
            return
        if running.phase is _Phase.LOAD:
            wrong = self._content.check(self._rows, running.transfer_rows, running.transfer_ids)
            self.tally.verified_blocks += len(running.transfer_rows) - len(wrong)
            for position, offset in wrong:
                hash_id, tier = running.transfer_ids[position], running.transfer_tiers[position]
                self.tally.note_corrupt(CorruptBlock(hash_id, tier, offset))
        elif running.phase is _Phase.STORE:
            self._content.fill(self._rows, running.transfer_rows, running.transfer_ids)

    def _abandon(self) -> None:
        for running in self._running:
            self._release_room(running)
            if running.phase is _Phase.LOAD:
                self._manager.complete_load(running.transfer_keys, running.context)
            elif running.phase is _Phase.STORE:
                # The worker may not have written these blocks.
                self._manager.complete_store(running.transfer_keys, running.context, success=False)
            self._manager.on_request_finished(running.context)
        self._running.clear()
