"""Gates before a tier: budgets, the circuit breaker, and admission, which chooses the blocks worth writing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from tiered_kv.base import OffloadKey
from tiered_kv.cpu.backend import CPUBlock

TRACKED_KEYS_MAX = 1 << 20
"""Keys that are counted in each of two generations, in 200 MiB at most."""


@dataclass(slots=True)
class Budget:
    """The blocks in flight in one direction, and their limit."""

    blocks_max: int
    blocks: int = 0
    expired_blocks: int = 0
    """The part of `blocks` that belongs to expired jobs. When these blocks become free is unknown."""
    reserved_blocks: int = 0
    """Blocks of jobs that will be submitted later: promotions of this step, `reserve_stores` of the manager."""

    @property
    def room(self) -> int:
        return self.blocks_max - self.blocks - self.reserved_blocks

    @property
    def will_grow(self) -> bool:
        """Whether more room will become free: a job that has not expired uses some of the budget."""
        return self.reserved_blocks > 0 or self.blocks > self.expired_blocks


class BreakerState(Enum):
    """The value is `breaker_state` in the counters."""

    CLOSED = 0
    """The tier is in use."""
    OPEN = 2
    """The tier is not in use: it failed too often in a row."""
    HALF_OPEN = 1
    """One job at a time may probe whether the tier works again."""


class Breaker:
    """Opens after `failures_max` failures in a row, half-opens after `cooldown_s`. Owned by the manager's thread."""

    def __init__(self, failures_max: int, cooldown_s: float) -> None:
        self.state = BreakerState.CLOSED
        self.times_opened = 0
        self.cause = ""  # of the last failure since a success that is known
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened_at_s = 0.0

    def succeed(self) -> None:
        """Note that a job succeeded, and close."""
        self._failures = 0
        self.cause = ""
        self.state = BreakerState.CLOSED

    def fail(self, now_s: float, cause: str = "") -> None:
        """Note that a job or lookup failed, or was not answered in time, and why, in words for the log."""
        self.cause = cause or self.cause
        if self.state is BreakerState.OPEN:
            return  # of a job from before it opened, which must not delay the probe
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= self._failures_max:
            self.times_opened += 1
            self.state = BreakerState.OPEN
            self._opened_at_s = now_s

    def answer(self) -> None:
        """Note that the tier has reported an expired job; if open, let a probe through now."""
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN

    def tick(self, now_s: float) -> None:
        """Let a probe through if the cooldown is over."""
        if self.state is BreakerState.OPEN and now_s - self._opened_at_s >= self._cooldown_s:
            self.state = BreakerState.HALF_OPEN


class Selection(NamedTuple):
    """Offered blocks: those to store, those not admitted, and those over the limit in flight."""

    stored: list[CPUBlock]
    refused: list[CPUBlock]
    late: list[CPUBlock]


class Admission:
    """Admits a block when it is offered for the n-th time, so that blocks which are used once do not wear an SSD.

    Counts are kept in two generations: when the younger is full it replaces the older. So memory is bounded without
    work for each key. Owned by the manager's thread.
    """

    reason: ClassVar[str] = "admission"
    """The reason in counters for blocks that are not admitted."""
    has_clock: ClassVar[bool] = False
    """Whether `tick` has something to do."""

    def __init__(self, admit_after: int) -> None:
        self._admit_after = admit_after
        self._young: dict[OffloadKey, int] = {}
        self._old: dict[OffloadKey, int] = {}

    def is_open(self) -> bool:
        """Return whether everything is admitted."""
        return self._admit_after <= 1

    def begin(self, req_id: str) -> None:
        """Note that a request begins. An earlier request with this id has ended."""

    def select(self, offered: list[CPUBlock], room: int, req_id: str) -> Selection:
        """Choose at most `room` blocks of one request. An offer over `room` is not counted."""
        if self.is_open():
            return Selection(offered[:room], [], offered[room:])
        stored: list[CPUBlock] = []
        refused: list[CPUBlock] = []
        for number, block in enumerate(offered):
            if len(stored) == room:
                return Selection(stored, refused, offered[number:])
            (stored if self.admit(block.key) else refused).append(block)
        return Selection(stored, refused, [])

    def again(self, loaded: list[CPUBlock], req_id: str) -> list[CPUBlock]:
        """Return the blocks to offer again after a request has loaded them, not from this tier."""
        return loaded

    def note_hits(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier loads these blocks."""

    def tick(self) -> None:
        """Note the time; called once a step, if it `has_clock`."""

    def snapshot(self) -> Mapping[str, int]:
        """Return counters; any thread may call."""
        return {}

    def admit(self, key: OffloadKey) -> bool:
        """Count one offer of `key`, and return whether to store it."""
        offers = self._young.get(key) or self._old.get(key, 0)
        offers += 1
        if offers >= self._admit_after:
            self._young.pop(key, None)
            self._old.pop(key, None)
            return True
        if len(self._young) >= TRACKED_KEYS_MAX:
            self._old, self._young = self._young, {}
        self._young[key] = offers
        return False
