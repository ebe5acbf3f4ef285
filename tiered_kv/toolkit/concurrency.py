"""The concurrency of stores: how many of their parts run at once, found by trying.

Each part that runs takes the interpreter from the engine, so as few run as the storage needs. `PartQueue` calls this
class under its lock, on the scheduler's thread and on workers. The limit stays between 1 and `limit_max`, and a part
that hangs for ever keeps no other part from running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

VERDICT_PARTS: Final = 8  # times the limit: parts that end at one limit before its rate is known
GAIN_MIN: Final = 1.4  # a trial's rate, over the rate before it, from which the higher limit stays
PAUSE_MAX: Final = 64  # verdicts between two trials, at most; each trial that gains nothing doubles their number
STALL_S: Final = 1.0
"""If no part begins or ends in this time, the running parts hang, perhaps for ever: one more may run."""


class StoreConcurrency:
    """Finds the limit by trials: a trial doubles the limit, and keeps it if stores become faster.

    The caller holds its lock. A rate is in blocks a second. Only time in which at least one part runs counts.

    `limit_max` is the highest limit; `clock` returns seconds of a monotonic clock. Without calls of `begin` and `end`
    the limit stays at `begins_at`.
    """

    def __init__(self, limit_max: int, clock: Callable[[], float], *, begins_at: int = 1) -> None:
        self.limit = begins_at
        self.limit_max = limit_max
        self.clock = clock
        self._running = 0  # parts now
        self._since_s = 0.0  # when the last part began or ended, by `clock`
        self._parts = self._blocks = 0  # ended since the last verdict
        self._busy_s = 0.0  # time with a running part since the last verdict
        self._before: tuple[int, float] | None = None  # the limit before the trial, and its rate, while a trial lasts
        self._pause = self._pause_left = 1  # verdicts until the next trial

    def begin(self) -> None:
        self._tick()
        self._running += 1

    def end(self, blocks: int, *, is_behind: bool) -> bool:
        """Note the end of a part of `blocks` blocks; return whether the limit has risen.

        Only parts that end while other stores wait (`is_behind`) show the storage's rate.
        """
        self._tick()
        self._running -= 1
        if not is_behind:  # one running part suffices again, beside parts that may hang
            self._parts = self._blocks = 0
            self._busy_s = 0.0
            self.limit = min(self._running + 1, self.limit_max)
            self._before, self._pause_left = None, self._pause
            return False
        self._parts += 1
        self._blocks += blocks
        if self._parts < VERDICT_PARTS * self.limit:
            return False
        rate = self._blocks / max(self._busy_s, 1e-9)
        self._parts = self._blocks = 0
        self._busy_s = 0.0
        return self._judge(rate)

    def rise_if_stalled(self) -> None:
        if self.has_stalled:
            self.limit = min(self._running + 1, self.limit_max)

    @property
    def has_stalled(self) -> bool:
        """Whether all parts that may run seem to hang; see `STALL_S`."""
        return self._running >= self.limit and self.clock() - self._since_s > STALL_S

    def _judge(self, rate: float) -> bool:
        before, self._before = self._before, None
        if before is not None and rate < GAIN_MIN * before[1]:
            self.limit = before[0]
            self._pause = self._pause_left = min(2 * self._pause, PAUSE_MAX)
            return False
        if before is not None:
            self._pause = self._pause_left = 1
        self._pause_left -= 1
        if self._pause_left > 0 or self.limit >= self.limit_max:
            return False
        self._before = self.limit, rate
        self.limit = min(2 * self.limit, self.limit_max)
        return True

    def _tick(self) -> None:
        now_s = self.clock()
        if self._running:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s
