"""A whole stack on one thread, in simulated time: a seed makes a history, and the same seed makes it again.

    from tests.support.simulation import Scenario, run

    failure = run(Scenario.of_seed(17))
    if failure is not None:
        print(failure.shortest())

The manager is the real one. Its clock is the simulation's, its tiers move each block at a simulated moment of their
own, and fate makes them slow, full, wedged, lying, raising or forgetful. After every action the promises are checked:
no wrong byte, no phantom, no answer later than its bound, budgets held, no row used by two. In the end all faults
cease, and every tier must come to be used again.

`python -m tests.support.simulation --help` runs seeds from a shell.
"""

from tests.support.simulation.runner import Failure, run
from tests.support.simulation.scenario import Action, Scenario

__all__ = ["Action", "Failure", "Scenario", "run"]
