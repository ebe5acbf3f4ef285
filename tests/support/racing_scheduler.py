"""A scheduler that races with the threads of its tiers: see `races`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.races import Prompts, Race
from tiered_kv.base import OffloadKey, ReqContext
from tiered_kv.cpu.region import PrimaryRegion
from tiered_kv.stack.facade import rows_of
from tiered_kv.tiering.manager import TieringOffloadingManager

_REQUESTS_OPEN = 6
_LOOKUP_STEPS_MAX = 400
_TRANSFER_STEPS_MAX = 3
_STEP_S = 0.0002


@dataclass(slots=True)
class _Running:
    """A request, and the transfer that it waits for.

    It computes the blocks of the epoch in which it began, also after a reset.
    """

    context: ReqContext
    keys: list[OffloadKey]
    epoch: int
    steps: int = 0
    rows: list[int] = field(default_factory=list)
    moving: list[OffloadKey] = field(default_factory=list)
    is_load: bool = False
    steps_left: int = 0


class RacingScheduler:
    """Plays an engine towards a manager: overlapping requests, slow transfers, resets in between. One thread."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        region: PrimaryRegion,
        prompts: Prompts,
        *,
        seed: int,
        has_epochs: bool = True,
    ) -> None:
        self.race = Race()
        self._manager = manager
        self._region = region
        self._prompts = prompts
        self._chance = random.Random(seed)
        self._has_epochs = has_epochs
        self._epoch = 0
        self._running: list[_Running] = []
        self._number = 0

    def run(self, seconds: float, *, reset_every: int = 0, until: Callable[[], bool] = lambda: False) -> Race:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not until():
            if reset_every and self._chance.randrange(reset_every) == 0:
                self.reset()
            self.step()
        return self.race

    def reset(self) -> None:
        """Reset the cache; loads must return what is stored from now on."""
        self._manager.reset_cache()
        self._epoch += self._has_epochs
        self.race.resets += 1

    def step(self) -> None:
        self.race.calls += 1
        while len(self._running) < _REQUESTS_OPEN:
            self._admit()
        for running in list(self._running):
            if running.moving:
                self._move(running)
            else:
                self._look_up(running)
        self._manager.on_schedule_end()
        time.sleep(_STEP_S)  # what the model takes; the tiers' threads run meanwhile

    def finish(self) -> Race:
        """End the open transfers and requests."""
        for running in list(self._running):
            running.steps_left = 0
            while running.moving:
                self._move(running, stores=False)
            self._end(running)
        self._manager.on_schedule_end()
        return self.race

    def _admit(self) -> None:
        self._number += 1
        context = ReqContext(f"race-{self._number}")
        keys = self._prompts.choose(self._chance)
        self._manager.on_new_request(context)
        self._running.append(_Running(context, keys, self._epoch))
        if self._chance.random() < 0.1:
            self._manager.prefetch(keys, context)

    def _look_up(self, running: _Running) -> None:
        running.steps += 1
        answers = self._manager.lookup_many(running.keys, running.context)
        found = next((index for index, answer in enumerate(answers) if not answer), len(answers))
        waits = found < len(answers) and answers[found] is None
        if waits and running.steps < _LOOKUP_STEPS_MAX and self._chance.random() > 0.01:
            return
        if not found:
            self._store(running)
            return
        running.moving = running.keys[:found]
        self._begin(running, self._manager.prepare_load(running.moving, running.context), is_load=True)

    def _store(self, running: _Running) -> None:
        output = self._manager.prepare_store(running.keys, running.context)
        if output is None or not output.keys_to_store:
            self._end(running)
            return
        running.moving = list(output.keys_to_store)
        self._begin(running, output.store_spec, is_load=False)
        self._region.array[running.rows] = self._prompts.contents(running.moving, running.epoch)

    def _begin(self, running: _Running, spec: object, *, is_load: bool) -> None:
        running.rows, running.is_load = rows_of(spec), is_load
        running.steps_left = self._chance.randint(0, _TRANSFER_STEPS_MAX)

    def _move(self, running: _Running, *, stores: bool = True) -> None:
        """Continue a transfer; at its end compare its rows, which no other thread may have changed."""
        if running.steps_left:
            running.steps_left -= 1
            return
        keys, running.moving = running.moving, []
        blocks = self._region.array[running.rows]
        what = "load" if running.is_load else "block that is being stored"
        self.race.note(self._prompts.differences(keys, blocks, running.epoch, what))
        if running.is_load:
            self.race.verified_blocks += len(keys)
            self._manager.complete_load(keys, running.context)
            if stores and len(keys) < len(running.keys):
                self._store(running)
                return
        else:
            success = self._chance.random() < 0.95
            self._manager.complete_store(keys, running.context, success)
            self.race.stored_blocks += len(keys) if success else 0
        self._end(running)

    def _end(self, running: _Running) -> None:
        if running in self._running:
            self._running.remove(running)
            self._manager.on_request_finished(running.context)
