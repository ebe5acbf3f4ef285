"""A whole stack on one thread, in simulated time: a seed makes a history, and the same seed makes it again.

    failure = run(Scenario.of_seed(17))
    if failure is not None:
        print(failure.shortest())

The manager is the real one, with the simulation's clock. Its tiers move each block at a simulated time, and become
slow, full, wedged, wrong, failing or empty. After every action the promises are checked: no wrong byte, no phantom, no
answer after its bound, budgets held, no row used twice. In the end all faults cease, and every tier must be used again.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from tests.support.simulation.scenario import Action, Scenario
from tests.support.simulation.simulation import Simulation

__all__ = ["Action", "Failure", "Scenario", "run"]

_RUNS_MAX = 400


@dataclass(frozen=True, slots=True)
class Failure:
    scenario: Scenario
    error: str
    trace: str

    def shortest(self) -> Failure:
        """Return the failure after leaving out all actions without which the run still fails, in whichever way."""
        failure, runs = self, 0
        size = max(len(failure.scenario.actions) // 2, 1)
        while True:
            start, found = 0, False
            while start < len(failure.scenario.actions) and runs < _RUNS_MAX:
                runs += 1
                shorter = run(failure.scenario.without(start, start + size))
                if shorter is not None:
                    failure, found = shorter, True
                else:
                    start += size
            if runs >= _RUNS_MAX or (size == 1 and not found):
                return failure
            size = max(size // 2, 1)

    def __str__(self) -> str:
        return f"{self.error}\n{self.scenario}\n{self.trace}"


def run(scenario: Scenario) -> Failure | None:
    """Play a scenario; return the failure, or None."""
    simulation = Simulation(scenario.seed)
    done = 0
    try:
        for done, action in enumerate(scenario.actions, start=1):  # noqa: B007
            simulation.act(action)
        simulation.conclude()
    except Exception as error:  # whatever the stack raises breaks a promise
        played = scenario.without(done, len(scenario.actions))
        return Failure(played, f"{type(error).__name__}: {error}", traceback.format_exc())
    finally:
        simulation.close()
    return None
