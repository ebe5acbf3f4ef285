"""Play seeds from a shell: `python -m tests.support.simulation --seeds 0:1000`."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.support.simulation import Scenario, run


def main(arguments: list[str] | None = None) -> int:
    """Play the seeds; print each failure's seed and shortest scenario; return how many failed, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", default="0:1000", metavar="FIRST:STOP", help="the seeds to play (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    first, _, stop = options.seeds.partition(":")
    logging.disable(logging.CRITICAL)  # tiers raise on purpose, and the manager logs it
    failed = 0
    seeds = range(int(first), int(stop) if stop else int(first) + 1)
    for seed in seeds:
        failure = run(Scenario.of_seed(seed))
        if failure is not None:
            failed += 1
            print(failure.shortest(), flush=True)
    print(f"{len(seeds)} seeds, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
