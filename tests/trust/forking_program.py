"""Forks while a stack's transfers run: `forking_program.py CONFIG FORKS`, with a report as JSON at the end.

Each child tries what it must not: to use its parent's stack, and to close it. It opens a stack of its own where the
tiers can be shared, and lives on while its parent closes the stack and opens another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.patient_nvme import waiting_until_closed
from tests.support.races import Prompts, Race, phantoms, problems_at_rest, race_facade
from tiered_kv.errors import ShutdownError
from tiered_kv.stack import Stack, open_stack

RACE_S = 0.6
CHILD_LIMIT_S = 240
"""For a child, which waits for its parent's transfers, and for a parent: it ends what hangs."""
OWNED = ("nvme",)


def child(stack: Stack, config: dict[str, Any], prompts: Prompts, told: int, tell: int) -> int:
    """Return how many things went wrong; each is told on standard error."""
    problems = []
    keys = prompts.prompts[0]
    out = np.zeros((len(keys), prompts.block_bytes), dtype=np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: stack.put(keys, out),
        "get": lambda: stack.get(keys, out),
        "flush": lambda: stack.flush(),
        "counters": lambda: stack.counters(),
    }
    for name, call in calls.items():
        try:
            call()
            problems.append(f"{name} of the parent's stack works in the child")
        except ShutdownError as error:
            if "process" not in str(error):
                problems.append(f"{name}: {error}")
    stack.close()
    if all(entry["type"] not in OWNED for entry in config["secondary"]):
        with open_stack(config) as own:
            own.put(keys, prompts.contents(keys))
            loaded = own.get(keys, out)
            problems += prompts.differences(keys[:loaded], out[:loaded], 0, "get of the child")
            if not loaded:
                problems.append("the child's own stack has nothing of what it has just stored")
    os.write(tell, b"x")
    os.read(told, 1)
    for problem in problems:
        print(problem, file=sys.stderr)
    return len(problems)


def fork_once(stack: Stack, config: dict[str, Any], prompts: Prompts, seed: int) -> tuple[Stack, list[str]]:
    """Fork amid a race; return the stack that was opened anew, and what went wrong."""
    races: list[Race] = []
    racer = threading.Thread(
        target=lambda: races.append(race_facade(stack, prompts, seed=seed, threads=2, seconds=RACE_S))
    )
    racer.start()
    time.sleep(0.1 + 0.03 * seed)
    child_told, parent_tells = os.pipe()
    parent_told, child_tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        signal.alarm(CHILD_LIMIT_S)  # a child that hangs ends, and is reported
        try:
            os.close(parent_tells)
            code = child(stack, config, prompts, child_told, child_tells)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(child_told)
    os.close(child_tells)
    racer.join(CHILD_LIMIT_S)
    problems = [problem for race in races for problem in race.problems]
    os.read(parent_told, 1)  # or the end, if it has failed
    os.close(parent_told)
    problems += [*problems_at_rest(stack.manager), *phantoms(stack.manager)]
    stack.close()
    try:
        stack = open_stack(config)  # the child still has the parent's descriptors
    except Exception as error:
        problems.append(f"cannot be opened anew while a child lives: {error}")
    os.close(parent_tells)
    _, status = os.waitpid(pid, 0)
    if status:
        problems.append(f"the child ended with {os.waitstatus_to_exitcode(status)}")
    return stack, problems


def main() -> None:
    config, forks = json.loads(sys.argv[1]), int(sys.argv[2])
    prompts = Prompts(config["block"]["bytes"])
    stack = open_stack(config)
    # A fork while some thread imports a module for the first time would leave CPython's lock of that module to the
    # child for ever, whatever the module is. So everything is used once before.
    problems = list(race_facade(stack, prompts, seed=0, threads=2, seconds=RACE_S).problems)
    done = 0
    for seed in range(forks):
        stack, wrong = fork_once(stack, config, prompts, seed)
        problems += wrong
        done += 1
        if wrong:
            break
    stack.close()
    print(json.dumps({"forks": done if not problems else forks, "problems": problems}), flush=True)


if __name__ == "__main__":
    with waiting_until_closed():
        main()
