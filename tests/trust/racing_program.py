"""Races on a stack of its own: `racing_program.py CONFIG SEED SECONDS RESET_EVERY`, and a report as JSON at the end.

It goes on, if need be, until it has loaded something, and reset if it shall.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from tests.support.races import Prompts, phantoms, problems_at_rest
from tests.support.racing_scheduler import RacingScheduler
from tiered_kv.stack import open_stack

ROUNDS_MAX = 20


def main() -> None:
    config, seed, seconds, reset_every = sys.argv[1:]
    with open_stack(json.loads(config)) as stack:
        prompts = Prompts(stack.config.block.bytes)
        scheduler = RacingScheduler(stack.manager, stack.region, prompts, seed=int(seed), has_epochs=False)
        print("running", flush=True)
        for _ in range(ROUNDS_MAX):
            scheduler.run(float(seconds), reset_every=int(reset_every))
            has_reset = scheduler.race.resets > 0 or reset_every == "0"
            if scheduler.race.problems or (scheduler.race.verified_blocks and has_reset):
                break
        race = scheduler.finish()
        race.note([*problems_at_rest(stack.manager), *phantoms(stack.manager)])
    print(json.dumps(asdict(race)), flush=True)


if __name__ == "__main__":
    main()
