"""The second process of a soak: `python -m tests.support.soak.neighbour CONFIG SEED`, until its input ends.

It replays the same chats as the first, so that each finds what the other has stored, looks at its own limits and
holdings as the first does, and prints its report as JSON.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import sys
import time
from dataclasses import astuple

from tests.support.races import problems_at_rest
from tests.support.soak.gauges import PROBLEMS_SHOWN
from tests.support.soak.holdings import Holdings, left_problems
from tests.support.soak.limits import LimitsWatch
from tests.support.soak.workload import CHATS_SETTINGS, NEIGHBOUR_STEP_S, SAMPLE_S, chats
from tiered_kv.stack import open_stack
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal all processes get it; the first tells the others
    logging.disable(logging.WARNING)  # what fails is counted
    config, seed = json.loads(sys.argv[1]), int(sys.argv[2])
    samples: list[Holdings] = []
    problems: list[str] = []
    before = Holdings.now()

    def is_over() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    with open_stack(config) as stack:
        limits = LimitsWatch(stack.manager)

        def after_step(tally: Tally) -> None:
            del tally.step_s[:]  # they would be kept for ever
            if not samples or time.monotonic() - samples[-1].at_s >= SAMPLE_S:
                limits.note_time()
                samples.append(Holdings.now())
                problems.extend(limits.problems())
                del problems[PROBLEMS_SHOWN:]
                limits.note_time()
            time.sleep(NEIGHBOUR_STEP_S)

        print("running", flush=True)
        report = replay(
            stack.manager,
            stack.kv_view,
            chats(seed),
            CHATS_SETTINGS,
            should_stop=is_over,
            on_progress=after_step,
        )
        problems += problems_at_rest(stack.manager)
    problems += left_problems(before, Holdings.now)
    told = {
        "verified": report.verified_blocks,
        "corrupt": report.corrupt_blocks,
        "problems": problems,
        "samples": [astuple(sample) for sample in samples],
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
