"""A scenario: a seed for the stack, and the actions on it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random

ACTIONS = 240

_WEIGHTS = {
    # The engine.
    "start": 26,
    "step": 60,
    "ask_on": 3,
    "finish_transfer": 30,
    "fail_store": 2,
    "abandon": 2,
    "prefetch": 3,
    "touch": 2,
    "ask_once": 2,
    "store_others": 8,
    "store_under_a_load": 3,
    "take_events": 1,
    "reset": 2,
    # Time.
    "wait_briefly": 16,
    "wait_long": 2,
    # Fate.
    "change_mood": 6,
    "wedge_busy": 6,
    "heal": 8,
    "damage": 16,
    "lose_everything": 1,
}


@dataclass(frozen=True, slots=True)
class Action:
    name: str
    salt: int

    def __str__(self) -> str:
        return f"{self.name}:{self.salt:x}"


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    actions: tuple[Action, ...]

    @classmethod
    def of_seed(cls, seed: int) -> Scenario:
        """Return the scenario of a seed; the same in every process."""
        rng = Random(seed)
        names = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=ACTIONS)
        return cls(seed, tuple(Action(name, rng.getrandbits(32)) for name in names))

    def without(self, start: int, stop: int) -> Scenario:
        return replace(self, actions=self.actions[:start] + self.actions[stop:])

    def __str__(self) -> str:
        lines = (f"  {number:3} {action}" for number, action in enumerate(self.actions))
        return "\n".join(itertools.chain((f"seed {self.seed}, {len(self.actions)} actions:",), lines))
