"""The second process of a soak: `python -m tiered_kv.testing.soak.neighbour CONFIG SEED`, until its input ends.

It replays the same chats as the first, so that each finds what the other has stored, and prints its report as JSON.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import sys
import time

from tiered_kv.stack import open_stack
from tiered_kv.testing.soak.workload import CHATS_SETTINGS, NEIGHBOUR_STEP_S, chats
from tiered_kv.workload.replay import replay
from tiered_kv.workload.tally import Tally


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal all processes get it; the first tells the others
    logging.disable(logging.WARNING)  # what fails is counted
    config, seed = json.loads(sys.argv[1]), int(sys.argv[2])

    def is_over() -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def after_step(tally: Tally) -> None:
        del tally.step_s[:]  # they would be kept for ever
        time.sleep(NEIGHBOUR_STEP_S)

    with open_stack(config) as stack:
        print("running", flush=True)
        report = replay(
            stack.manager,
            stack.kv_view,
            chats(seed),
            CHATS_SETTINGS,
            should_stop=is_over,
            on_progress=after_step,
        )
    print(json.dumps({"verified": report.verified_blocks, "corrupt": report.corrupt_blocks}), flush=True)


if __name__ == "__main__":
    main()
