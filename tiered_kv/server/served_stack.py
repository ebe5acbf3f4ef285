"""One stack that a server serves: its manager, the memory that engines share, and the sessions that use both.

A server has one `ServedStack` for each namespace; `Namespaces` opens it on any thread. Then the server's thread owns
it, and makes all calls of its manager. These things stay true:

- A row belongs to one session until the engine's processes have ended or given it back. So no engine reads bytes of
  another block.
- Only rows with memory are handed out (`HostRegion.ready_rows`).
- Every reset that the file of resets counts is carried out: when the message of the reset comes, or before a step if no
  message came. The file is told that a reset was written only after all tiers have written the reset.

`reset_file` says in which order a pass makes the calls that concern resets.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tiered_kv.base import OffloadKey
from tiered_kv.config.settings import PRIMARY_NAME
from tiered_kv.config.stack_config import StackConfig
from tiered_kv.cpu.backend import CPUBackend
from tiered_kv.errors import ResourceError
from tiered_kv.metrics.series import Snapshot, numbers
from tiered_kv.metrics.vocabulary import SERVER
from tiered_kv.server import protocol
from tiered_kv.server.descriptors import needed_by
from tiered_kv.server.ended import EndedRequests
from tiered_kv.server.generations import Generations
from tiered_kv.server.memory import HostRegion
from tiered_kv.server.questions import QuickTiers
from tiered_kv.server.reset_file import ResetFile
from tiered_kv.server.session_request import RowIndex, SessionRequest
from tiered_kv.stack.open import EngineStack
from tiered_kv.tiering.pace import EngineCost
from tiered_kv.tiering.requests import STATES_MAX

if TYPE_CHECKING:
    from tiered_kv.stack.exporters.status import Observed

GRANT_SHARE: Final = 256
"""Rows that a session is granted in advance: the rows divided by this, or `GRANT_ROWS_MIN` if that is more."""
GRANT_ROWS_MIN: Final = 16
GRANT_MAX_SHARE: Final = 4
"""Limit of the rows that one session has for writing: the rows divided by this."""
GRANTS_MAX_SHARE: Final = 2
"""Limit of the rows that all sessions together have for writing: the ready rows divided by this."""
LEASE_SHARE: Final = 2
"""Limit of the rows that one session leases: the ready rows divided by this."""
LEASES_MAX_SHARE: Final = 3 / 4
"""Limit of the rows that all sessions together lease, as a share of the ready rows. So stores find room."""
REQUESTS_MAX: Final = 50_000
"""Limit of the requests of one session."""
REQUESTS_ALL_MAX: Final = STATES_MAX
"""Limit of the requests of all sessions together. After a reset the manager remembers this many requests from before
the reset, and stores no block of them."""
KEYS_MAX: Final = 1 << 22
"""Limit of the keys of all requests of one session."""
KEYS_ALL_MAX: Final = 1 << 23
"""Limit of the keys of all sessions together."""
ANSWER_S: Final = 1.0
"""Seconds after which an engine takes the server for silent, if the server owes an answer."""
FREE_MEMORY_S: Final = 5.0
"""How long to wait for the memory of a server that was killed. The engines unmap it when they see that it has ended."""


class HostBackend(CPUBackend):
    """Rows with a generation that changes when a row is freed: so engines see that a block is gone.

    A row that has no memory yet is not free: a write to such a row might kill an engine.
    """

    region: HostRegion

    def __init__(self, region: HostRegion, generations: Generations) -> None:
        super().__init__(region)
        self.generations = generations

    @property
    def is_growing(self) -> bool:
        return self.region.is_allocating

    def get_num_free_blocks(self) -> int:
        return len(self._free) + self.region.ready_rows - len(self.table)

    def free_rows(self, rows: Collection[int]) -> None:
        super().free_rows(rows)
        self.generations.bump(rows)


class HostSession(Protocol):
    """A session, as its stack sees it."""

    cost: EngineCost
    granted: dict[int, None]
    requests: dict[int, SessionRequest]
    changed: dict[int, SessionRequest]
    leases: int

    @property
    def is_waiting(self) -> bool: ...

    def answer_changed(self) -> None: ...

    def answer_waiting(self) -> None: ...

    def send(self, code: int, number: int = 0, count: int = 0) -> None: ...

    def close(self) -> None: ...


class ServedStack:
    """A stack with rows that engines map. Any thread may open it; afterwards the server's thread owns it.

    Args:
        config: The stack.
        on_finished: Called on any thread when a job of a tier has ended; returns at once.
        socket_path: The path of the server's socket. The file of resets is beside the socket; without a path there is
            no such file.

    Raises:
        ConfigError, TierError, ResourceError: The stack cannot be opened.
    """

    def __init__(
        self,
        config: StackConfig,
        on_finished: Callable[[], None] = lambda: None,
        socket_path: Path | None = None,
    ) -> None:
        settings = config.primary
        self.config = config
        self.instance = uuid.uuid4().hex
        self.descriptors = needed_by(config)
        self.generations = Generations(config.primary_blocks)
        try:
            region = HostRegion(
                config.primary_blocks,
                config.block.bytes,
                huge_pages=settings.wants_huge_pages,
                reserved=settings.reserved_huge_pages,
                numa_node=settings.numa_node,
                wait_s=FREE_MEMORY_S,
                prefault=settings.prefault is not False,
            )
            self._backend = HostBackend(region, self.generations)
            self.stack = EngineStack(config, backend=self._backend, on_finished=on_finished, has_idle_caller=True)
        except BaseException:
            self.generations.close()
            raise
        self.manager = self.stack.manager
        self.manager.orders.wake = self.manager.removals.wake = on_finished
        self._history = self.stack.history
        self.index = RowIndex(self.manager.primary.row_of, self.generations.values)
        self.sessions: dict[str, HostSession] = {}
        self.changed: dict[HostSession, None] = {}
        """Sessions with requests to answer in this step. A step looks at no other session but the next ones."""
        self.waiting: dict[HostSession, None] = {}
        """Sessions that may be answered without a further message. One that waits no more stays until the step."""
        self.ended = EndedRequests(self.end_leases, self._end_request, self._free_granted)
        self._slowest: HostSession | None = None
        """The session whose engine computes the slowest, as far as is known."""
        self._steps = 0
        self.quick_tiers = QuickTiers(self.manager.contains_many)
        self.requests = self.keys = self.leases = self.granted = 0
        """Requests of all sessions, their keys, and the rows that are leased and granted to them. `ended` has some."""
        self.grant_max = max(1, config.primary_blocks // GRANT_MAX_SHARE)
        self._seen_ready_rows = 0
        """The number of ready rows at the last step."""
        self._resets = ResetFile(socket_path, config.identity.digest.hex())
        if not self._resets.are_all_begun:  # the last server has not carried out all resets
            self._reset_all()
        self._tiers = {name: number for number, name in enumerate(self.stack.tier_names, 1)}

    @property
    def grant_room(self) -> int:
        """Rows that all sessions together may still be granted."""
        return self.region.ready_rows // GRANTS_MAX_SHARE - self.granted

    def check_grant(self, wanted: int) -> None:
        """Refuse a session that wants more rows than all sessions together can ever have.

        The server told the session of all rows, and then the system refused memory for some rows. The error ends the
        session's connection. The engine attaches anew, is told of fewer rows, and asks for fewer rows.

        Raises:
            ResourceError: The session wants too many rows.
        """
        rows = self.region.ready_rows
        is_less = rows < self.config.primary_blocks and not self.region.is_allocating
        if is_less and wanted > max(GRANT_ROWS_MIN, rows // GRANTS_MAX_SHARE):
            raise ResourceError("the server has fewer rows than it has said: attach anew")

    @property
    def leases_max(self) -> int:
        """Rows that one session may lease."""
        return max(1, self.region.ready_rows // LEASE_SHARE)

    @property
    def lease_room(self) -> int:
        """Rows that all sessions together may still lease."""
        return max(0, max(1, int(self.region.ready_rows * LEASES_MAX_SHARE)) - self.leases)

    def observed(self) -> Observed:
        """Return the objects that exporters read. Any thread may call."""
        return dataclasses.replace(self.stack.observed(), snapshot=self._snapshot)

    def _snapshot(self) -> Snapshot:
        gauges = {
            "sessions": len(self.sessions),
            "leased_blocks": self.leases,
            "granted_blocks": self.granted,
            "lacks_huge_pages": int(not self.region.has_huge_pages),
            "ready_bytes": self.region.ready_rows * self.region.block_bytes,
        }
        return self.stack.snapshot().with_families(PRIMARY_NAME, numbers(SERVER, gauges))

    @property
    def region(self) -> HostRegion:
        return self._backend.region

    @property
    def epoch(self) -> int:
        return self.manager.primary.epoch

    @property
    def fds(self) -> list[int]:
        """Descriptors of the rows, of their generations, and of the file of resets, if there is one."""
        return [self.region.fd, self.generations.fd, *([self._resets.fd] if self._resets.fd >= 0 else [])]

    @property
    def is_busy(self) -> bool:
        """Whether the next step may find something without a message."""
        has_jobs = self.manager.jobs_in_flight or (self._history is not None and self._history.has_work)
        is_sweeping = self.manager.primary.is_sweeping
        is_asked = self.manager.orders.has_work or self.manager.removals.exist
        return bool(has_jobs or is_asked or is_sweeping or self.waiting or self.ended)

    def welcome(self) -> protocol.Welcome:
        usable = self.config.primary_blocks if self.region.is_allocating else max(1, self.region.ready_rows)
        grant_max = max(1, usable // GRANT_MAX_SHARE)
        return protocol.Welcome(
            instance=self.instance,
            namespace=self.config.identity.digest.hex(),
            rows=usable,  # without the rows that never get memory: an engine may pin all rows that it is told of
            row_bytes=self.config.block.bytes,
            block_tokens=self.config.block.tokens,
            epoch=self.epoch,
            grant_rows=min(max(usable // GRANT_SHARE, GRANT_ROWS_MIN), grant_max),
            grant_max=grant_max,
            tiers=["cpu", *self.stack.tier_names],
            answer_s=ANSWER_S,
            wait_s=self.config.primary.request_wait,
            prefault=self.region.is_prefaulted,
        )

    def see_resets(self) -> None:
        """Note how many resets the file has, before messages are read."""
        self._resets.see()

    def reset_unasked(self) -> None:
        """Carry out resets whose messages have not come, after messages were read."""
        if self._resets.is_one_left():
            self.reset(None)

    @property
    def is_behind(self) -> bool:
        """Whether the next pass has something to do at once."""
        return bool(self.ended) or self._resets.has_waited

    def step(self, on_error: Callable[[HostSession, Exception], None]) -> None:
        """Answer requests, and end a step of the manager; `on_error` is called with a session that fails."""
        if self._resets.has_waited:  # a lookup may have been sent after a reset that is not carried out yet
            return
        self._steps += 1
        if self._seen_ready_rows != self.region.ready_rows:
            self._seen_ready_rows = self.region.ready_rows
            self.manager.limit_promotions(self._seen_ready_rows)
        if self._resets.is_unnoted and self.manager.has_saved_reset:
            self._resets.note_begun()
        sessions = [*(self.waiting | self.changed)]
        self.changed.clear()
        first = self._steps % max(1, len(sessions))
        for session in sessions[first:] + sessions[:first]:  # no session is always the first to take free leases
            _try(session, session.answer_changed, on_error)
        self.manager.on_schedule_end()
        for session in [*self.waiting]:
            _try(session, session.answer_waiting, on_error)
            if not session.is_waiting:
                self.waiting.pop(session, None)
        if self.ended:
            self.ended.sweep()

    def work(self, *, is_idle: bool) -> None:
        """Let the history work a little; unless the server `is_idle`, only if it has too much to do."""
        if self._history is not None:
            self._history.work(is_idle=is_idle)

    def show_cost(self, session: HostSession) -> None:
        """Show in the metrics what computing costs the slowest engine, after one's cost has changed.

        Loads save that engine the most.
        """
        slowest = self._slowest
        if not self.config.is_prefill_measured or not session.cost.is_known:
            return
        if slowest is None or session.cost.block_s >= slowest.cost.block_s:
            self._slowest = session
        elif slowest is session:  # it may be another one now
            known = [each for each in self.sessions.values() if each.cost.is_known]
            self._slowest = max(known, key=lambda each: each.cost.block_s, default=None)
        if self._slowest is not None:
            self.manager.shown_cost = self._slowest.cost

    def leave(self, session: HostSession) -> None:
        """Forget a session in what steps look at; it may come back."""
        self.changed.pop(session, None)
        self.waiting.pop(session, None)
        if self._slowest is session:
            self._slowest = None

    def look_for_resets(self) -> None:
        """Carry out the resets that only the file asks for: the process that reset has ended, or knew no server."""
        if not self._resets.are_all_begun:
            self.reset(None)

    def reset(self, by: HostSession | None, number: int = 0) -> None:
        """Forget every block, and tell all engines.

        Args:
            by: The session whose engine asks; None if only the file asks.
            number: The place of the reset in the file; 0 if the reset is not in the file. If the reset has been carried
                out, only `by` is told.
        """
        if by is not None and 0 < number <= self._resets.begun:
            by.send(protocol.EPOCH, self.epoch, True)
            return
        if by is not None and not number:
            self._resets.add()
        try:
            self._reset_all(number)
        finally:  # runs also after a mistake of ours: requests of an ended epoch find and store no block
            self.generations.bump_all()
            for session in self.sessions.values():
                session.send(protocol.EPOCH, self.epoch, session is by)

    def _reset_all(self, number: int = 0) -> None:
        self._resets.begin(number)
        self.manager.reset_cache()

    def free(self, rows: Collection[int]) -> None:
        """Free rows that were granted."""
        self._backend.free_rows(rows)

    def end_leases(self, request: SessionRequest, rows: Sequence[int]) -> None:
        """End a request's leases of these rows."""
        if rows:
            for row in rows:
                del request.leased[row]
            self.leases -= len(rows)
            self.manager.end_leases(rows, request.context)

    def _end_request(self, request: SessionRequest) -> None:
        self.requests -= 1
        self.keys -= len(request.codes)
        self.manager.on_request_finished(request.context)

    def _free_granted(self, rows: Collection[int]) -> None:
        self.granted -= len(rows)
        self.free(rows)

    def tiers_of(self, keys: Iterable[OffloadKey], sources: Mapping[OffloadKey, str]) -> bytes:
        """Return for each block the number of the tier that it was promoted from for a request; 0 for none."""
        return bytes(self._tiers.get(sources.get(key, ""), 0) for key in keys)

    def close(self, timeout: float) -> None:
        """Close the stack. Engines keep their mappings, and this process writes no row any more."""
        for session in self.sessions.values():
            session.close()
        self.ended.sweep_all()
        self.region.stop_allocating()
        self.stack.close(timeout)
        if not self._resets.has_noted and self.manager.has_saved_reset:
            self._resets.note_begun()
        self._resets.close()
        self.generations.close()


def _try(session: HostSession, call: Callable[[], None], on_error: Callable[[HostSession, Exception], None]) -> None:
    try:
        call()
    except Exception as error:  # a mistake of ours must not end the cache of the other engines
        on_error(session, error)
